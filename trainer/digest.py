"""Fingerprints: of a set of tensors, which is what is in them and not how a file happens to store them; of a file."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch  # noqa: TID253 - loaded by commands only when they train


class TensorDigest:
    """The digest of tensors that come one after another, in name order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take in the next tensor."""
        tensor = tensor.detach().cpu().contiguous()
        self._digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        self._digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())

    def hexdigest(self) -> str:
        """64 hexadecimal characters."""
        return self._digest.hexdigest()


def tensor_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over (name, dtype, shape, bytes) of every tensor, in name order, as 64 hexadecimal characters.

    A safetensors file has no such stable hash: the order of its metadata varies.
    """
    digest = TensorDigest()
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, as 64 hexadecimal characters."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
