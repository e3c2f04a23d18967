"""Matching: who is compared with whom, inside groups whose rows are ordered from best to worst.

The best row is paired with the worst that it may be compared with, then the next best that is still free, and so on. If
only a margin limits the choice, that is the i-th best with the i-th worst. Groups are small (siblings of a task, steps
that share an anchor), so all their pairs are looked at, which also tells how many pairs each condition leaves.

Axes: `_N` rows, group after group; `_I` rows of one group.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trainer.data.ranges import Ints

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Condition = Callable[[slice], Bools]
"""Of the rows of a group: whether row i may be chosen over row j, bool [I, I]. Only i < j is looked at."""


@dataclass(frozen=True, slots=True)
class Matched:
    """Pairs, and what led to them."""

    pairs: list[tuple[int, int]]
    """Chosen and rejected row."""
    possible: dict[str, tuple[int, int]]
    """By condition: pairs of rows that satisfy it and all before it, and groups that have such a pair."""


def differ(value_N: Ints) -> Condition:
    """Their values are not the same."""
    return lambda rows: value_N[rows][:, None] != value_N[rows][None, :]


def same(value_N: Ints) -> Condition:
    """Their values are the same."""
    return lambda rows: value_N[rows][:, None] == value_N[rows][None, :]


def both(value_N: Bools) -> Condition:
    """It holds for both."""
    return lambda rows: value_N[rows][:, None] & value_N[rows][None, :]


def apart(value_N: Floats, margin: float) -> Condition:
    """The chosen one's value is larger, and by at least a margin."""

    def condition(rows: slice) -> Bools:
        difference_II = value_N[rows][:, None] - value_N[rows][None, :]
        return np.asarray((difference_II > 0) & (difference_II >= margin))

    return condition


def together(chosen_N: Ints, rejected_N: Ints, limit: int) -> Condition:
    """A number of the chosen row and one of the rejected row add up to a limit at most."""
    return lambda rows: chosen_N[rows][:, None] + rejected_N[rows][None, :] <= limit


def match(group_N: npt.NDArray[np.generic], conditions: Mapping[str, Condition], limit: int | None = None) -> Matched:
    """Pair the rows of each group.

    Args:
        group_N: group of each row; the rows of a group lie together, the best first.
        conditions: what a pair must satisfy, by name, in the order in which what is left is counted.
        limit: pairs of a group at most; None: as many as there are.
    """
    edges = [0, *(np.flatnonzero(group_N[1:] != group_N[:-1]) + 1).tolist(), len(group_N)]
    found: list[tuple[int, int]] = []
    possible = dict.fromkeys(conditions, (0, 0))
    for low, high in pairwise(edges):
        if high - low < 2:
            continue
        allowed_II = np.triu(np.ones((high - low, high - low), np.bool_), 1)
        for name, condition in conditions.items():
            allowed_II &= condition(slice(low, high))
            count = int(allowed_II.sum())
            if not count:
                break
            pairs, groups = possible[name]
            possible[name] = (pairs + count, groups + 1)
        else:
            found += [(low + i, low + j) for i, j in best_with_worst(allowed_II, limit)]
    return Matched(found, possible)


def best_with_worst(allowed_II: Bools, limit: int | None = None) -> list[tuple[int, int]]:
    """Pairs (i, j) of rows ordered from best to worst: each row in one at most.

    Args:
        allowed_II: whether row i may be chosen over row j, bool [I, I]; False unless i < j.
        limit: pairs at most.
    """
    free_I = np.ones(len(allowed_II), np.bool_)
    pairs: list[tuple[int, int]] = []
    for i in range(len(allowed_II)):
        if limit is not None and len(pairs) >= limit:
            break
        partners = np.flatnonzero(allowed_II[i] & free_I)
        if free_I[i] and len(partners):
            pairs.append((i, int(partners[-1])))
            free_I[list(pairs[-1])] = False
    return pairs
