"""Per-decision importance sampling (Precup, Sutton, Singh 2000, "Eligibility traces for off-policy policy evaluation").

    V = (1/n) sum_i sum_t gamma^t W_t r_t        W_t = prod_{k <= t} w_k,   w_k = pi_e / pi_b of turn k

A reward is weighed by the turns up to it only. Unbiased; its variance grows exponentially with the number of turns
(Liu et al. 2018, arXiv 1810.12429).
"""

from typing import ClassVar

from trainer.evaluation.estimators.base import Estimator, Turns, Value, mean


class PDIS(Estimator):
    """Per-decision importance sampling."""

    name: ClassVar[str] = "pdis"

    def value(self, turns: Turns) -> Value:
        """See `Estimator.value`."""
        return mean((turns.weight_EH * turns.reward_EH) @ turns.discount_H)
