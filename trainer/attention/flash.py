"""Attention over a packed buffer in one call of PyTorch's variable-length flash attention: CUDA, 16-bit floats."""

from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253
from torch.nn.attention.varlen import varlen_attn  # noqa: TID253

from lake.errors import UsageError
from trainer.attention.layout import Layout, required_layout


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

    Arguments and result are those of `trainer.attention.sdpa.packed_attention`; a soft cap and sinks are refused.
    """
    layout = required_layout(layout, attention_mask, dropout)
    if unsupported.get("s_aux") is not None:
        raise UsageError(f"{type(module).__name__} uses attention sinks, which packed training does not")
    if unsupported.get("softcap") is not None:
        msg = f"{type(module).__name__} soft-caps its attention, which flash does not; choose attention = flex"
        raise UsageError(msg)
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
