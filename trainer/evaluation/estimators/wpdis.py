"""Weighted per-decision importance sampling (Precup, Sutton, Singh 2000; Thomas 2015, "Safe reinforcement learning").

    V = sum_t gamma^t  sum_i W_it r_it / sum_i W_it

Each turn is normalised on its own. An episode that has ended stays in the sums with the weight that it ended with and
reward 0, so that long episodes do not speak for short ones. Its reliability is that of the weights of whole episodes:
those of the last turn are the most uneven.
"""

from typing import ClassVar

import numpy as np

from lake.statistics.intervals import Floats
from trainer.evaluation.estimators.base import Estimator, Turns, Value
from trainer.evaluation.estimators.wis import TOWARDS_BEHAVIOUR


class WPDIS(Estimator):
    """Self-normalised importance sampling of turns."""

    name: ClassVar[str] = "wpdis"

    def value(self, turns: Turns) -> Value:
        """See `Estimator.value`."""
        weight_EH = turns.weight_EH
        weighted_EH = weight_EH * turns.reward_EH

        def value(counts_E: Floats) -> float:
            total_H = counts_E @ weight_EH
            if not (total_H > 0).all():
                return float(np.nan)
            return float((counts_E @ weighted_EH / total_H) @ turns.discount_H)

        return value

    def bias(self, turns: Turns) -> str:
        """Of order 1/n."""
        del turns
        return TOWARDS_BEHAVIOUR
