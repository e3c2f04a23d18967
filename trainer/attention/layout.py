"""Where the sequences of a packed buffer lie, with what attention derives from it, computed once per buffer."""

from itertools import pairwise

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253
from torch.nn.attention.flex_attention import BlockMask, create_block_mask  # noqa: TID253

from lake.errors import UsageError


class Layout:
    """The sequences of one packed buffer; handed to every layer's attention.

    Args:
        boundaries: 0, end of the first sequence, ..., T.
    """

    def __init__(self, boundaries: list[int], device: torch.device) -> None:
        self.boundaries = boundaries
        self.device = device
        self.lengths = [end - start for start, end in pairwise(boundaries)]
        self.longest = max(self.lengths)
        self._cumulative: Tensor | None = None
        self._bands: dict[tuple[int, int], Tensor] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    @property
    def cumulative(self) -> Tensor:
        """The boundaries as an int32 tensor on the device."""
        if self._cumulative is None:
            self._cumulative = torch.tensor(self.boundaries, dtype=torch.int32, device=self.device)
        return self._cumulative

    def band(self, length: int, window: int) -> Tensor:
        """Which keys a query may see, [length, length], true inside the window: itself and window - 1 before it."""
        key = (length, window)
        if key not in self._bands:
            position = torch.arange(length, device=self.device)
            back = position[:, None] - position[None, :]
            self._bands[key] = (back >= 0) & (back < window)
        return self._bands[key]

    def block_mask(self, window: int | None) -> BlockMask:
        """FlexAttention's mask of the whole buffer."""
        if window not in self._block_masks:
            lengths = torch.tensor(self.lengths, device=self.device)
            sequence_T = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), lengths)

            def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                del batch, head
                inside = (sequence_T[query] == sequence_T[key]) & (query >= key)
                return inside if window is None else inside & (query - key < window)

            total = self.boundaries[-1]
            self._block_masks[window] = create_block_mask(visible, None, None, total, total, device=self.device)
        return self._block_masks[window]


def required_layout(layout: Layout | None, attention_mask: Tensor | None, dropout: float) -> Layout:
    """The layout, after checking that nothing was asked for that packed attention does not do.

    Raises:
        UsageError: no layout, a mask, or dropout.
    """
    if attention_mask is not None or layout is None or dropout:
        asked = "a mask" if attention_mask is not None else "dropout" if dropout else "no layout of the sequences"
        raise UsageError(
            f"packed attention was given {asked}: either this instance was asked to generate (use another one), or its "
            f"architecture does not hand the layout on, and cannot be trained packed"
        )
    return layout
