"""PackedBatch: what one forward and backward pass gets; and the flat arrays and memory that it is made of.

Axes: `_T` tokens of the packed buffer, `_N` its rows that carry loss (one per trained action token). Ragged data is
flat values and where each part starts.

Memory of batches is used again once no tensor refers to it: a batch is made by one thread and dropped by another, so
memory from the allocator goes back to the system and comes anew, page by page, for every optimizer step; that costs
more than filling it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ints = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
"""Numbers of rows of a plan, of which there are less than 2^31."""


def starts(counts: npt.ArrayLike) -> Ints:
    """Starts of consecutive ranges of some sizes [n], and the end of the last: [0, c0, c0 + c1, ...], int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def ranges(firsts: Ints | Positions, counts: Ints | Positions) -> Ints:
    """The numbers of ranges (integers [n]), end to end: firsts[0], firsts[0] + 1, ..., firsts[1], ...; int64 [sum]."""
    numbers: Ints = np.repeat(np.subtract(firsts, starts(counts)[:-1]), counts)
    numbers += np.arange(len(numbers))
    return numbers


_ALIGNMENT = 64


class _Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of a buffer. Every array cut out of it refers to it, so its end is the end of them all.

    A subclass, because NumPy lets a view of a plain view refer to the buffer itself.
    """


class Arena:
    """A piece of memory from which arrays are cut."""

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


_PLAIN = ("boundaries", "dummy")
"""Fields that are no tensors."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences end to end in one buffer, and which tokens carry loss."""

    input_ids_T: Tensor
    """Token ids, integers [T]."""
    position_ids_T: Tensor
    """Position inside the own sequence, integers [T]."""
    boundaries: list[int]
    """0, end of the first sequence, ..., T."""
    predictor_N: Tensor
    """Index into T of the token whose hidden state predicts the target: one before it, int64 [N]."""
    target_N: Tensor
    """Id of the trained token, int64 [N]."""
    weight_N: Tensor
    """What the token's loss is multiplied by, float32 [N]: `trainer.data.stream.aggregation`, decided by the plan.
    Losses of all micro-batches and ranks of an optimizer step are simply added."""
    unit_N: Tensor | None = None
    """Number of the token's unit inside this buffer, 0..U-1 in order, int64 [N]; None where the unit is the token."""
    weight_U: Tensor | None = None
    """1 / number of units of the optimizer step, float32 [U]; None where the unit is the token."""
    pair_U: Tensor | None = None
    """Number of the unit's pair inside this buffer, 0..P-1 in order, int64 [U]; None without pairs."""
    sign_U: Tensor | None = None
    """+1 for a chosen or desirable unit, -1 for the others, float32 [U]; None without preferences."""
    step_index_N: Tensor | None = None
    """The episode's step that the token belongs to, int32 [N]; None without pairs."""
    advantages_N: Tensor | None = None
    """Advantage of the token's step, float32 [N]."""
    behaviour_logprobs_N: Tensor | None = None
    """Stored log-probability of the target, float32 [N]."""
    temperature_N: Tensor | None = None
    """Temperature of the distribution, float32 [N]; None means 1."""
    staleness_N: Tensor | None = None
    """Policy versions between the one that sampled the token's step and the newest of the plan, float32 [N]; NaN where
    it is not known, None where it is known of no step."""
    reference_logprobs_N: Tensor | None = None
    """Log-probability of the target under the frozen reference policy, float32 [N]; filled before the update."""
    proximal_logprobs_N: Tensor | None = None
    """Log-probability of the target under the proximal policy, float32 [N]; filled before the update, where that policy
    has other weights than the one in training."""
    dummy: bool = False
    """Stands in for a rank that has no micro-batch left: to be run, so that collectives match, with weight 0."""

    def to(self, device: torch.device) -> PackedBatch:
        """The batch on a device."""
        if self.input_ids_T.device == device:
            return self
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> PackedBatch:
        """The batch in page-locked memory, from which a GPU fetches it while other work goes on."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {
            name: value if value is None or name in _PLAIN else change(value) for name, value in values.items()
        }
        return PackedBatch(**changed)
