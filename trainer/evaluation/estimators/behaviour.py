"""The value of the policy that acted: the plain mean of what was recorded. For comparison."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trainer.evaluation.estimators.base import Estimator, Value, mean
from trainer.evaluation.reliability import Reliability, reliability
from trainer.evaluation.turns import Turns


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
