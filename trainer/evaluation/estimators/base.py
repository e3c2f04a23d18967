"""What an off-policy estimator is.

An estimator says how evenly it listens to the episodes, and gives a function of how often each of them counts: once for
the estimate, as often as its task was drawn for the bootstrap.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from trainer.evaluation.reliability import Reliability
from trainer.evaluation.turns import Floats, Turns

Value = Callable[[Floats], float]
"""counts_E (float64 [E], how often each episode counts) -> estimate; NaN where nothing carries it."""


class Estimator(Protocol):
    """Estimates the value of the target policy from another policy's episodes."""

    @property
    def name(self) -> str:
        """As the command line names it."""

    def reliability(self, turns: Turns) -> Reliability:
        """How evenly the weights are spread that the estimate rests on."""

    def value(self, turns: Turns) -> Value:
        """The estimate as a function of how often each episode counts."""

    def bias(self, turns: Turns) -> str:
        """Where the estimate errs in expectation, in a few words: `none`, `downward`, ..."""


def mean(contribution_E: Floats) -> Value:
    """The plain mean over episodes."""

    def value(counts_E: Floats) -> float:
        return divided(float(counts_E @ contribution_E), float(counts_E.sum()))

    return value


def divided(above: float, below: float) -> float:
    """A quotient; NaN over 0."""
    return above / below if below > 0 else float(np.nan)
