"""Weighted importance sampling, of whole episodes (Precup, Sutton, Singh 2000).

    V = sum_i W_i G_i / sum_i W_i        W_i = prod_t w_t

The weights are made to add up to 1: biased towards the behaviour policy's value, consistent, and never outside the
range of the returns.
"""

from typing import ClassVar

from lake.statistics.intervals import Floats
from trainer.evaluation.estimators.base import Estimator, Turns, Value, divided

TOWARDS_BEHAVIOUR = "towards behaviour"


class WIS(Estimator):
    """Self-normalised importance sampling of episodes."""

    name: ClassVar[str] = "wis"

    def value(self, turns: Turns) -> Value:
        """See `Estimator.value`."""
        weight_E = turns.weight_EH[:, -1]
        weighted_E = weight_E * turns.return_E

        def value(counts_E: Floats) -> float:
            return divided(float(counts_E @ weighted_E), float(counts_E @ weight_E))

        return value

    def bias(self, turns: Turns) -> str:
        """Of order 1/n."""
        del turns
        return TOWARDS_BEHAVIOUR
