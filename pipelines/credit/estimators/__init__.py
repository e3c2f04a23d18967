"""Estimators: steps in, advantages out. One file each, the formula in the class docstring.

`ESTIMATORS` names them all and loads none: a class is imported when it is asked for. `REFUSED` has those that are asked
for and not offered.
"""

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.credit.estimators.protocol import Estimator


_TOKEN_GAE = (
    "a value per token needs a critic's forward pass over every token, which no lake stores; credit is computed from "
    "tables, one row per step. Instead: `gae` works on turns: one stored value per step (steps.value_estimate) and one "
    "for the final observation"
)
_TOKEN_KL = (
    "a KL term per token depends on the weights being trained and on the reference, so it is part of the loss, not of "
    "a stored advantage. Instead: for KL in the reward, the step scorer `kl_in_reward` over the table `ratios` (the k1 "
    "estimate, summed over an action's tokens), as a component of a reward; for KL in the loss, the trainer's loss"
)
REFUSED = {
    "token_gae": _TOKEN_GAE,
    "ppo": _TOKEN_GAE,
    "token_kl": _TOKEN_KL,
    "kl": _TOKEN_KL,
}
"""Name -> why this project does not offer it, and what to use instead."""


class _Registry(Mapping[str, "type[Estimator]"]):
    """Name -> class, imported on first use. Iterating gives the names alone."""

    def __init__(self, classes: dict[str, str]) -> None:
        self._classes = classes

    def __getitem__(self, name: str) -> "type[Estimator]":
        attribute = self._classes[name]
        found: type[Estimator] = getattr(import_module(f"{__name__}.{name}"), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


ESTIMATORS: Mapping[str, "type[Estimator]"] = _Registry(
    {
        "batch_std": "BatchStd",
        "discounted_grpo": "DiscountedGRPO",
        "dr_grpo": "DrGRPO",
        "gae": "GAE",
        "gdpo": "GDPO",
        "gigpo": "GiGPO",
        "gigpo_loo": "GiGPOLOO",
        "grpo": "GRPO",
        "hgpo": "HGPO",
        "maxrl": "MaxRL",
        "opo": "OPO",
        "reinforce_pp": "ReinforcePP",
        "reinforce_pp_baseline": "ReinforcePPBaseline",
        "rloo": "RLOO",
    }
)
"""Every estimator by name."""


ALONE = ("gae", "reinforce_pp")
"""Estimators that compare no siblings: an episode that is alone in its group has an advantage."""


def needs_siblings(estimator: "Estimator") -> bool:
    """Whether an episode that is alone in its group can have no advantage but 0."""
    return estimator.name not in ALONE and getattr(estimator, "singleton", "zero") == "zero"


def for_lone_episodes(estimator: "Estimator") -> str:
    """What credit can be computed by where each group holds one episode, for messages."""
    own = f'`singleton = "raw"` of {estimator.name}, ' if "singleton" in type(estimator).model_fields else ""
    return f"{own}or the estimators {' and '.join(ALONE)}"


def one_line(name: str) -> str:
    """What an estimator is: the first line of its module, which is read and not imported."""
    text = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def estimator_class(name: str) -> "type[Estimator]":
    """The class of a name; UsageError if it is refused (with what to use instead) or unknown (with those that are)."""
    from lake.errors import UsageError

    if name in REFUSED:
        msg = f"{name} is not offered: {REFUSED[name]}."
        raise UsageError(msg)
    if name not in ESTIMATORS:
        msg = f"no estimator {name!r}; valid: {', '.join(ESTIMATORS)}"
        raise UsageError(msg)
    return ESTIMATORS[name]
