"""Attention over a packed buffer: several implementations of one function, registered with transformers.

    sdpa    PyTorch's fused attention, one call per sequence; every device
    flash   PyTorch's variable-length flash attention, one call per buffer; CUDA, 16-bit floats
    flex    a block mask and a score function compiled into one kernel; CUDA (on a CPU it only scores: PyTorch has no
            backward pass there). It serves models that soft-cap their attention scores (Gemma 2)

Each is causal inside a sequence, blind beyond it, and looks as far back as the layer's window. Any model that uses
transformers' attention interface is served.

transformers' own packed path builds a dense T x T mask and scores every pair: measured on one core with 14 sequences of
300 tokens, ten times slower than sdpa here, where each sequence is one call of PyTorch's fused causal attention: no
mask, memory linear in T, nothing computed across boundaries. Only a sequence longer than its layer's window gets a
mask, of its own length.
"""

import warnings
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Literal

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253
from torch.nn.attention.flex_attention import (  # noqa: TID253
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.nn.attention.varlen import varlen_attn  # noqa: TID253
from torch.nn.functional import scaled_dot_product_attention  # noqa: TID253
from transformers import AttentionInterface  # noqa: TID253

from lake.errors import UsageError


class Layout:
    """The sequences of one packed buffer, by their boundaries (0, end of the first, ..., T); every layer gets it."""

    def __init__(self, boundaries: list[int], device: torch.device) -> None:
        self.boundaries = boundaries
        self.device = device
        self.lengths = [end - start for start, end in pairwise(boundaries)]
        self.longest = max(self.lengths)
        self._bands: dict[tuple[int, int], Tensor] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    @cached_property
    def cumulative(self) -> Tensor:
        """The boundaries as an int32 tensor on the device."""
        return torch.tensor(self.boundaries, dtype=torch.int32, device=self.device)

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


def _checked(
    module: torch.nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    layout: Layout | None,
    unsupported: Any,
    kind: str,
) -> Layout:
    """The layout, after refusing (UsageError) what packed attention does not do.

    That is: no layout, a mask, dropout, attention sinks, or a soft cap.
    """
    if attention_mask is not None or layout is None or dropout:
        asked = "a mask" if attention_mask is not None else "dropout" if dropout else "no layout of the sequences"
        raise UsageError(
            f"packed attention was given {asked}: either this instance was asked to generate (use another one), or its "
            f"architecture does not hand the layout on, and cannot be trained packed"
        )
    if unsupported.get("s_aux") is not None:
        raise UsageError(f"{type(module).__name__} uses attention sinks, which packed training does not")
    if unsupported.get("softcap") is not None:
        raise UsageError(
            f"{type(module).__name__} soft-caps its attention, which {kind} does not; choose attention = flex"
        )
    return layout


def packed_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed buffer.

    Args:
        query_BHTD: [1, query heads, T, head dimension].
        key_BHTD: [1, key heads, T, head dimension]; so are the values.
        attention_mask: must be None.
        scaling: factor on the scores.
        dropout: must be 0.
        sliding_window: how many tokens a query sees, itself included; None sees all before it.
        unsupported: what other models pass along; a soft cap or attention sinks are refused.

    Returns:
        [1, T, query heads, head dimension], and None for the weights.

    Raises:
        UsageError: the model wants something that this attention does not do.
    """
    layout = _checked(module, attention_mask, dropout, layout, unsupported, "sdpa")
    grouped = query_BHTD.shape[1] != key_BHTD.shape[1]
    # split, not slices: the backward pass of a slice fills a whole buffer with zeros, once per sequence.
    tensors = (query_BHTD, key_BHTD, value_BHTD)
    per_sequence = zip(*(torch.split_with_sizes(tensor, layout.lengths, dim=2) for tensor in tensors), strict=True)
    parts = []
    for query, key, value in per_sequence:
        length = query.shape[2]
        windowed = sliding_window is not None and length > sliding_window
        parts.append(
            scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=layout.band(length, sliding_window) if windowed and sliding_window else None,
                is_causal=not windowed,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def flash_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed buffer.

    Arguments and result are those of `packed_attention`; a soft cap and sinks are refused.
    """
    layout = _checked(module, attention_mask, dropout, layout, unsupported, "flash")
    # Norms of queries and keys may leave float32 behind under autocast; the kernel takes one 16-bit type.
    narrow = value_BHTD.dtype if value_BHTD.dtype != torch.float32 else torch.get_autocast_dtype("cuda")
    query_THD, key_THD, value_THD = (
        tensor[0].transpose(0, 1).to(narrow).contiguous() for tensor in (query_BHTD, key_BHTD, value_BHTD)
    )
    mixed_THD = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        layout.cumulative,
        layout.cumulative,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query_THD.shape[1] != key_THD.shape[1],
    )
    assert isinstance(mixed_THD, Tensor)
    return mixed_THD[None].to(query_BHTD.dtype), None


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def flex_packed_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed buffer.

    Arguments and result are those of `packed_attention`, and `softcap`: scores become
    softcap * tanh(score / softcap). Attention sinks are refused.
    """
    layout = _checked(module, attention_mask, dropout, layout, unsupported, "flex")
    if not query_BHTD.is_cuda and torch.is_grad_enabled() and query_BHTD.requires_grad:
        msg = "flex attention has no backward pass on a CPU: train this model on a GPU, or choose attention = sdpa"
        raise UsageError(msg)

    def capped(score: Tensor, *where: Tensor) -> Tensor:
        del where
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    kernel = _compiled() if query_BHTD.is_cuda else flex_attention
    # Under autocast queries and keys may be float32 beside 16-bit values.
    narrow = value_BHTD.dtype
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        mixed_BHTD = kernel(
            query_BHTD.to(narrow),
            key_BHTD.to(narrow),
            value_BHTD,
            score_mod=None if softcap is None else capped,
            block_mask=layout.block_mask(sliding_window),
            scale=scaling,
            enable_gqa=query_BHTD.shape[1] != key_BHTD.shape[1],
        )
    return mixed_BHTD.transpose(1, 2).contiguous().to(query_BHTD.dtype), None


Kind = Literal["auto", "sdpa", "flex", "flash"]
"""What `TrainConfig.attention` can say."""
NAMES = {"sdpa": "trajlake_packed", "flex": "trajlake_blocks", "flash": "trajlake_varlen"}
"""The names under which transformers knows them. None contains a word of its own: it treats any "flash" specially."""

AttentionInterface.register(NAMES["sdpa"], packed_attention)
AttentionInterface.register(NAMES["flex"], flex_packed_attention)
AttentionInterface.register(NAMES["flash"], flash_attention)


def choose_attention(kind: Kind, device: torch.device, dtype: torch.dtype) -> str:
    """The implementation to use, a key of `NAMES`; auto takes flash where it runs, else sdpa.

    Raises:
        UsageError: flash was asked for where it does not run.
    """
    runs_flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if kind == "auto":
        return "flash" if runs_flash else "sdpa"
    if kind == "flash" and not runs_flash:
        msg = f"flash attention needs a GPU and 16-bit floats, not {device.type} and {dtype}; choose auto, or sdpa"
        raise UsageError(msg)
    return kind
