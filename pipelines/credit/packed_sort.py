"""Rows gathered by (group, key) with one sort of one array of integers: twice as fast as a sort by columns.

A row's group, as many bits of a hash of its key as there is room for, and its number are packed into 63 bits, so an
unstable sort of the values alone leaves equal keys of a group side by side and in row order. Two different keys whose
few bits agree are noticed, and then the caller sorts by the columns themselves. Rows come by group, so a few groups are
sorted at a time, inside the processor's cache: three times as fast as all of them at once.

Axes: `_N` rows, `_M` the same rows gathered, `_K` runs of rows.
"""

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipelines.credit.segments import Bools, Segments

_WORD_BITS = 63
_FEWEST_HASH_BITS = 12
_PIECE = 4096
"""Rows sorted at a time, about; 32 KB."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that multiplying loses nothing; its high bits depend on all of the key's."""
Words: TypeAlias = npt.NDArray[np.uint64]
Gathered: TypeAlias = tuple[npt.NDArray[np.int64], Bools]
"""Row number of each gathered row, and whether it opens a new (group, key)."""


def gather(keys_N: npt.NDArray[np.int64], groups: Segments) -> Gathered | None:
    """Rows by group, equal keys together, rows of a key in their order; None if it cannot be told this way.

    Args:
        keys_N: int64 keys.
        groups: the groups, as runs of rows.
    """
    rows, runs = len(keys_N), len(groups.starts_K)
    row_bits, run_bits = (max(1, (count - 1).bit_length()) for count in (rows, runs))
    hash_bits = _WORD_BITS - row_bits - run_bits
    if hash_bits < _FEWEST_HASH_BITS:
        return None
    packed_N = (keys_N.view(np.uint64) * _SPREAD) >> np.uint64(64 - hash_bits)
    packed_N <<= np.uint64(row_bits)
    packed_N |= groups.spread(np.arange(runs, dtype=np.uint64) << np.uint64(row_bits + hash_bits))
    packed_N |= np.arange(rows, dtype=np.uint64)
    _sort_within(packed_N, groups)
    order_M = (packed_N & np.uint64((1 << row_bits) - 1)).view(np.int64)
    packed_N >>= np.uint64(row_bits)
    opens_M = np.ones(rows, np.bool_)
    np.not_equal(packed_N[1:], packed_N[:-1], out=opens_M[1:])
    keys_M = keys_N[order_M]
    if ((keys_M[1:] != keys_M[:-1]) & ~opens_M[1:]).any():
        return None
    return order_M, opens_M


def distinct(values_M: Words, runs: Segments) -> npt.NDArray[np.int64]:
    """How many different values each run has, by as many of their bits as there is room for.

    Args:
        values_M: hashes, 64 bits.
        runs: the runs, as runs of rows.
    """
    run_bits = max(1, (len(runs.starts_K) - 1).bit_length())
    packed_M = values_M >> np.uint64(run_bits)
    packed_M |= runs.spread(np.arange(len(runs.starts_K), dtype=np.uint64) << np.uint64(64 - run_bits))
    _sort_within(packed_M, runs)
    new_M = np.ones(len(packed_M), np.bool_)
    np.not_equal(packed_M[1:], packed_M[:-1], out=new_M[1:])
    return np.add.reduceat(new_M, runs.starts_K, dtype=np.int64)


def _sort_within(packed_N: Words, runs: Segments) -> None:
    """Sort values whose highest bits are the number of their run, in place."""
    ends_K = runs.starts_K + runs.lengths_K
    cuts = ends_K[np.searchsorted(ends_K, np.arange(_PIECE, len(packed_N), _PIECE))]
    bounds = np.unique(np.concatenate([[0], cuts, [len(packed_N)]]))
    for start, end in pairwise(bounds.tolist()):
        packed_N[start:end].sort()
