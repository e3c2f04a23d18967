"""The folder of a model that is served or played with: what can be wrong with it, and what its policy is called.

A policy is called after its weights. A folder's name alone says too little: every training run has a `final`.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from lake.errors import UsageError
from lake.storage.atomic import check_whole, settled

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Ends of the names of files of weights."""
_BLOCK = 4096
_BLOCKS = 4096
"""Bytes that are read at a place, and places in a file whose tensors are not known."""
_LONGEST_HEADER = 64 << 20
_DIGEST_LENGTH = 8


def model_folder(given: str | Path) -> Path:
    """The folder of a model that somebody named.

    Raises:
        UsageError: there is none, it lacks files that were written, or it is a training run's, which holds the model's.
    """
    folder = settled(Path(given))
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: no such folder; valid: a model's folder with config.json, weights and tokenizer, such as "
            "`trajlake train` writes; of a model hub, download it first"
        )
    trained = folder / "final"
    if not (folder / "config.json").exists() and (trained / "config.json").exists():
        raise UsageError(f"{folder} is the folder of a training run; its model is {trained}")
    check_whole(folder)
    return folder


def policy_name(model: str | Path) -> str:
    """`episodes.policy` of a model: LABEL-DIGEST of a folder's weights; a name that is no folder stands for itself.

    LABEL is the folder's name; of a folder inside a training run's, the run and that name: `run-1/final-3f2a91bc`.
    DIGEST is of the weights, and absent where a folder has none (a tokenizer's).
    """
    folder = settled(Path(model))
    if not folder.is_dir():
        return str(model)
    place = folder.resolve()
    run = _run_of(place.parent)
    name = Path(model).resolve().name
    label = name if run is None else f"{run}/{name}"
    digest = weights_digest(place)
    return label if digest is None else f"{label}-{digest[:_DIGEST_LENGTH]}"


def weights_digest(folder: Path) -> str | None:
    """SHA-256 over the weights of a model's folder, in hexadecimal digits; None if it holds none.

    What is read is bounded by the number of tensors, not by their size: the list of a file's tensors, and of each
    tensor its first, middle and last 4096 bytes. Of a file of another format blocks in equal distances are read.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file())
    if not files:
        return None
    found = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start, length in _blocks(path, size):
                file.seek(start)
                found.update(file.read(length))
    return found.hexdigest()


def _blocks(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Where a digest reads a file of weights: offsets and lengths in bytes."""
    tensors = _tensors(path, size) if path.suffix == ".safetensors" else None
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


def _tensors(path: Path, size: int) -> list[tuple[int, int]] | None:
    """Where the tensors of a safetensors file begin and end, in order; None if it is none, or is damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _LONGEST_HEADER):
            return None
        try:
            listed = json.loads(file.read(length))
            found = [one["data_offsets"] for name, one in listed.items() if name != "__metadata__"]
            tensors = sorted((8 + length + int(start), 8 + length + int(end)) for start, end in found)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
    return tensors if all(0 <= start <= end <= size for start, end in tensors) else None


def _run_of(folder: Path) -> str | None:
    """The training run whose folder this is, or whose `versions` or `checkpoints`; None of another folder."""
    for place in (folder, folder.parent):
        try:
            record = json.loads((place / "run.json").read_bytes())
            return str(record["run_id"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
    return None
