"""Rows gathered by (group, key) with one sort of one array of integers: twice as fast as a sort by columns.

A row's group, as many bits of a hash of its key as there is room for, and its number are packed into 63 bits, so an
unstable sort of the values alone leaves equal keys of a group side by side and in row order. Two different keys whose
few bits agree are noticed, and then the caller sorts by the columns themselves.

Axes: `_N` rows, `_M` the same rows gathered.
"""

import numpy as np
import numpy.typing as npt

from pipelines.credit.segments import Bools, Segments

_WORD_BITS = 63
_FEWEST_HASH_BITS = 12
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that multiplying loses nothing; its high bits depend on all of the key's."""
Gathered = tuple[npt.NDArray[np.int64], Bools]
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
    packed_N.sort()
    order_M = (packed_N & np.uint64((1 << row_bits) - 1)).view(np.int64)
    packed_N >>= np.uint64(row_bits)
    opens_M = np.ones(rows, np.bool_)
    np.not_equal(packed_N[1:], packed_N[:-1], out=opens_M[1:])
    keys_M = keys_N[order_M]
    if ((keys_M[1:] != keys_M[:-1]) & ~opens_M[1:]).any():
        return None
    return order_M, opens_M
