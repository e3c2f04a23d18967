"""The declared comparisons: exact paired sign-flip tests over seeds, and Holm's correction over the comparisons."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lake.statistics import EXACT_TASKS, Comparison, compare_paired

LEVEL = 0.05


class Verdict(NamedTuple):
    """A comparison of two arms over paired seeds."""

    one: str
    other: str
    result: Comparison
    holm: float
    """p, corrected for the number of comparisons."""

    @property
    def words(self) -> str:
        """What is concluded."""
        if self.holm >= LEVEL or self.result.difference is None:
            return "null: no difference shown"
        return "better" if self.result.difference > 0 else "worse"


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected p values (Holm 1979, Scand. J. Statist. 6): the i-th smallest of m times m - i, never falling.

    Args:
        p_values: one per comparison.

    Returns:
        In the same order, at most 1.
    """
    order = np.argsort(p_values, kind="stable")
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(order.tolist()):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = largest
    return corrected


def paired(success: Mapping[str, Sequence[float]], arm: str, base: str) -> Comparison:
    """Two arms seed by seed.

    Args:
        success: by arm, success of each seed in the same order of seeds.
        arm: an arm.
        base: the arm it is compared with.

    Raises:
        ValueError: the arms have other numbers of seeds, none, or more than can be counted exactly.
    """
    if not 0 < len(success[arm]) == len(success[base]) <= EXACT_TASKS:
        msg = f"{arm} has {len(success[arm])} seeds and {base} {len(success[base])}: 1 to {EXACT_TASKS}, paired"
        raise ValueError(msg)
    pairs_P2 = np.column_stack([success[arm], success[base]]).astype(np.float64)
    return compare_paired(pairs_P2, seed=0)


def verdicts(success: Mapping[str, Sequence[float]], comparisons: Sequence[tuple[str, str]]) -> list[Verdict]:
    """All declared comparisons, corrected together."""
    results = [paired(success, arm, base) for arm, base in comparisons]
    corrected = holm([1.0 if result.p is None else result.p for result in results])
    return [
        Verdict(arm, base, result, p) for (arm, base), result, p in zip(comparisons, results, corrected, strict=True)
    ]
