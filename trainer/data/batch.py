"""PackedBatch: what one forward and backward pass gets.

Axes: `_T` tokens of the packed buffer, `_N` its rows that carry loss (one per trained action token).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    """What the token's loss is multiplied by, float32 [N]: `trainer.data.aggregation`, decided by the plan. Losses of
    all micro-batches and ranks of an optimizer step are simply added."""
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
