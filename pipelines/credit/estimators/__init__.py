"""Estimators, which turn steps into advantages. Each has one file, with its formula in the class docstring.

`ESTIMATORS` lists all names and imports a class on first use. `REFUSED` lists requests that this project declines.
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
"""Name -> why this project does not offer the estimator, and what to use instead."""


class _Registry(Mapping[str, "type[Estimator]"]):
    """Name -> class, imported on first use. Iteration yields names and imports nothing."""

    def __init__(self, classes: dict[str, str]) -> None:
        self._classes = classes

    def __getitem__(self, name: str) -> "type[Estimator]":
        attribute = self._classes[name]
        estimator: type[Estimator] = getattr(import_module(f"{__name__}.{name}"), attribute)
        return estimator

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
"""Estimators that compare no siblings: an episode alone in its group has an advantage."""


def needs_siblings(estimator: "Estimator") -> bool:
    """Return whether an episode alone in its group always has the advantage 0."""
    return estimator.name not in ALONE and getattr(estimator, "singleton", "zero") == "zero"


def suggest_for_lone_episodes(estimator: "Estimator") -> str:
    """Name the alternatives for groups of one episode, for messages."""
    option = f'`singleton = "raw"` of {estimator.name}, ' if "singleton" in type(estimator).model_fields else ""
    return f"{option}or the estimators {' and '.join(ALONE)}"


def read_title(name: str) -> str:
    """Read the first line of an estimator's module docstring without importing the module."""
    text = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def find_estimator(name: str) -> "type[Estimator]":
    """Return the class of a name; UsageError with alternatives if the name is refused or unknown."""
    from lake.errors import UsageError

    if name in REFUSED:
        msg = f"{name} is not offered: {REFUSED[name]}."
        raise UsageError(msg)
    if name not in ESTIMATORS:
        msg = f"no estimator {name!r}; valid: {', '.join(ESTIMATORS)}"
        raise UsageError(msg)
    return ESTIMATORS[name]
