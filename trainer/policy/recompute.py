"""Activation checkpointing: a layer keeps its input alone, and is computed again in the backward pass.

transformers' own switch works in training mode only, and training mode brings dropout back.
"""

from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
from torch.utils.checkpoint import checkpoint  # noqa: TID253
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: TID253

from lake.errors import UsageError


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks of a model, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: torch.nn.Module) -> None:
    """Change a model so that its blocks are recomputed in the backward pass; values and gradients stay the same.

    Raises:
        UsageError: the architecture does not say what its blocks are.
    """
    layers = layers_of(model)
    if not layers:
        msg = f"{type(model).__name__} does not support gradient checkpointing; leave gradient_checkpointing out"
        raise UsageError(msg)
    for layer in layers:
        layer.forward = _Recomputed(layer.forward)


class _Recomputed:
    """A forward function that is run again in the backward pass."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
