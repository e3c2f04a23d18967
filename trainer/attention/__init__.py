"""Attention over a packed buffer: several implementations of one function, registered with transformers.

    sdpa    PyTorch's fused attention, one call per sequence; every device
    flash   PyTorch's variable-length flash attention, one call per buffer; CUDA, 16-bit floats
    flex    a block mask compiled into a kernel; CUDA (on a CPU it only scores, without a backward pass)

Each is causal inside a sequence, blind beyond it, and looks as far back as the layer's window. Any model that uses
transformers' attention interface is served.
"""

from typing import Literal

import torch  # noqa: TID253 - loaded by commands only when they train
from transformers import AttentionInterface  # noqa: TID253

from lake.errors import UsageError
from trainer.attention.flash import flash_attention
from trainer.attention.flex import flex_packed_attention
from trainer.attention.layout import Layout
from trainer.attention.sdpa import packed_attention

Kind = Literal["auto", "sdpa", "flex", "flash"]
"""What `TrainConfig.attention` can say."""
NAMES = {"sdpa": "trajlake_packed", "flex": "trajlake_blocks", "flash": "trajlake_varlen"}
"""The names under which transformers knows them. None contains a word of its own: it treats any "flash" specially."""

AttentionInterface.register(NAMES["sdpa"], packed_attention)
AttentionInterface.register(NAMES["flex"], flex_packed_attention)
AttentionInterface.register(NAMES["flash"], flash_attention)


def choose_attention(kind: Kind, device: torch.device, dtype: torch.dtype) -> str:
    """The implementation to use.

    Args:
        kind: what was asked for; auto takes flash where it runs, else sdpa.

    Returns:
        A key of `NAMES`.

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


__all__ = ["NAMES", "Kind", "Layout", "choose_attention", "packed_attention"]
