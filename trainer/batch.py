"""PackedBatch: what one forward and backward pass gets.

Axes: `_T` tokens of the packed buffer, `_N` its rows that carry loss (one per trained action token).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {n: v if v is None or n == "boundaries" else v.to(device) for n, v in values.items()}
        return PackedBatch(**moved)
