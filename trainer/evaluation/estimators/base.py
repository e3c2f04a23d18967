"""What an off-policy estimator is.

An estimator says how evenly it listens to the episodes, and gives a function of how often each of them counts: once for
the estimate, not at all while its task is left out for the error.

The value of the policy that acted: the plain mean of what was recorded. For comparison.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from trainer.evaluation.intervals import Spread, spread_by_task
from trainer.evaluation.reliability import Reliability, reliability
from trainer.evaluation.turns import Floats, Turns

Value = Callable[[Floats], float]
"""counts_E (float64 [E], how often each episode counts) -> estimate; NaN where nothing carries it."""


class Told(NamedTuple):
    """An estimate, or why there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    refused: str | None = None


class Estimator(ABC):
    """Estimates the value of the target policy from another policy's episodes."""

    name: ClassVar[str]
    """As the command line names it."""

    @abstractmethod
    def reliability(self, turns: Turns) -> Reliability:
        """How evenly the weights are spread that the estimate rests on."""

    @abstractmethod
    def value(self, turns: Turns) -> Value:
        """The estimate as a function of how often each episode counts."""

    @abstractmethod
    def bias(self, turns: Turns) -> str:
        """Where the estimate errs in expectation, in a few words: `none`, `downward`, ..."""

    def told(self, turns: Turns) -> Told:
        """Value and 95 % interval, or the refusal: of `reliability`, or because nothing says how large the error is.

        One task has no interval: its episodes say nothing of other tasks.
        """
        if refusal := self.reliability(turns).refusal:
            return Told(None, refused=refusal)
        estimate = self.value(turns)
        value = estimate(np.ones(turns.episodes))
        if not turns.task_E.any():
            return Told(value)
        found = spread_by_task(estimate, turns.task_E)
        if found is None or found.error == 0:
            return Told(None, refused="every task gives the same value, so that nothing tells how far off it is")
        return self._told(turns, found)

    def _told(self, turns: Turns, found: Spread) -> Told:
        """The estimate with its interval, which an estimator with an error beyond sampling makes wider."""
        del turns
        return Told(found.value, *(found.interval() or (None, None)))


def mean(contribution_E: Floats) -> Value:
    """The plain mean over episodes."""

    def value(counts_E: Floats) -> float:
        return divided(float(counts_E @ contribution_E), float(counts_E.sum()))

    return value


def divided(above: float, below: float) -> float:
    """A quotient; NaN over 0."""
    return above / below if below > 0 else float(np.nan)


@dataclass(frozen=True)
class Behaviour(Estimator):
    """(1/n) sum_i G_i, with G_i = sum_t gamma^t r_t."""

    name: ClassVar[str] = "behaviour"

    def reliability(self, turns: Turns) -> Reliability:
        """Every episode alike."""
        return reliability(np.ones(turns.episodes))

    def value(self, turns: Turns) -> Value:
        """See `Estimator.value`."""
        return mean(turns.return_E)

    def bias(self, turns: Turns) -> str:
        """None."""
        del turns
        return "none"
