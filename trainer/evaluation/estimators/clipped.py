"""Per-decision importance sampling with every turn's ratio clipped from above.

    V = (1/n) sum_i sum_t gamma^t prod_{k <= t} min(w_k, c) r_t

Truncated importance sampling (Ionides 2008; Munos et al. 2016, arXiv 1606.02647, for products). Clipping takes weight
away, so the estimate errs downward where rewards are positive and upward where they are negative; how far is not known.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trainer.evaluation.estimators.base import Value, mean
from trainer.evaluation.turns import Floats, Turns, exp_clamped


@dataclass(frozen=True)
class Clipped:
    """Per-decision importance sampling, ratios of turns at most `clip`."""

    name: ClassVar[str] = "clipped"

    clip: float = 2.0
    """Largest ratio of a turn; at least 1."""

    def _weight_EH(self, turns: Turns) -> Floats:
        return exp_clamped(np.cumsum(np.minimum(turns.log_ratio_EH, np.log(self.clip)), axis=1))

    def weights(self, turns: Turns) -> Floats:
        """Clipped weights of whole episodes."""
        return self._weight_EH(turns)[:, -1]

    def value(self, turns: Turns) -> Value:
        """See `Estimator.value`."""
        return mean((self._weight_EH(turns) * turns.reward_EH) @ turns.discount_H)

    def bias(self, turns: Turns) -> str:
        """By the signs of the rewards, if anything was clipped."""
        if not (turns.log_ratio_EH > np.log(self.clip)).any():
            return "none"
        lowest, highest = turns.reward_EH.min(), turns.reward_EH.max()
        if lowest >= 0:
            return "downward"
        return "upward" if highest <= 0 else "unknown"
