"""PackedBatch: what one forward and backward pass gets.

Axes: `_T` tokens of the packed buffer, `_N` its rows that carry loss (one per trained action token).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences end to end in one buffer, and which tokens carry loss."""

    input_ids_T: Tensor
    """Token ids, int64 [T]."""
    position_ids_T: Tensor
    """Position inside the own sequence, int64 [T]."""
    boundaries: list[int]
    """0, end of the first sequence, ..., T."""
    predictor_N: Tensor
    """Index into T of the token whose hidden state predicts the target: one before it, int64 [N]."""
    target_N: Tensor
    """Id of the trained token, int64 [N]."""
    advantages_N: Tensor | None = None
    """Advantage of the token's step, float32 [N]."""
    behaviour_logprobs_N: Tensor | None = None
    """Stored log-probability of the target, float32 [N]."""
    temperature_N: Tensor | None = None
    """Temperature of the distribution, float32 [N]; None means 1."""

    def to(self, device: torch.device) -> PackedBatch:
        """The batch on a device."""
        if self.input_ids_T.device == device:
            return self
        moved = [None if t is None else t.to(device) for t in self._tensors()]
        ids_T, positions_T, predictor_N, target_N, advantages_N, behaviour_N, temperature_N = moved
        assert ids_T is not None
        assert positions_T is not None
        assert predictor_N is not None
        assert target_N is not None
        return PackedBatch(
            ids_T, positions_T, self.boundaries, predictor_N, target_N, advantages_N, behaviour_N, temperature_N
        )

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return (
            self.input_ids_T,
            self.position_ids_T,
            self.predictor_N,
            self.target_N,
            self.advantages_N,
            self.behaviour_logprobs_N,
            self.temperature_N,
        )
