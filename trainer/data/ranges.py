"""Consecutive ranges as arrays: ragged data is flat values and where each part starts."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def starts(counts: npt.ArrayLike) -> Ints:
    """Starts of consecutive ranges, and the end of the last: [0, c0, c0 + c1, ...].

    Args:
        counts: sizes of the ranges, integers [n].

    Returns:
        int64 [n + 1].
    """
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def ranges(firsts: Ints, counts: Ints) -> Ints:
    """The numbers of several ranges, end to end: firsts[0], firsts[0] + 1, ..., firsts[1], ...

    Args:
        firsts: first number of each range, int64 [n].
        counts: sizes of the ranges, int64 [n].

    Returns:
        int64 [sum of counts].
    """
    numbers = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
    numbers += np.arange(len(numbers))
    return numbers
