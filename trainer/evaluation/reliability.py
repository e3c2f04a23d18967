"""Whether an off-policy estimate may be told: how many episodes it rests on, and what they show of the target.

The effective sample size sees only weights that occurred. An action of probability 0.001 that the target takes every
other time is missing from most data sets, and then all weights are alike: small, and very even. What is missing shows
in their mean, which is 1 in expectation: E_b[pi_e / pi_b] is the probability, under the target, of all that the
behaviour policy can do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.evaluation.intervals import LEVEL_Z, spread_of_mean
from trainer.evaluation.turns import Floats, Turns

LEAST_ESS = 50.0
LEAST_SHARE = 0.05
MOST_WEIGHT = 0.2
"""A value is told from an effective sample size of max(50, 5 % of n) on. Then no weight is above 20 % of their sum:
(sum w)^2 / sum w^2 is at most 1 / share^2, 25 for a fifth."""
MEAN_LEVEL = 0.05
"""Probability that the mean weights of a fair data set are refused, all turns together."""
MEAN_SLACK = 1e-3
"""Distance of a mean weight from 1 that is never refused: arithmetic of engines, and too little to matter."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """How evenly weights are spread."""

    n: int
    """Number of weights."""
    ess: float
    """Effective sample size (sum w)^2 / sum w^2 (Kish 1965): n if all are equal, 1 if one decides."""
    max_share: float
    """Largest weight over their sum."""
    mean: float
    """Mean weight: 1 in expectation, unless weights were clipped."""
    objection: str | None = None
    """What else speaks against telling the value."""

    @property
    def refusal(self) -> str | None:
        """Why no value may be told; None if one may."""
        needed = max(LEAST_ESS, LEAST_SHARE * self.n)
        if self.ess >= needed:
            return self.objection
        heavy = f"; one weight is {self.max_share:.0%} of their sum" if MOST_WEIGHT < self.max_share < 1 else ""
        return f"effective sample size {self.ess:.1f} of {self.n}, needed are {needed:.0f}{heavy}"


def reliability(weights: Floats, *, objection: str | None = None) -> Reliability:
    """How evenly weights are spread.

    Args:
        weights: float64, none negative; of none, or none above 0, nothing is effective.
    """
    largest = float(weights.max()) if len(weights) else 0.0
    if largest <= 0:
        return Reliability(len(weights), 0.0, 1.0, 0.0, objection)
    # Scaled by the largest: squares of exp(300) and of exp(-300) stay numbers.
    scaled = weights / largest
    total = float(scaled.sum())
    ess = total**2 / float(scaled @ scaled)
    return Reliability(len(weights), ess, 1.0 / total, largest * (total / len(weights)), objection)


def of_episodes(turns: Turns) -> Reliability:
    """Of the weights of whole episodes, with the objection of `mean_weights`: for estimators that multiply ratios."""
    return reliability(turns.weight_EH[:, -1], objection=mean_weights(turns))


def mean_weights(turns: Turns, *, products: bool = True) -> str | None:
    """What the mean weights say against an estimate: None if each is 1 up to chance.

    Every mean has an interval (`Spread`); all of them hold together with probability 1 - `MEAN_LEVEL` (Bonferroni).

    Args:
        products: look at the products up to each turn too, not at the ratios of single turns alone.
    """
    means = [(place, spread_of_mean(weights)) for place, weights in _weights(turns, products=products)]
    for place, found in means:
        if found is None or abs(found.value - 1) <= max(MEAN_SLACK, LEVEL_Z * found.error):
            continue
        interval = found.interval(MEAN_LEVEL / 2 / len(means))
        if interval is None or not interval[0] <= 1 <= interval[1]:
            why = (
                "the target does what these episodes do not show"
                if found.value < 1
                else "these are not the log-probabilities that the actions were sampled with"
            )
            return f"mean weight {found.value:.3f} +- {found.error:.2g} {place}, 1 is expected: {why}"
    return None


def _weights(turns: Turns, *, products: bool) -> Iterator[tuple[str, Floats]]:
    """Weights whose mean is 1 in expectation, each with its place in words."""
    last = turns.horizon - 1
    for turn in range(turns.horizon):
        yield f"of turn {turn}", turns.ratio_EH[turns.alive_EH[:, turn], turn]
        if products and turn:
            yield f"of turns 0 to {turn}", turns.weight_EH[:, turn]
    if last:
        yield "of all turns", turns.ratio_EH[turns.alive_EH]
