"""The arms: estimators that differ in nothing but how they turn a round's scores into advantages."""

from dataclasses import dataclass, field
from typing import Any

GAMMA = 0.95
"""Discount per action of the arms that have one."""
# Without the penalty for malformed actions: it would reach some estimators and not others.
_TWO_LEVELS = {"gamma": GAMMA, "invalid_action_penalty": 0.0}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way from scores to an update."""

    name: str
    label: str
    estimator: str
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the estimator that differ from the library's defaults."""
    loss: dict[str, Any] = field(default_factory=lambda: {"name": "ppo"})
    where: str | None = None
    """Condition on the episodes that are trained on."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further settings of the update."""


ARMS = (
    Arm("grpo", "GRPO", "grpo"),
    Arm("rloo", "RLOO", "rloo"),
    Arm("gigpo", "GiGPO", "gigpo", {**_TWO_LEVELS, "omega": 1.0}),
    # convex with omega 0 is A_S and nothing else.
    Arm(
        "gigpo-step", "GiGPO without the episode term", "gigpo", {**_TWO_LEVELS, "combination": "convex", "omega": 0.0}
    ),
    Arm("hgpo", "HGPO", "hgpo", _TWO_LEVELS),
    Arm(
        "gae",
        "GAE with a value head",
        "gae",
        {"gamma": GAMMA, "lam": 0.95, "batch_key": "collection_round"},
        trainer={"value": {}},
    ),
    Arm(
        "bc-exp",
        "filtered BC x exp(A_S)",
        "gigpo",
        {**_TWO_LEVELS, "omega": 1.0},
        {"name": "bc_exp"},
        "env_return >= 1",
    ),
)
"""In the order of the tables."""
START = "start"
"""The start weights without training."""
BY_NAME = {arm.name: arm for arm in ARMS}
COMPARED = (("gigpo", "grpo"), ("gigpo", "rloo"), ("gigpo", "gae"))
"""The comparisons that were declared beforehand: the one against the other."""
