"""Attention over a packed buffer by FlexAttention: a block mask and a score function compiled into one kernel.

It is the one that serves models which soft-cap their attention scores (Gemma 2). On a CPU PyTorch has no backward pass
for it, and scores every pair of the buffer: there it serves for scoring and checks alone.
"""

import warnings
from functools import cache
from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253
from torch.nn.attention.flex_attention import flex_attention  # noqa: TID253

from lake.errors import UsageError
from trainer.attention.layout import Layout, required_layout


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

    Arguments and result are those of `trainer.attention.sdpa.packed_attention`, and `softcap`: scores become
    softcap * tanh(score / softcap). Attention sinks are refused.
    """
    layout = required_layout(layout, attention_mask, dropout)
    if unsupported.get("s_aux") is not None:
        raise UsageError(f"{type(module).__name__} uses attention sinks, which packed training does not")
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
