"""Importance-sampling estimators of off-policy evaluation, their protocol, and when a value may be reported.

    behaviour  V = (1/n) sum_i G_i                             G_i = sum_t gamma^t r_t
    pdis       V = (1/n) sum_i sum_t gamma^t W_t r_t           W_t = prod_{k <= t} w_k,  w_k = pi_e / pi_b of turn k
    wis        V = sum_i W_i G_i / sum_i W_i                   W_i = prod_t w_t
    wpdis      V = sum_t gamma^t sum_i W_it r_it / sum_i W_it
    clipped    V = (1/n) sum_i sum_t gamma^t prod_{k <= t} min(w_k, c) r_t

An estimator measures how evenly it weighs the episodes. It also returns its value as a function of how often each
episode counts: once for the estimate, and 0 times where the jackknife leaves out its task.

Whether a value is reported depends on the number of episodes behind it and on what they show of the target. The
effective sample size sees only weights that occurred. Suppose the target takes an action of probability 0.001 every
other time. Most data sets lack that action, and then all weights are small and very even. The mean weight shows the
gap, because it is 1 in expectation: E_b[pi_e / pi_b] is the probability, under the target, of everything that the
behaviour policy can do. A test of the mean misses a small mass among noisy weights. Therefore every interval also has
room for the mass that may be missing, with the smallest and the largest outcome it can have (`OpeEstimator.bounds`).

Axes: `_E` episodes, `_H` turns (shorter episodes are padded at the end), `_P` tasks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from lake.statistics import LEVEL_Z, Floats, Ints, Spread, spread_by_task, spread_of_mean

MAX_LOG_WEIGHT = 300.0
"""Log-weights are clamped to +-300, so that squares stay finite; an estimate with such a weight is always refused."""


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
    """Number of the state in which the turn was taken; equal numbers are one state; -1 as padding."""
    task_E: Ints
    """Number of the episode's task, 0 .. P-1."""
    gamma: float = 1.0
    """Discount per turn."""

    @property
    def episodes(self) -> int:
        """Return E."""
        return len(self.length_E)

    @property
    def horizon(self) -> int:
        """Return H."""
        return int(self.reward_EH.shape[1])

    @cached_property
    def alive_EH(self) -> npt.NDArray[np.bool_]:
        """Mask the padding: True where the episode took the turn."""
        mask_EH: npt.NDArray[np.bool_] = np.arange(self.horizon) < self.length_E[:, None]
        return mask_EH

    @cached_property
    def discount_H(self) -> Floats:
        """Return the discount of each turn, gamma ** t."""
        return np.asarray(self.gamma, np.float64) ** np.arange(self.horizon)

    @cached_property
    def ratio_EH(self) -> Floats:
        """Return pi_e / pi_b of each turn; 1 as padding."""
        return exp_clamped(self.log_ratio_EH)

    @cached_property
    def weight_EH(self) -> Floats:
        """Return the product of the ratios up to and including each turn; padding repeats the last product."""
        return exp_clamped(np.cumsum(self.log_ratio_EH, axis=1))

    @cached_property
    def return_E(self) -> Floats:
        """Return the discounted return of each episode."""
        return np.asarray(self.reward_EH @ self.discount_H, np.float64)

    @cached_property
    def extremes_H(self) -> tuple[Floats, Floats]:
        """Return the smallest and largest discounted sum of rewards from each turn on in any episode, 0 included."""
        gains_EH = self.reward_EH * self.discount_H
        tail_EH = np.cumsum(gains_EH[:, ::-1], axis=1)[:, ::-1]
        return np.minimum(0.0, tail_EH.min(axis=0)), np.maximum(0.0, tail_EH.max(axis=0))


def exp_clamped(log_EH: Floats) -> Floats:
    """Exponentiate log-weights, clamped to finite values."""
    return np.asarray(np.exp(np.clip(log_EH, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)), np.float64)


LEAST_ESS = 50.0
LEAST_SHARE = 0.05
MOST_WEIGHT = 0.2
"""A value needs an effective sample size of at least max(50, 5 % of n). Then no weight is above 20 % of their sum:
(sum w)^2 / sum w^2 is at most 1 / share^2, 25 for a fifth."""
MEAN_LEVEL = 0.05
"""Probability that the mean weights of a fair data set are refused, over all turns together."""
MEAN_SLACK = 1e-3
"""Distance of a mean weight from 1 that is never refused: the arithmetic of engines causes such small differences."""
BOUND_TAIL = 0.01
"""Probability outside each bound for missing mass. It is below an interval's 0.025 to offset selection: reported values
are those whose mean weight is high by chance, which makes the bound too low."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """Evenness of importance weights."""

    n: int
    """Number of weights."""
    ess: float
    """Effective sample size (sum w)^2 / sum w^2 (Kish 1965): n if all weights are equal, 1 if one dominates."""
    max_share: float
    """Largest weight over their sum."""
    mean: float
    """Mean weight: 1 in expectation, unless weights were clipped."""
    objection: str | None = None
    """Further reason not to report the value."""

    @property
    def refusal(self) -> str | None:
        """Return why the value must not be reported; None if it may be."""
        needed = max(LEAST_ESS, LEAST_SHARE * self.n)
        if self.ess >= needed:
            return self.objection
        heavy = f"; one weight is {self.max_share:.0%} of their sum" if MOST_WEIGHT < self.max_share < 1 else ""
        return f"effective sample size {self.ess:.1f} of {self.n}, needed are {needed:.0f}{heavy}"


def measure_reliability(weights: Floats, *, objection: str | None = None) -> Reliability:
    """Measure the evenness of non-negative float64 weights; the sample size is 0 if no weight is above 0."""
    largest = float(weights.max()) if len(weights) else 0.0
    if largest <= 0:
        return Reliability(len(weights), 0.0, 1.0, 0.0, objection)
    # Dividing by the largest keeps squares of exp(300) and exp(-300) finite and above 0.
    scaled = weights / largest
    total = float(scaled.sum())
    ess = total**2 / float(scaled @ scaled)
    return Reliability(len(weights), ess, 1.0 / total, largest * (total / len(weights)), objection)


def measure_episode_reliability(turns: Turns) -> Reliability:
    """Measure the weights of complete episodes, for estimators that multiply ratios."""
    return measure_reliability(turns.weight_EH[:, -1], objection=find_weight_objection(turns))


def find_weight_objection(turns: Turns) -> str | None:
    """Return the first mean weight that differs from 1 beyond chance, as a reason; None without one.

    Every mean has an interval (`Spread`); all of them hold together with probability 1 - `MEAN_LEVEL` (Bonferroni).
    """
    weights = []
    for turn in range(turns.horizon):
        weights.append((f"of turn {turn}", turns.ratio_EH[turns.alive_EH[:, turn], turn]))
        if turn:
            weights.append((f"of turns 0 to {turn}", turns.weight_EH[:, turn]))
    if turns.horizon > 1:
        weights.append(("of all turns", turns.ratio_EH[turns.alive_EH]))
    means = [(label, spread_of_mean(group)) for label, group in weights]
    for label, spread in means:
        if spread is None or abs(spread.value - 1) <= max(MEAN_SLACK, LEVEL_Z * spread.error):
            continue
        interval = spread.interval(MEAN_LEVEL / 2 / len(means))
        if interval is None or not interval[0] <= 1 <= interval[1]:
            cause = (
                "the target does what these episodes do not show"
                if spread.value < 1
                else "these are not the log-probabilities that the actions were sampled with"
            )
            return f"mean weight {spread.value:.3f} +- {spread.error:.2g} {label}, 1 is expected: {cause}"
    return None


ValueFunction = Callable[[Floats], float]
"""counts_E (float64 [E], how often each episode counts) -> estimate; NaN where no counted episode has weight."""


class OpeEstimate(NamedTuple):
    """A value with its interval, or the reason why it is refused."""

    value: float | None
    low: float | None = None
    high: float | None = None
    refused: str | None = None


class OpeEstimator(ABC):
    """Estimates the value of the target policy from another policy's episodes."""

    name: ClassVar[str]
    """Name in the output of `trajlake ope`."""
    bias_direction: ClassVar[str] = "none"
    """Direction in which the estimate errs in expectation."""

    def reliability(self, turns: Turns) -> Reliability:
        """Measure the weights behind the estimate: by default those of complete episodes."""
        return measure_episode_reliability(turns)

    @abstractmethod
    def value(self, turns: Turns) -> ValueFunction:
        """Return the estimate as a function of how often each episode counts."""

    def bias(self, turns: Turns) -> str:
        """Return the direction of the bias on these turns."""
        del turns
        return self.bias_direction

    def estimate(self, turns: Turns) -> OpeEstimate:
        """Return the value with its 95 % interval, or the reason why it is refused.

        One task has a value but no interval, because its episodes say nothing about other tasks.
        """
        if refusal := self.reliability(turns).refusal:
            return OpeEstimate(None, refused=refusal)
        value = self.value(turns)
        if not turns.task_E.any():
            return OpeEstimate(value(np.ones(turns.episodes)))
        spread = spread_by_task(value, turns.task_E)
        if spread is None or spread.error == 0:
            return OpeEstimate(None, refused="every task gives the same value, so its error is unknown")
        estimate = self._add_interval(turns, spread)
        if estimate.low is None or estimate.high is None:
            return estimate
        bounds = self.bounds(turns)
        low = min([estimate.low, *(bound.value - bound.half(BOUND_TAIL) for bound in bounds)])
        high = max([estimate.high, *(bound.value + bound.half(BOUND_TAIL) for bound in bounds)])
        return estimate._replace(low=low, high=high)

    def weights(self, turns: Turns) -> Floats | None:
        """Return the product of ratios up to each turn, float64 [E, H]; None for an estimator without ratios."""
        return turns.weight_EH

    def bounds(self, turns: Turns) -> list[Spread]:
        """Return a lower and an upper bound of the value over all behaviour that these episodes do not show.

        The value is E_b[sum_t gamma^t W_t r_t] plus a remainder: the target's mass on actions that are missing (or were
        clipped away), times the rewards after them. From turn t on that mass is E_b[W_{t-1} - W_t]. The rewards after
        them lie in the range of the recorded sums from that turn on, 0 included. The bounds hold for every estimator,
        since they bound the value and not the estimate.
        """
        weight_EH = self.weights(turns)
        if weight_EH is None:
            return []
        missing_EH = -np.diff(weight_EH, axis=1, prepend=1.0)
        gain_E = (weight_EH * turns.reward_EH) @ turns.discount_H
        spreads = (
            spread_by_task(build_mean(gain_E + missing_EH @ tail_H), turns.task_E) for tail_H in turns.extremes_H
        )
        return [spread for spread in spreads if spread is not None]

    def _add_interval(self, turns: Turns, spread: Spread) -> OpeEstimate:
        """Add the interval to the value; estimators with further errors override this."""
        del turns
        return OpeEstimate(spread.value, *(spread.interval() or (None, None)))


def build_mean(contribution_E: Floats) -> ValueFunction:
    """Return the plain mean over episodes, as a function of how often each counts."""

    def value(counts_E: Floats) -> float:
        return divide_or_nan(float(counts_E @ contribution_E), float(counts_E.sum()))

    return value


def divide_or_nan(above: float, below: float) -> float:
    """Divide; return NaN if the divisor is not above 0."""
    return above / below if below > 0 else float(np.nan)


class Behaviour(OpeEstimator):
    """Mean return of the episodes as recorded."""

    name: ClassVar[str] = "behaviour"

    def reliability(self, turns: Turns) -> Reliability:
        """Return the reliability of equal weights."""
        return measure_reliability(np.ones(turns.episodes))

    def weights(self, turns: Turns) -> None:
        """Return None: this estimator uses no ratios."""
        del turns

    def value(self, turns: Turns) -> ValueFunction:
        """See `OpeEstimator.value`."""
        return build_mean(turns.return_E)


class PDIS(OpeEstimator):
    """Per-decision importance sampling.

    Precup, Sutton, Singh 2000, "Eligibility traces for off-policy policy evaluation".
    A reward is weighed by the turns up to it only. Unbiased; its variance grows exponentially with the number of turns
    (Liu et al. 2018, arXiv 1810.12429).
    """

    name: ClassVar[str] = "pdis"

    def value(self, turns: Turns) -> ValueFunction:
        """See `OpeEstimator.value`."""
        return build_mean((turns.weight_EH * turns.reward_EH) @ turns.discount_H)


TOWARDS_BEHAVIOUR = "towards behaviour"
"""Direction of a bias of order 1/n in the number of episodes."""


class WIS(OpeEstimator):
    """Weighted importance sampling of complete episodes (Precup, Sutton, Singh 2000).

    The weights are normalised to add up to 1. The estimate is biased towards the behaviour policy's value, consistent,
    and never outside the range of the returns.
    """

    name: ClassVar[str] = "wis"
    bias_direction: ClassVar[str] = TOWARDS_BEHAVIOUR

    def value(self, turns: Turns) -> ValueFunction:
        """See `OpeEstimator.value`."""
        weight_E = turns.weight_EH[:, -1]
        weighted_E = weight_E * turns.return_E

        def value(counts_E: Floats) -> float:
            return divide_or_nan(float(counts_E @ weighted_E), float(counts_E @ weight_E))

        return value


class WPDIS(OpeEstimator):
    """Weighted per-decision importance sampling.

    Precup, Sutton, Singh 2000; Thomas 2015, "Safe reinforcement learning".
    Each turn is normalised separately. An episode that has ended stays in the sums with its last weight and reward 0,
    so that long episodes do not replace short ones. Its reliability is that of the weights of complete episodes,
    because the weights of the last turn are the least even.
    """

    name: ClassVar[str] = "wpdis"
    bias_direction: ClassVar[str] = TOWARDS_BEHAVIOUR

    def value(self, turns: Turns) -> ValueFunction:
        """See `OpeEstimator.value`."""
        weight_EH = turns.weight_EH
        weighted_EH = weight_EH * turns.reward_EH

        def value(counts_E: Floats) -> float:
            total_H = counts_E @ weight_EH
            if not (total_H > 0).all():
                return float(np.nan)
            return float((counts_E @ weighted_EH / total_H) @ turns.discount_H)

        return value


MIN_MEAN_WEIGHT = 0.8
"""Minimum mean of the clipped weights: an estimate that lost more than a fifth of the weight is refused."""


@dataclass(frozen=True)
class ClippedImportance(OpeEstimator):
    """Per-decision importance sampling with every turn's ratio clipped at `clip`.

    Truncated importance sampling (Ionides 2008; Munos et al. 2016, arXiv 1606.02647, for products). Clipping removes
    weight, so the estimate errs downward where rewards are positive and upward where they are negative. The mean weight
    shows how far: it is 1 in expectation before clipping, and the missing part belonged to outcomes that the target
    reaches more often. The effective sample size alone would hide that. The interval has room for the clipped mass, as
    it has for actions that these episodes do not show (`OpeEstimator.bounds`).
    """

    name: ClassVar[str] = "clipped"

    clip: float = 2.0
    """Largest ratio of a turn; at least 1."""

    def weights(self, turns: Turns) -> Floats:
        """Return the products of clipped ratios; see `OpeEstimator.weights`."""
        return exp_clamped(np.cumsum(np.minimum(turns.log_ratio_EH, np.log(self.clip)), axis=1))

    def reliability(self, turns: Turns) -> Reliability:
        """Measure the clipped weights of complete episodes, which must keep most of their mean."""
        weight_E = self.weights(turns)[:, -1]
        mean = float(weight_E.mean())
        lost = (
            f"mean weight {mean:.3f}, needed are {MIN_MEAN_WEIGHT}: too much was clipped"
            if mean < MIN_MEAN_WEIGHT
            else None
        )
        return measure_reliability(weight_E, objection=lost or find_weight_objection(turns))

    def value(self, turns: Turns) -> ValueFunction:
        """See `OpeEstimator.value`."""
        return build_mean((self.weights(turns) * turns.reward_EH) @ turns.discount_H)

    def bias(self, turns: Turns) -> str:
        """Return the direction by the signs of the rewards, if any ratio was clipped."""
        if not (turns.log_ratio_EH > np.log(self.clip)).any():
            return "none"
        lowest, highest = turns.reward_EH.min(), turns.reward_EH.max()
        if lowest >= 0:
            return "downward"
        return "upward" if highest <= 0 else "unknown"
