"""Confidence intervals over tasks, intervals of success rates, and paired permutation tests.

Rollouts of one task are similar, so the sample consists of tasks, each with all its rollouts. The error of an estimate
is the jackknife's, which leaves out one task at a time. Few tasks, or few tasks that differ, determine that error
poorly, and the degrees of freedom express this. Bootstrap percentiles do not: 95 % intervals cover 49 % of the time
with 2 tasks, 84 % with 5 and 91 % with 10 (measured).

The paired test compares two policies on the same tasks. It flips the sign of each task's difference (Fisher 1935): if
neither policy were better, both signs would be equally likely. p is exact where counting is cheap. Differences that are
integer multiples of one value, such as those of success rates, have few sums, whose distribution is built up task by
task. For other differences, up to 32 of them, the sums of all sign patterns are counted by halves. Beyond that, random
patterns are counted.

Axes: `_E` episodes, `_P` tasks, `_R` blocks of tasks, `_M` tasks that differ, `_S` sums.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVEL_Z = 1.959963984540054
"""Normal quantile of a two-sided 95 % interval."""
MAX_BLOCKS = 200
"""Largest number of blocks that the jackknife leaves out in turn; with more tasks, a block has several."""
TAIL = 0.025
"""Probability outside each side of a 95 % interval."""
_NORMAL_DF = 1e4
"""Degrees of freedom from which Student's quantile equals the normal one to 1e-3 of its value."""
_EQUAL = 1e-12
"""Relative difference below which values are equal: floating-point addition in another order."""


class Spread(NamedTuple):
    """An estimate and its error."""

    value: float
    error: float
    """Standard error; 0 if all values are equal, which leaves the error unknown."""
    df: float
    """Degrees of freedom of the error, at least 1."""

    def interval(self, tail: float = TAIL) -> tuple[float, float] | None:
        """Return Student's interval with probability `tail` outside each side; None if all values are equal."""
        if self.error == 0:
            return None
        half = self.half(tail)
        return self.value - half, self.value + half

    def half(self, tail: float = TAIL) -> float:
        """Return half of the interval's width."""
        return t_quantile(self.df, tail) * self.error


@lru_cache(maxsize=4096)
def t_quantile(df: float, tail: float = TAIL) -> float:
    """Return the quantile 1 - tail of Student's distribution, for any real df from 1 on.

    With t = sqrt(df) tan(angle) the density is proportional to cos(angle)^(df - 1), which is summed here.
    """
    df = min(df, _NORMAL_DF)
    # The full range; for many degrees of freedom the density vanishes beyond 40 standard deviations.
    angles = np.linspace(0.0, math.pi / 2 if df < 100 else math.atan(40.0 / math.sqrt(df)), 20_001)
    density = np.cos(angles) ** (df - 1.0)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp((1 - 2 * tail) * below[-1], below, angles))
    return math.sqrt(df) * math.tan(angle)


def spread_of_mean(value_P: Floats) -> Spread | None:
    """Return the spread of the mean of independent values; None for fewer than two.

    The degrees of freedom follow from the kurtosis k of the sample: n values have 2 n / (k - 1). That is n - 1 for
    normal values, and about twice the number of differing values if few differ.
    """
    n = len(value_P)
    if n < 2:
        return None
    centre = float(value_P.mean())
    gap_P = value_P - centre
    largest = float(np.abs(gap_P).max())
    if largest <= _EQUAL * float(np.abs(value_P).max()):
        return Spread(centre, 0.0, n - 1.0)
    squares_P = (gap_P / largest) ** 2
    total = float(squares_P.sum())
    kurtosis = n * float(squares_P @ squares_P) / total**2
    df = n - 1.0 if kurtosis <= 1 else min(n - 1.0, 2 * n / (kurtosis - 1))
    return Spread(centre, largest * math.sqrt(total / (n - 1) / n), max(1.0, df))


def spread_by_task(value: Callable[[Floats], float], task_E: Ints) -> Spread | None:
    """Return an estimate's spread over tasks (jackknife: Tukey 1958; of clusters: Cameron, Gelbach, Miller 2008).

    None for fewer than two tasks (numbered 0 .. P-1), or if the estimate does not exist without one of them.
    """
    tasks = int(task_E.max()) + 1 if len(task_E) else 0
    if tasks < 2:
        return None
    blocks = min(tasks, MAX_BLOCKS)
    block_E = task_E % blocks
    estimate = value(np.ones(len(task_E)))
    without_R = np.array([value((block_E != block).astype(np.float64)) for block in range(blocks)])
    spread = spread_of_mean(blocks * estimate - (blocks - 1) * without_R)
    if spread is None or not math.isfinite(spread.error):
        return None
    return spread._replace(value=estimate)


def wilson_interval(share: float, trials: float) -> tuple[float, float]:
    """Return the 95 % score interval, inside [0, 1], of a binomial share (Wilson 1927, JASA 22).

    `trials` is above 0 and need not be an integer.
    """
    square = LEVEL_Z**2
    centre = (share + square / (2 * trials)) / (1 + square / trials)
    half = LEVEL_Z / (1 + square / trials) * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    low = 0.0 if share == 0 else max(0.0, centre - half)
    high = 1.0 if share == 1 else min(1.0, centre + half)
    return low, high


def share_interval(spread: Spread, tasks: int, attempts: int) -> tuple[float, float]:
    """Return the 95 % interval of a success rate over tasks (Korn, Graubard 1998, Survey Methodology 24).

    It is Wilson's interval for the number of independent trials with the same error, with Student's quantile for the
    normal one. The spread is that of the share (0 to 1) over tasks.
    """
    # If all tasks agree, each task counts as one trial, since their variation is unknown.
    share = min(1.0, max(0.0, spread.value))
    trials = tasks if spread.error == 0 else min(attempts, share * (1 - share) / spread.error**2)
    return wilson_interval(share, trials * (LEVEL_Z / t_quantile(spread.df)) ** 2)


def spread_of_share(wins_P: Floats, trials_P: Floats) -> Spread | None:
    """Return the spread of sum(wins) / sum(trials) over tasks, each of one trial or more; None for fewer than two.

    This is the jackknife over all tasks in closed form. With equal trials it equals `spread_of_mean` of the tasks'
    shares.
    """
    tasks, wins, trials = len(wins_P), float(wins_P.sum()), float(trials_P.sum())
    if tasks < 2:
        return None
    without_P = (wins - wins_P) / (trials - trials_P)
    spread = spread_of_mean(tasks * wins / trials - (tasks - 1) * without_P)
    return None if spread is None else spread._replace(value=wins / trials)


def success_interval(wins_P: Floats, trials_P: Floats) -> tuple[float, float]:
    """Return the 95 % interval of a success rate, from the successes and attempts of each task.

    Evaluations, the viewer and the loop show this interval. The attempts of a single task are a sample of that task
    only, so its interval is Wilson's.
    """
    attempts = int(trials_P.sum())
    spread = spread_of_share(wins_P, trials_P)
    if spread is None:
        return wilson_interval(float(wins_P.sum()) / attempts, attempts)
    return share_interval(spread, len(wins_P), attempts)


# ---------------------------------------------------------------- paired tests

EXACT_TASKS = 32
"""Number of differing tasks up to which all sign patterns are counted, for any differences: two halves of 2^16 sums."""
SAMPLED_PATTERNS = 100_000
_DENOMINATORS = 1000
"""Largest ratio of the largest difference to the common divisor."""
_MOST_WORK = 10**9
"""Largest number of additions for the distribution of sums, which takes some seconds."""
_SLACK = 1e-9
"""Relative difference below which sums are ties: floating-point addition in another order."""
_WHOLE = 1e-11
"""Largest distance of a multiple from an integer: floating-point division."""


class Comparison(NamedTuple):
    """One measure of two policies, paired by task."""

    value: float | None
    against: float | None
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    test: str | None
    tasks: int


def compare_paired(pairs_P2: Floats, *, seed: int) -> Comparison:
    """Compare two policies by a measure of each task under both, float64 [P, 2].

    All fields are NULL without tasks; there is no interval for one task or for equal differences.
    """
    if not len(pairs_P2):
        return Comparison(None, None, None, None, None, None, None, 0)
    difference_P = pairs_P2[:, 0] - pairs_P2[:, 1]
    spread = spread_of_mean(difference_P)
    low, high = (spread and spread.interval()) or (None, None)
    p, test = sign_flip_p(difference_P, seed=seed)
    first, second = pairs_P2.mean(axis=0).tolist()
    return Comparison(first, second, float(difference_P.mean()), low, high, p, test, len(pairs_P2))


def sign_flip_p(difference_P: Floats, *, seed: int) -> tuple[float, str]:
    """Return the two-sided p of the paired permutation test on differences by task, and `exact` or `sampled`.

    A sampled p includes the observed pattern, so it is never 0.
    """
    moved_M = difference_P[difference_P != 0]
    whole_M = _to_multiples(moved_M)
    if whole_M is not None:
        return _multiples_p(whole_M), "exact"
    if len(moved_M) <= EXACT_TASKS:
        return _halves_p(moved_M), "exact"
    least, rng, reached = _observed_threshold(moved_M), np.random.default_rng(seed), 1
    for _ in range(SAMPLED_PATTERNS // 1000):
        signs = rng.integers(0, 2, (1000, len(moved_M))) * 2.0 - 1.0
        reached += int((np.abs(signs @ moved_M) >= least).sum())
    return reached / (SAMPLED_PATTERNS + 1), "sampled"


def _to_multiples(moved_M: Floats) -> Ints | None:
    """Return differences as integer multiples of one value; None if no value keeps the number of sums small."""
    if not len(moved_M):
        return np.zeros(0, np.int64)
    share_M = moved_M / np.abs(moved_M).max()
    for denominator in range(1, _DENOMINATORS + 1):
        scaled_M = share_M * denominator
        whole_M = np.rint(scaled_M)
        if (np.abs(scaled_M - whole_M) <= _WHOLE).all():
            return whole_M.astype(np.int64) if 2 * np.abs(whole_M).sum() * len(moved_M) <= _MOST_WORK else None
    return None


def _multiples_p(whole_M: Ints) -> float:
    """Return the share of sign patterns whose sum is as far from 0 as the observed one, summing up task by task."""
    size_M = np.abs(whole_M)
    total, observed = int(size_M.sum()), abs(int(whole_M.sum()))
    share_S = np.zeros(2 * total + 1)
    share_S[total] = 1.0
    for size in size_M[size_M > 0]:
        before_S = share_S / 2
        share_S = np.zeros_like(before_S)
        share_S[size:] += before_S[:-size]
        share_S[:-size] += before_S[size:]
    if observed == 0:
        return 1.0
    return float(min(1.0, share_S[: total - observed + 1].sum() + share_S[total + observed :].sum()))


def _halves_p(moved_M: Floats) -> float:
    """Return the same share for any differences, from the sums of the first and second half of the tasks."""
    least, middle = _observed_threshold(moved_M), len(moved_M) // 2
    first_S, second_S = _sign_sums(moved_M[:middle]), np.sort(_sign_sums(moved_M[middle:]))
    below = np.searchsorted(second_S, -least - first_S, side="right")
    above = len(second_S) - np.searchsorted(second_S, least - first_S, side="left")
    reached = len(first_S) * len(second_S) if least <= 0 else int(below.sum()) + int(above.sum())
    return reached / (len(first_S) * len(second_S))


def _sign_sums(moved_M: Floats) -> Floats:
    """Return the sums of all sign patterns."""
    sums = np.zeros(1)
    for difference in moved_M:
        sums = np.concatenate([sums + difference, sums - difference])
    return sums


def _observed_threshold(moved_M: Floats) -> float:
    """Return the size from which a sum is as far from 0 as the observed one."""
    return abs(float(moved_M.sum())) - _SLACK * float(np.abs(moved_M).sum())
