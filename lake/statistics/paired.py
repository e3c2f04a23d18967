"""Two policies on the same tasks: the mean difference, its interval, and a permutation test.

The test flips the sign of each task's difference (Fisher 1935): if neither policy were better, each sign would be as
likely as the other. All 2^m patterns of the m tasks that differ are counted where m is at most 20, or where all differ
by the same amount, as they do when each policy attempts each task once and succeeds or fails (the test is then
McNemar's, exact); random patterns beyond.
"""

from math import comb
from typing import NamedTuple

import numpy as np

from lake.statistics.intervals import Floats, spread_of_mean

EXACT_TASKS = 20
"""Differing tasks up to which every sign pattern is counted: 2^20."""
SAMPLED_PATTERNS = 100_000
_SLACK = 1e-9
"""Sums that differ by less are ties: floating-point addition in another order."""


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
    observed = abs(float(moved_M.sum()))
    scale = _SLACK * max(1.0, float(np.abs(moved_M).sum()))
    if len(moved_M) and np.ptp(np.abs(moved_M)) <= _SLACK * float(np.abs(moved_M[0])):
        return _sign_test_p(len(moved_M), int((moved_M > 0).sum())), "exact"
    if len(moved_M) <= EXACT_TASKS:
        sums = np.zeros(1)
        for difference in moved_M:
            sums = np.concatenate([sums + difference, sums - difference])
        return float((np.abs(sums) >= observed - scale).mean()), "exact"
    rng = np.random.default_rng(seed)
    reached = 1
    for _ in range(SAMPLED_PATTERNS // 1000):
        signs = rng.integers(0, 2, (1000, len(moved_M))) * 2.0 - 1.0
        reached += int((np.abs(signs @ moved_M) >= observed - scale).sum())
    return reached / (SAMPLED_PATTERNS + 1), "sampled"


def _sign_test_p(tasks: int, gained: int) -> float:
    """The same for differences of one size: patterns are counted by how many tasks gain in them."""
    observed = abs(2 * gained - tasks)
    reached = sum(comb(tasks, other) for other in range(tasks + 1) if abs(2 * other - tasks) >= observed)
    return float(reached / 2**tasks)
