"""What an off-policy estimator reads, gives, and must show before its value may be told.

An estimator says how evenly it weighs the episodes, and gives a function of how often each of them counts: once for
the estimate, not at all while its task is left out for the error.

Whether a value may be told depends on how many episodes it rests on, and on what they show of the target. The effective
sample size sees only weights that occurred. An action of probability 0.001 that the target takes every other time is
missing from most data sets, and then all weights are alike: small, and very even. What is missing shows in their mean,
which is 1 in expectation: E_b[pi_e / pi_b] is the probability, under the target, of all that the behaviour policy can
do. A test of the mean does not see a small mass among noisy weights. Therefore every interval also has room for the
mass that may be missing, with the smallest and the largest outcome that it can have (`Estimator.bounds`).

Axes: `_E` episodes, `_H` turns (shorter episodes are padded at the end), `_P` tasks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from lake.statistics.intervals import LEVEL_Z, Floats, Ints, Spread, spread_by_task, spread_of_mean

MAX_LOG_WEIGHT = 300.0
"""Products of ratios are clamped to exp(+-300), so that squares stay finite; no estimate survives such a weight."""


@dataclass(frozen=True)
class Turns:
    """Rewards and importance ratios of some episodes, turn by turn."""

    log_ratio_EH: Floats
    """Sum over the turn's sampled tokens of log pi_e - log pi_b; 0 where the policy sampled nothing, and as padding."""
    reward_EH: Floats
    """Reward of the turn; 0 as padding."""
    length_E: Ints
    """Turns of each episode, at least 1."""
    state_EH: Ints
    """Number of the state the turn was taken in: equal numbers are one state; -1 as padding."""
    task_E: Ints
    """Number of the episode's task, 0 .. P-1."""
    gamma: float = 1.0
    """Discount per turn."""

    @property
    def episodes(self) -> int:
        """E."""
        return len(self.length_E)

    @property
    def horizon(self) -> int:
        """H."""
        return int(self.reward_EH.shape[1])

    @cached_property
    def alive_EH(self) -> npt.NDArray[np.bool_]:
        """Turns that were taken."""
        taken_EH: npt.NDArray[np.bool_] = np.arange(self.horizon) < self.length_E[:, None]
        return taken_EH

    @cached_property
    def discount_H(self) -> Floats:
        """The discount of each turn, gamma ** t."""
        return np.asarray(self.gamma, np.float64) ** np.arange(self.horizon)

    @cached_property
    def ratio_EH(self) -> Floats:
        """pi_e / pi_b of each turn; 1 as padding."""
        return exp_clamped(self.log_ratio_EH)

    @cached_property
    def weight_EH(self) -> Floats:
        """Product of the ratios up to and including each turn; what an episode ended with goes on as padding."""
        return exp_clamped(np.cumsum(self.log_ratio_EH, axis=1))

    @cached_property
    def return_E(self) -> Floats:
        """Discounted return of each episode."""
        return np.asarray(self.reward_EH @ self.discount_H, np.float64)

    @cached_property
    def extremes_H(self) -> tuple[Floats, Floats]:
        """Smallest and largest discounted sum of rewards from each turn on in any episode, 0 included."""
        gains_EH = self.reward_EH * self.discount_H
        rest_EH = np.cumsum(gains_EH[:, ::-1], axis=1)[:, ::-1]
        return np.minimum(0.0, rest_EH.min(axis=0)), np.maximum(0.0, rest_EH.max(axis=0))


def exp_clamped(log_EH: Floats) -> Floats:
    """Weights of their logarithms, finite."""
    return np.asarray(np.exp(np.clip(log_EH, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)), np.float64)


LEAST_ESS = 50.0
LEAST_SHARE = 0.05
MOST_WEIGHT = 0.2
"""A value is told from an effective sample size of max(50, 5 % of n) on. Then no weight is above 20 % of their sum:
(sum w)^2 / sum w^2 is at most 1 / share^2, 25 for a fifth."""
MEAN_LEVEL = 0.05
"""Probability that the mean weights of a fair data set are refused, all turns together."""
MEAN_SLACK = 1e-3
"""Distance of a mean weight from 1 that is never refused: arithmetic of engines, and too little to matter."""
BOUND_TAIL = 0.01
"""Probability outside of each bound for missing mass. Smaller than an interval's 0.025, because the values that are
reported are those whose mean weight is high by chance, and then the bound is too low."""


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
    """How evenly weights are spread: float64, none negative; of none, or none above 0, nothing is effective."""
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


def mean_weights(turns: Turns) -> str | None:
    """What the mean weights say against an estimate: None if each is 1 up to chance.

    Every mean has an interval (`Spread`); all of them hold together with probability 1 - `MEAN_LEVEL` (Bonferroni).
    """
    means = [(place, spread_of_mean(weights)) for place, weights in _weights(turns)]
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


def _weights(turns: Turns) -> Iterator[tuple[str, Floats]]:
    """Weights whose mean is 1 in expectation, each with its place in words."""
    for turn in range(turns.horizon):
        yield f"of turn {turn}", turns.ratio_EH[turns.alive_EH[:, turn], turn]
        if turn:
            yield f"of turns 0 to {turn}", turns.weight_EH[:, turn]
    if turns.horizon > 1:
        yield "of all turns", turns.ratio_EH[turns.alive_EH]


Value = Callable[[Floats], float]
"""counts_E (float64 [E], how often each episode counts) -> estimate; NaN where nothing carries it."""


class Estimate(NamedTuple):
    """An estimate, or why there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    refused: str | None = None


class Estimator(ABC):
    """Estimates the value of the target policy from another policy's episodes."""

    name: ClassVar[str]
    """As the command line names it."""

    def reliability(self, turns: Turns) -> Reliability:
        """How evenly the weights are spread that the estimate rests on: those of whole episodes, unless overridden."""
        return of_episodes(turns)

    @abstractmethod
    def value(self, turns: Turns) -> Value:
        """The estimate as a function of how often each episode counts."""

    def bias(self, turns: Turns) -> str:
        """Where the estimate errs in expectation, in a few words: `none` (unless overridden), `downward`, ..."""
        del turns
        return "none"

    def estimate(self, turns: Turns) -> Estimate:
        """Value and 95 % interval, or the refusal: of `reliability`, or because nothing says how large the error is.

        One task has no interval: its episodes say nothing of other tasks.
        """
        if refusal := self.reliability(turns).refusal:
            return Estimate(None, refused=refusal)
        value = self.value(turns)
        if not turns.task_E.any():
            return Estimate(value(np.ones(turns.episodes)))
        found = spread_by_task(value, turns.task_E)
        if found is None or found.error == 0:
            return Estimate(None, refused="every task gives the same value, so that nothing tells how far off it is")
        return self._with_room(turns, self._with_interval(turns, found))

    def weights(self, turns: Turns) -> Floats | None:
        """Return the product of ratios up to each turn, float64 [E, H]; None for an estimator that rests on none."""
        return turns.weight_EH

    def bounds(self, turns: Turns) -> list[Spread]:
        """Return what the value is at least and at most, whatever the target does that these episodes do not show.

        The value is E_b[sum_t gamma^t W_t r_t] plus the rest: the target's mass on actions that are missing (or were
        clipped away), times what follows them. From turn t on that mass is E_b[W_{t-1} - W_t]. What follows lies in the
        range of the rewards that were seen from that turn on, 0 included. The bound holds for every estimator, as it
        bounds the value and not the estimate.
        """
        weight_EH = self.weights(turns)
        if weight_EH is None:
            return []
        missing_EH = -np.diff(weight_EH, axis=1, prepend=1.0)
        seen_E = (weight_EH * turns.reward_EH) @ turns.discount_H
        spreads = (spread_by_task(mean(seen_E + missing_EH @ rest_H), turns.task_E) for rest_H in turns.extremes_H)
        return [spread for spread in spreads if spread is not None]

    def _with_room(self, turns: Turns, sampled: Estimate) -> Estimate:
        """Return the interval that reaches to the bounds and beyond them by their own errors."""
        if sampled.low is None or sampled.high is None:
            return sampled
        bounds = self.bounds(turns)
        low = min([sampled.low, *(bound.value - bound.half(BOUND_TAIL) for bound in bounds)])
        high = max([sampled.high, *(bound.value + bound.half(BOUND_TAIL) for bound in bounds)])
        return sampled._replace(low=low, high=high)

    def _with_interval(self, turns: Turns, found: Spread) -> Estimate:
        """The estimate with its interval, which an estimator with another error makes wider."""
        del turns
        return Estimate(found.value, *(found.interval() or (None, None)))


def mean(contribution_E: Floats) -> Value:
    """The plain mean over episodes."""

    def value(counts_E: Floats) -> float:
        return divided(float(counts_E @ contribution_E), float(counts_E.sum()))

    return value


def divided(above: float, below: float) -> float:
    """A quotient; NaN over 0."""
    return above / below if below > 0 else float(np.nan)


class Behaviour(Estimator):
    """(1/n) sum_i G_i, with G_i = sum_t gamma^t r_t."""

    name: ClassVar[str] = "behaviour"

    def reliability(self, turns: Turns) -> Reliability:
        """Every episode alike."""
        return reliability(np.ones(turns.episodes))

    def weights(self, turns: Turns) -> None:
        """Return None: nothing is weighed."""
        del turns

    def value(self, turns: Turns) -> Value:
        """See `Estimator.value`."""
        return mean(turns.return_E)
