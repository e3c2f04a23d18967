"""Attention over a packed buffer: several implementations of one function, registered with transformers.

    sdpa    PyTorch's fused attention, one call per sequence; every device
    flash   PyTorch's variable-length flash attention, one call per buffer; CUDA from compute capability
            8.0, 16-bit floats
    flex    a block mask and a score function compiled into one kernel; CUDA (on a CPU it only scores: PyTorch has no
            backward pass there). It supports models that soft-cap their attention scores (Gemma 2)

Each is causal inside a sequence, blind beyond it, and looks as far back as the layer's window. All models work that use
transformers' attention interface.

In sdpa each sequence is one call of PyTorch's fused causal attention, without a mask, with memory linear in T, and with
no computation across boundaries. Only a sequence longer than its layer's window gets a mask, of the sequence's length.
The packed path of transformers builds a dense T x T mask and scores every pair. On one core with 14 sequences of 300
tokens it took ten times as long.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Literal

import torch  # noqa: TID253 - a script that does nothing without it
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
    """The boundaries (0, end of the first sequence, ..., T) of a packed buffer, and what layers derive from them."""

    def __init__(self, boundaries: list[int], device: torch.device) -> None:
        self.boundaries = boundaries
        self.device = device
        self.lengths = [end - start for start, end in pairwise(boundaries)]
        self.longest = max(self.lengths)
        self._bands: dict[tuple[int, int], Tensor] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    @cached_property
    def cumulative(self) -> Tensor:
        """Return the boundaries as an int32 tensor on the device."""
        return torch.tensor(self.boundaries, dtype=torch.int32, device=self.device)

    def band(self, length: int, window: int) -> Tensor:
        """Return the mask of visible keys, bool [length, length]: a query sees itself and window - 1 keys before it."""
        key = (length, window)
        if key not in self._bands:
            position = torch.arange(length, device=self.device)
            back = position[:, None] - position[None, :]
            self._bands[key] = (back >= 0) & (back < window)
        return self._bands[key]

    def block_mask(self, window: int | None) -> BlockMask:
        """Return FlexAttention's mask of the buffer."""
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


def _check_call(
    module: torch.nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    layout: Layout | None,
    unsupported: Any,
    kind: str,
) -> Layout:
    """Return the layout of a call.

    Raises:
        UsageError: packed attention supports no mask, dropout, attention sinks or soft cap, and needs a layout.
    """
    if attention_mask is not None or layout is None or dropout:
        fault = "a mask" if attention_mask is not None else "dropout" if dropout else "no layout of the sequences"
        raise UsageError(
            f"packed attention was given {fault}: either this instance was asked to generate (use another one), or its "
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
    """Compute causal attention inside each sequence of a packed buffer.

    Args:
        query_BHTD: [1, query heads, T, head dimension].
        key_BHTD: [1, key heads, T, head dimension]; so are the values.
        attention_mask: must be None.
        scaling: factor on the scores.
        dropout: must be 0.
        sliding_window: number of tokens that a query sees, itself included; None for all tokens before it.
        unsupported: options of other architectures; a soft cap and attention sinks are refused.

    Returns:
        [1, T, query heads, head dimension], and None for the weights.

    Raises:
        UsageError: the model needs something that this attention does not support.
    """
    layout = _check_call(module, attention_mask, dropout, layout, unsupported, "sdpa")
    grouped = query_BHTD.shape[1] != key_BHTD.shape[1]
    # split, not slices: the backward pass of a slice fills a whole buffer with zeros, once per sequence.
    tensors = (query_BHTD, key_BHTD, value_BHTD)
    per_sequence = zip(*(torch.split_with_sizes(tensor, layout.lengths, dim=2) for tensor in tensors), strict=True)
    outputs = []
    for query, key, value in per_sequence:
        length = query.shape[2]
        windowed = sliding_window is not None and length > sliding_window
        outputs.append(
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
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


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
    """Compute causal attention inside each sequence of a packed buffer.

    Takes and returns the same as `packed_attention`; a soft cap and sinks are refused.
    """
    layout = _check_call(module, attention_mask, dropout, layout, unsupported, "flash")
    # Norms of queries and keys may leave float32 behind under autocast; the kernel takes one 16-bit type.
    narrow = value_BHTD.dtype if value_BHTD.dtype != torch.float32 else torch.get_autocast_dtype("cuda")
    repeats = query_BHTD.shape[1] // key_BHTD.shape[1]
    if repeats > 1 and not _TAKES_GROUPS:
        key_BHTD, value_BHTD = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key_BHTD, value_BHTD))
    query_THD, key_THD, value_THD = (
        tensor[0].transpose(0, 1).to(narrow).contiguous() for tensor in (query_BHTD, key_BHTD, value_BHTD)
    )
    options: dict[str, Any] = {"enable_gqa": repeats > 1} if _TAKES_GROUPS else {}
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
        **options,
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
    """Compute causal attention inside each sequence of a packed buffer.

    Takes and returns the same as `packed_attention`, and takes `softcap`: scores become
    softcap * tanh(score / softcap). Attention sinks are refused.
    """
    layout = _check_call(module, attention_mask, dropout, layout, unsupported, "flex")
    if not query_BHTD.is_cuda and torch.is_grad_enabled() and query_BHTD.requires_grad:
        msg = "flex attention has no backward pass on a CPU: train this model on a GPU, or choose attention = sdpa"
        raise UsageError(msg)

    def capped(score: Tensor, *where: Tensor) -> Tensor:
        del where
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    kernel = _compiled() if query_BHTD.is_cuda else flex_attention
    # Under autocast queries and keys may be float32 while values have 16 bits.
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
"""Values of `TrainConfig.attention`."""
NAMES = {"sdpa": "trajlake_packed", "flex": "trajlake_blocks", "flash": "trajlake_varlen"}
"""Names in transformers. They avoid its words: it treats every name with "flash" in a special way."""

_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's flash attention takes fewer key heads than query heads: from 2.12 on."""
_FUNCTIONS = {"sdpa": packed_attention, "flex": flex_packed_attention, "flash": flash_attention}
for _kind, _function in _FUNCTIONS.items():
    AttentionInterface.register(NAMES[_kind], _function)


@contextmanager
def use_attention(function: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Let models with attention sdpa call another function while the block runs."""
    interface: Any = AttentionInterface
    registered = interface()[NAMES["sdpa"]]
    AttentionInterface.register(NAMES["sdpa"], function)
    try:
        yield
    finally:
        AttentionInterface.register(NAMES["sdpa"], registered)


def leave_uncompiled() -> None:
    """Keep torch.compile out of attention: it would compile a layer again for each layout of sequences."""
    disable: Any = torch.compiler.disable
    for kind, function in _FUNCTIONS.items():
        AttentionInterface.register(NAMES[kind], disable(function))


def choose_attention(kind: Kind, device: torch.device, dtype: torch.dtype) -> str:
    """Return the implementation to use, a key of `NAMES`; auto takes flash where it runs, else sdpa.

    Raises:
        UsageError: `kind` is flash, and the device or the type does not run it.
    """
    runs_flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if runs_flash and torch.cuda.is_available():  # GPUs before Ampere, such as T4 and V100, have no flash attention
        runs_flash = torch.cuda.get_device_capability(device) >= (8, 0)
    if kind == "auto":
        return "flash" if runs_flash else "sdpa"
    if kind == "flash" and not runs_flash:
        msg = (
            f"flash attention needs a GPU of compute capability 8.0 or above and 16-bit floats, not {device.type} and "
            f"{dtype}; choose auto, or sdpa"
        )
        raise UsageError(msg)
    return kind
