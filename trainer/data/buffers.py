"""Memory of batches that is used again once no tensor refers to it.

A batch is made by one thread and dropped by another, so memory from the allocator goes back to the system and comes
anew, page by page, for every optimizer step; that costs more than filling it.
"""

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64


class _Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of a buffer. Every array cut out of it refers to it, so its end is the end of them all.

    A subclass, because NumPy lets a view of a plain view refer to the buffer itself.
    """


class Arena:
    """A piece of memory from which arrays are cut.

    Args:
        lease: the memory.
    """

    def __init__(self, lease: npt.NDArray[np.uint8]) -> None:
        self._lease = lease
        self._used = 0

    def array(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array with anything in it; from the allocator if the arena is used up."""
        size = count * np.dtype(dtype).itemsize
        first, self._used = self._used, self._used + -(-size // _ALIGNMENT) * _ALIGNMENT
        if first + size > len(self._lease):
            return np.empty(count, dtype)
        return self._lease[first : first + size].view(dtype, np.ndarray)


class Buffers:
    """Gives out arenas; safe to use from several threads."""

    def __init__(self) -> None:
        self._free: list[npt.NDArray[np.uint8]] = []

    def arena(self, size: int) -> Arena:
        """At least so many bytes, which nothing else refers to."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        if len(buffer) < size:
            buffer = np.empty(size + size // 8, np.uint8)
        lease = buffer.view(_Lease)
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return Arena(lease)
