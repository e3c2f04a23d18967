"""Per-decision importance sampling with every turn's ratio clipped from above.

    V = (1/n) sum_i sum_t gamma^t prod_{k <= t} min(w_k, c) r_t

Truncated importance sampling (Ionides 2008; Munos et al. 2016, arXiv 1606.02647, for products). Clipping takes weight
away, so the estimate errs downward where rewards are positive and upward where they are negative. How far is seen in
the mean weight, which is 1 in expectation before clipping: what is missing was taken from the outcomes that the target
reaches more often. The effective sample size alone would hide that. The interval has room for what clipping took, as it
has for actions that these episodes do not show (`Estimator.bounds`).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lake.statistics.intervals import Floats
from trainer.evaluation.estimators.base import (
    Estimator,
    Reliability,
    Turns,
    Value,
    exp_clamped,
    mean,
    mean_weights,
    reliability,
)

LEAST_MEAN = 0.8
"""Mean of the clipped weights from which on an estimate may be told: a fifth of the weight lost at most."""


@dataclass(frozen=True)
class Clipped(Estimator):
    """Per-decision importance sampling, ratios of turns at most `clip`."""

    name: ClassVar[str] = "clipped"

    clip: float = 2.0
    """Largest ratio of a turn; at least 1."""

    def weights(self, turns: Turns) -> Floats:
        """Return the products of clipped ratios; see `Estimator.weights`."""
        return exp_clamped(np.cumsum(np.minimum(turns.log_ratio_EH, np.log(self.clip)), axis=1))

    def reliability(self, turns: Turns) -> Reliability:
        """Of the clipped weights of whole episodes, which must not have lost too much."""
        weight_E = self.weights(turns)[:, -1]
        mean = float(weight_E.mean())
        lost = f"mean weight {mean:.3f}, needed are {LEAST_MEAN}: too much was clipped" if mean < LEAST_MEAN else None
        return reliability(weight_E, objection=lost or mean_weights(turns))

    def value(self, turns: Turns) -> Value:
        """See `Estimator.value`."""
        return mean((self.weights(turns) * turns.reward_EH) @ turns.discount_H)

    def bias(self, turns: Turns) -> str:
        """By the signs of the rewards, if anything was clipped."""
        if not (turns.log_ratio_EH > np.log(self.clip)).any():
            return "none"
        lowest, highest = turns.reward_EH.min(), turns.reward_EH.max()
        if lowest >= 0:
            return "downward"
        return "upward" if highest <= 0 else "unknown"
