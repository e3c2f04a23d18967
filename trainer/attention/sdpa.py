"""Attention over a packed buffer, one sequence at a time.

Sequences lie end to end in one row and must not see each other. transformers' own packed path builds a dense T x T mask
and scores every pair: measured on one core with 14 sequences of 300 tokens, ten times slower than this. Here each
sequence is one call of PyTorch's fused causal attention: no mask, memory linear in T, nothing computed across
boundaries. Only a sequence longer than its layer's window gets a mask, of its own length.
"""

from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253
from torch.nn.functional import scaled_dot_product_attention  # noqa: TID253

from lake.errors import UsageError
from trainer.attention.layout import Layout, required_layout


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
        value_BHTD: the same for values.
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
    layout = required_layout(layout, attention_mask, dropout)
    if unsupported.get("s_aux") is not None:
        raise UsageError(f"{type(module).__name__} uses attention sinks, which packed training does not")
    if unsupported.get("softcap") is not None:
        msg = f"{type(module).__name__} soft-caps its attention, which sdpa does not; choose attention = flex"
        raise UsageError(msg)
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
