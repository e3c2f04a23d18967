"""Whether an off-policy estimate may be told: how many episodes it rests on, and how much one of them decides."""

from dataclasses import dataclass

from trainer.evaluation.turns import Floats

LEAST_ESS = 50.0
LEAST_SHARE = 0.05
MOST_WEIGHT = 0.2
"""A value is told from an effective sample size of max(50, 5 % of n) on. Then no weight is above 20 % of their sum:
(sum w)^2 / sum w^2 is at most 1 / share^2, 25 for a fifth."""


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
        objection: what else speaks against telling the value.
    """
    largest = float(weights.max()) if len(weights) else 0.0
    if largest <= 0:
        return Reliability(len(weights), 0.0, 1.0, 0.0, objection)
    # Scaled by the largest: squares of exp(300) and of exp(-300) stay numbers.
    scaled = weights / largest
    total = float(scaled.sum())
    ess = total**2 / float(scaled @ scaled)
    return Reliability(len(weights), ess, 1.0 / total, largest * (total / len(weights)), objection)
