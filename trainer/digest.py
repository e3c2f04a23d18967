"""Fingerprint of a set of tensors: what is in them, not how a file happens to store them."""

import hashlib
from collections.abc import Mapping

import torch  # noqa: TID253 - loaded by commands only when they train


def tensor_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over (name, dtype, shape, bytes) of every tensor, in name order.

    A safetensors file has no such stable hash: the order of its metadata varies.

    Args:
        tensors: by name.

    Returns:
        64 hexadecimal characters.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
