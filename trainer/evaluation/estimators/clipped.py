"""Per-decision importance sampling with every turn's ratio clipped from above.

    V = (1/n) sum_i sum_t gamma^t prod_{k <= t} min(w_k, c) r_t

Truncated importance sampling (Ionides 2008; Munos et al. 2016, arXiv 1606.02647, for products). Clipping takes weight
away, so the estimate errs downward where rewards are positive and upward where they are negative. How far is seen in
the mean weight, which is 1 in expectation before clipping: what is missing was taken from the outcomes that the target
reaches more often. The effective sample size alone would hide that. Missing weight times the largest reward that was
seen is as much as clipping can have taken, and the interval has room for it.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lake.statistics.intervals import Floats, Spread, spread_by_task
from trainer.evaluation.estimators.base import (
    Estimate,
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

    def _weight_EH(self, turns: Turns) -> Floats:
        return exp_clamped(np.cumsum(np.minimum(turns.log_ratio_EH, np.log(self.clip)), axis=1))

    def reliability(self, turns: Turns) -> Reliability:
        """Of the clipped weights of whole episodes, which must not have lost too much."""
        weight_E = self._weight_EH(turns)[:, -1]
        mean = float(weight_E.mean())
        lost = f"mean weight {mean:.3f}, needed are {LEAST_MEAN}: too much was clipped" if mean < LEAST_MEAN else None
        return reliability(weight_E, objection=lost or mean_weights(turns))

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

    def _with_interval(self, turns: Turns, found: Spread) -> Estimate:
        """Room on the side of the bias: what each weight lacks of 1, its mean, at the extreme rewards of its turn."""
        weight_EH = self._weight_EH(turns)
        ends = [found.value - found.half(), found.value + found.half()]
        extremes = (np.minimum(0.0, turns.reward_EH.min(axis=0)), np.maximum(0.0, turns.reward_EH.max(axis=0)))
        for extreme_H in extremes:
            at_most_E = (weight_EH * turns.reward_EH + (1.0 - weight_EH) * extreme_H) @ turns.discount_H
            bound = spread_by_task(mean(at_most_E), turns.task_E)
            if bound is not None:
                ends += [bound.value - bound.half(), bound.value + bound.half()]
        return Estimate(found.value, min(ends), max(ends))
