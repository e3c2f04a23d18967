"""Attention over a packed buffer, one sequence at a time.

Sequences lie end to end in one row and must not see each other. transformers' own packed path builds a dense T x T mask
and scores every pair: measured on one core with 14 sequences of 300 tokens, ten times slower than this. Here each
sequence is one call of PyTorch's fused causal attention: no mask, memory linear in T, nothing computed across
boundaries. Registered with transformers' attention interface, so that any model that uses the interface is served.
"""

from itertools import pairwise
from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253
from torch.nn.functional import scaled_dot_product_attention  # noqa: TID253

from lake.errors import UsageError

NAME = "trajlake_packed"
"""Name under which transformers knows it."""


def packed_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    boundaries: list[int] | None = None,
    sliding_window: int | None = None,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed buffer.

    Args:
        module: the layer, unused.
        query_BHTD: [1, query heads, T, head dimension].
        key_BHTD: [1, key heads, T, head dimension].
        value_BHTD: the same for values.
        attention_mask: must be None.
        scaling: factor on the scores.
        dropout: must be 0.
        boundaries: 0, end of the first sequence, ..., T.
        sliding_window: reach of the layer; sequences must be shorter.
        unsupported: what other models pass along; a soft cap or attention sinks are refused.

    Returns:
        [1, T, query heads, head dimension], and None for the weights.

    Raises:
        UsageError: the model wants something that this attention does not do.
    """
    if attention_mask is not None or boundaries is None or dropout:
        msg = "packed attention takes boundaries, no mask and no dropout; generate with another instance of the model"
        raise UsageError(msg)
    if unsupported.get("softcap") is not None or unsupported.get("s_aux") is not None:
        msg = f"{type(module).__name__} uses soft-capped attention or attention sinks, which packed training does not"
        raise UsageError(msg)
    lengths = [b - a for a, b in pairwise(boundaries)]
    if sliding_window is not None and max(lengths) > sliding_window:
        msg = f"a sequence of {max(lengths)} tokens exceeds the attention window {sliding_window}; lower --max-length"
        raise UsageError(msg)
    grouped = query_BHTD.shape[1] != key_BHTD.shape[1]
    # split, not slices: the backward pass of a slice fills a whole buffer with zeros, once per sequence.
    tensors = (query_BHTD, key_BHTD, value_BHTD)
    per_sequence = zip(*(torch.split_with_sizes(tensor, lengths, dim=2) for tensor in tensors), strict=True)
    parts = [
        scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        for query, key, value in per_sequence
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None
