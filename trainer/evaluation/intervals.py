"""Confidence intervals: Wilson's for a share of successes, and the bootstrap over tasks for everything else.

Rollouts of one task resemble each other, so the bootstrap draws tasks, each with all its rollouts, and not rollouts.

Axes: `_E` episodes, `_P` tasks.
"""

import math
from collections.abc import Callable

import numpy as np

from trainer.evaluation.turns import Floats, Ints

LEVEL_Z = 1.959963984540054
"""Quantile of the normal distribution of a two-sided 95 % interval."""
_TAIL = 0.025


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % score interval of a binomial share (Wilson 1927, JASA 22).

    Args:
        successes: how many.
        trials: of how many; at least 1.

    Returns:
        Lower and upper end, inside [0, 1].
    """
    share, square = successes / trials, LEVEL_Z**2
    centre = (share + square / (2 * trials)) / (1 + square / trials)
    half = LEVEL_Z / (1 + square / trials) * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def bootstrap_by_task(
    value: Callable[[Floats], float], task_E: Ints, *, resamples: int, seed: int
) -> tuple[float, float] | None:
    """95 % percentile interval over resampled tasks (Efron 1979; clusters: Cameron, Gelbach, Miller 2008).

    Args:
        value: an estimate as a function of how often each episode counts.
        task_E: number of the episode's task, 0 .. P-1.
        resamples: draws.
        seed: of the draws.

    Returns:
        Lower and upper end; None for fewer than two tasks. Draws that carry no estimate (NaN) are left out.
    """
    tasks = int(task_E.max()) + 1 if len(task_E) else 0
    if tasks < 2:
        return None
    rng = np.random.default_rng(seed)
    drawn = np.empty(resamples)
    for number in range(resamples):
        counts_P = np.bincount(rng.integers(0, tasks, tasks), minlength=tasks).astype(np.float64)
        drawn[number] = value(counts_P[task_E])
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return None
    low, high = np.quantile(drawn, [_TAIL, 1 - _TAIL])
    return float(low), float(high)


def bootstrap_of_mean(value_P: Floats, *, resamples: int, seed: int) -> tuple[float, float] | None:
    """95 % interval of the mean over tasks of a figure that each task has one of; None for fewer than two tasks."""

    def value(counts_P: Floats) -> float:
        return float(counts_P @ value_P / counts_P.sum())

    return bootstrap_by_task(value, np.arange(len(value_P)), resamples=resamples, seed=seed)
