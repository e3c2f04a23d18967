"""The arms: estimators that differ in nothing but how they turn a round's scores into advantages."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.learning.anchors import CHOSEN, DEFINITIONS, GAMMA

ANCHORS = DEFINITIONS[CHOSEN]


@dataclass(frozen=True, slots=True)
class Arm:
    """An estimator."""

    name: str
    """As `trajlake credit` calls it."""
    label: str
    options: dict[str, Any] = field(default_factory=dict)
    """Beside the library's defaults."""


ARMS = (
    # Without the penalty for malformed actions: it would reach some estimators and not others.
    Arm("gigpo", "GiGPO", {"gamma": GAMMA, "omega": 1.0, "invalid_action_penalty": 0.0, "anchors": ANCHORS}),
    Arm("grpo", "GRPO"),
    Arm("rloo", "RLOO"),
)
START = "start"
"""The start weights without training."""
BY_NAME = {arm.name: arm for arm in ARMS}
COMPARED = (("gigpo", "grpo"), ("gigpo", "rloo"), ("grpo", "rloo"))
"""The comparisons that were declared beforehand: the one against the other."""
RATES = (1e-4, 3e-4)
"""Learning rates that are tried for each arm."""
