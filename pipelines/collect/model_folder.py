"""The folder of a model to serve or to play: its checks, and the name of its policy.

The name contains a digest of the weights. The folder's name alone is ambiguous: every training run has a `final`.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from lake.errors import UsageError
from lake.storage.atomic import check_complete, find_settled

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of weight files."""
_BLOCK = 4096
_BLOCKS = 4096
"""Bytes to read at one offset, and offsets to read in a file with unknown tensors."""
_LONGEST_HEADER = 64 << 20
_DIGEST_LENGTH = 8


def require_model_folder(path: str | Path) -> Path:
    """Return the folder of a model.

    Raises:
        UsageError: it does not exist, lacks files, or belongs to a training run that contains the model.
    """
    folder = find_settled(Path(path))
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: no such folder; valid: a model's folder with config.json, weights and tokenizer, such as "
            "`trajlake train` writes; download models of a hub first"
        )
    trained = folder / "final"
    if not (folder / "config.json").exists() and (trained / "config.json").exists():
        raise UsageError(f"{folder} is the folder of a training run; its model is {trained}")
    check_complete(folder)
    return folder


def name_policy(model: str | Path) -> str:
    """Return `episodes.policy` of a model: LABEL-DIGEST of a folder, or the name itself if it is not a folder.

    LABEL is the folder's name, or run/name inside a training run: `run-1/final-3f2a91bc`. DIGEST is computed from the
    weights, and missing if the folder has none (a tokenizer's folder).
    """
    folder = find_settled(Path(model))
    if not folder.is_dir():
        return str(model)
    resolved = folder.resolve()
    run = _find_run(resolved.parent)
    name = Path(model).resolve().name
    label = name if run is None else f"{run}/{name}"
    digest = compute_weights_digest(resolved)
    return label if digest is None else f"{label}-{digest[:_DIGEST_LENGTH]}"


def compute_weights_digest(folder: Path) -> str | None:
    """Return the SHA-256 of a model folder's weights, in hexadecimal digits; None if it has none.

    The read size depends on the number of tensors, not on their size. For each file it covers the list of tensors, and
    the first, middle and last 4096 bytes of each tensor. For other formats it covers blocks at equal distances.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file())
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start, length in _iterate_blocks(path, size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()


def _iterate_blocks(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets and lengths in bytes that the digest of a weight file covers."""
    tensors = _read_tensor_ranges(path, size) if path.suffix == ".safetensors" else None
    if tensors is None:
        yield from ((size * part // _BLOCKS, _BLOCK) for part in range(_BLOCKS))
        yield max(0, size - _BLOCK), _BLOCK
        return
    header = min((start for start, _ in tensors), default=size)
    yield 0, header
    for start, end in tensors:
        for at in (start, (start + end - _BLOCK) // 2, end - _BLOCK):
            first = max(start, at)
            yield first, min(_BLOCK, end - first)


def _read_tensor_ranges(path: Path, size: int) -> list[tuple[int, int]] | None:
    """Return start and end of each tensor in a safetensors file, sorted; None if the file is invalid or damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _LONGEST_HEADER):
            return None
        try:
            listed = json.loads(file.read(length))
            offsets = [tensor["data_offsets"] for name, tensor in listed.items() if name != "__metadata__"]
            tensors = sorted((8 + length + int(start), 8 + length + int(end)) for start, end in offsets)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
    return tensors if all(0 <= start <= end <= size for start, end in tensors) else None


def _find_run(folder: Path) -> str | None:
    """Return the training run of a folder, or of the parent of `versions` or `checkpoints`; None for other folders."""
    for ancestor in (folder, folder.parent):
        try:
            record = json.loads((ancestor / "run.json").read_bytes())
            return str(record["run_id"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
    return None
