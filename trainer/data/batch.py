"""`PackedBatch`, the input of one forward and backward pass, and the flat arrays and memory that it is made of.

Axes: `_T` tokens of the packed buffer, `_N` its rows that carry loss (one per trained action token), `_S` its trained
steps. Ragged data is a flat array of values and an array with the start of each part.

Batches reuse memory once no tensor refers to it. One thread fills a batch and another drops it. The allocator would
therefore return the memory to the system and fetch it again, page by page, for every optimizer step. That costs more
than filling the memory.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ints = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
"""Row numbers of a plan, which has fewer than 2^31 rows."""


def compute_starts(counts: npt.ArrayLike) -> Ints:
    """Return the starts of ranges with some sizes, [n], and the last end: [0, c0, c0 + c1, ...], int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def expand_ranges(firsts: Ints | Positions, counts: Ints | Positions) -> Ints:
    """Return the numbers of ranges ([n]), end to end: firsts[0], firsts[0] + 1, ..., firsts[1], ...; int64 [sum]."""
    numbers: Ints = np.repeat(np.subtract(firsts, compute_starts(counts)[:-1]), counts)
    numbers += np.arange(len(numbers))
    return numbers


_ALIGNMENT = 64


class _Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of a buffer. All arrays cut out of it refer to it, so it is freed after the last of them.

    A subclass is needed because NumPy lets a view of a plain view refer to the buffer.
    """


class MemoryArena:
    """A block of memory from which arrays are allocated."""

    def __init__(self, lease: npt.NDArray[np.uint8]) -> None:
        self._lease = lease
        self._used = 0

    def allocate(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an uninitialised array; the allocator supplies it if the arena is used up."""
        size = count * np.dtype(dtype).itemsize
        first, self._used = self._used, self._used + -(-size // _ALIGNMENT) * _ALIGNMENT
        if first + size > len(self._lease):
            return np.empty(count, dtype)
        return self._lease[first : first + size].view(dtype, np.ndarray)


class Buffers:
    """A pool of reusable buffers; safe to use from several threads."""

    def __init__(self) -> None:
        self._free: list[npt.NDArray[np.uint8]] = []

    def allocate_arena(self, size: int) -> MemoryArena:
        """Return an arena of at least `size` bytes that nothing else refers to."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        if len(buffer) < size:
            buffer = np.empty(size + size // 8, np.uint8)
        lease = buffer.view(_Lease)
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return MemoryArena(lease)


_NOT_TENSORS = ("boundaries", "dummy")
"""Fields of `PackedBatch` that are not tensors."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences end to end in one buffer, and which tokens carry loss."""

    input_ids_T: Tensor
    """Token ids, integers [T]."""
    position_ids_T: Tensor
    """Position inside the sequence, integers [T]."""
    boundaries: list[int]
    """0, end of the first sequence, ..., T."""
    predictor_N: Tensor
    """Index into T of the token whose hidden state predicts the target: the token before it, int64 [N]."""
    target_N: Tensor
    """Id of the trained token, int64 [N]."""
    weight_N: Tensor
    """Factor of the token's loss, float32 [N]. The plan decides it; see `trainer.losses.base`. Losses of all
    micro-batches and ranks of an optimizer step are added."""
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
    """Policy versions between the one that sampled the token's step and the newest of the plan, float32 [N]. NaN where
    the version is unknown; None where no step has a known version."""
    reference_logprobs_N: Tensor | None = None
    """Log-probability of the target under the frozen reference policy, float32 [N]; filled before the update."""
    proximal_logprobs_N: Tensor | None = None
    """Log-probability of the target under the proximal policy, float32 [N]; filled before the update if that policy has
    other weights than the one in training."""
    state_S: Tensor | None = None
    """Index into T of the last token before a trained step's action, int64 [S]; None without a value head."""
    value_target_S: Tensor | None = None
    """Target of the step's value, float32 [S]; NaN where values are only read."""
    value_weight_S: Tensor | None = None
    """1 / number of trained steps of the optimizer step, float32 [S]."""
    dummy: bool = False
    """Placeholder with weight 0 for a rank without a micro-batch; running it keeps the collectives in step."""

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on a device."""
        if self.input_ids_T.device == device:
            return self
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, column in columns.items():
            if column is not None and name not in _NOT_TENSORS:
                columns[name] = column.to(device, non_blocking=True)
        return PackedBatch(**columns)
