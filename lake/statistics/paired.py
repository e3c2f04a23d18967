"""Two policies on the same tasks: the mean difference, its interval, and a permutation test.

The test flips the sign of each task's difference (Fisher 1935): if neither policy were better, each sign would be as
likely as the other. p is exact wherever counting is cheap: differences that are whole multiples of one value, as those
of success rates are, have few sums, whose distribution is built up task by task; of any other differences the sums of
all sign patterns are counted by halves, up to 32 tasks that differ. Beyond, random patterns are counted.
"""

from typing import NamedTuple

import numpy as np

from lake.statistics.intervals import Floats, Ints, spread_of_mean

EXACT_TASKS = 32
"""Differing tasks up to which every sign pattern is counted, whatever the differences are: two halves of 2^16 sums."""
SAMPLED_PATTERNS = 100_000
_DENOMINATORS = 1000
"""The largest difference is at most so many times the value that all are multiples of."""
_MOST_WORK = 10**9
"""Additions that the distribution of sums may take: some seconds."""
_SLACK = 1e-9
"""Sums that differ by less, relative to the largest, are ties: floating-point addition in another order."""
_WHOLE = 1e-11
"""How far a multiple may be from a whole number: floating-point division."""


class Comparison(NamedTuple):
    """One measure of two policies."""

    value: float | None
    against: float | None
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    test: str | None
    tasks: int


def compare_paired(pairs_P2: Floats, *, seed: int) -> Comparison:
    """Compare two policies by a measure of each task under the one and under the other, float64 [P, 2].

    All NULL without tasks, no interval for one task or where all tasks differ alike.
    """
    if not len(pairs_P2):
        return Comparison(None, None, None, None, None, None, None, 0)
    difference_P = pairs_P2[:, 0] - pairs_P2[:, 1]
    found = spread_of_mean(difference_P)
    low, high = (found and found.interval()) or (None, None)
    p, test = sign_flip_p(difference_P, seed=seed)
    one, other = pairs_P2.mean(axis=0).tolist()
    return Comparison(one, other, float(difference_P.mean()), low, high, p, test, len(pairs_P2))


def sign_flip_p(difference_P: Floats, *, seed: int) -> tuple[float, str]:
    """Two-sided p of the paired permutation test on differences by task, and `exact` or `sampled`.

    A sampled p counts the observed pattern in, so that it is never 0.
    """
    moved_M = difference_P[difference_P != 0]
    whole_M = _as_multiples(moved_M)
    if whole_M is not None:
        return _p_of_multiples(whole_M), "exact"
    if len(moved_M) <= EXACT_TASKS:
        return _p_by_halves(moved_M), "exact"
    least, rng, reached = _reaching(moved_M), np.random.default_rng(seed), 1
    for _ in range(SAMPLED_PATTERNS // 1000):
        signs = rng.integers(0, 2, (1000, len(moved_M))) * 2.0 - 1.0
        reached += int((np.abs(signs @ moved_M) >= least).sum())
    return reached / (SAMPLED_PATTERNS + 1), "sampled"


def _as_multiples(moved_M: Floats) -> Ints | None:
    """Differences as whole multiples of one value; None if there is none that makes them few sums."""
    if not len(moved_M):
        return np.zeros(0, np.int64)
    share_M = moved_M / np.abs(moved_M).max()
    for denominator in range(1, _DENOMINATORS + 1):
        scaled_M = share_M * denominator
        whole_M = np.rint(scaled_M)
        if (np.abs(scaled_M - whole_M) <= _WHOLE).all():
            return whole_M.astype(np.int64) if 2 * np.abs(whole_M).sum() * len(moved_M) <= _MOST_WORK else None
    return None


def _p_of_multiples(whole_M: Ints) -> float:
    """The share of sign patterns whose sum is as far from 0, by the distribution of the sum after each task."""
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


def _p_by_halves(moved_M: Floats) -> float:
    """The same of any differences: every sum is one of the first half of the tasks and one of the second."""
    least, middle = _reaching(moved_M), len(moved_M) // 2
    one_S, other_S = _sums(moved_M[:middle]), np.sort(_sums(moved_M[middle:]))
    below = np.searchsorted(other_S, -least - one_S, side="right")
    above = len(other_S) - np.searchsorted(other_S, least - one_S, side="left")
    reached = len(one_S) * len(other_S) if least <= 0 else int(below.sum()) + int(above.sum())
    return reached / (len(one_S) * len(other_S))


def _sums(moved_M: Floats) -> Floats:
    """The sums of all sign patterns."""
    sums = np.zeros(1)
    for difference in moved_M:
        sums = np.concatenate([sums + difference, sums - difference])
    return sums


def _reaching(moved_M: Floats) -> float:
    """The size from which on a sum is as far from 0 as the observed one."""
    return abs(float(moved_M.sum())) - _SLACK * float(np.abs(moved_M).sum())
