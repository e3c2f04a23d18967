"""Distributed checkpoints: every rank writes its shards, and any number of ranks reads them.

torch.distributed.checkpoint with safetensors as its format: where a shard belongs stands in the file's own header, so
nothing is pickled. Scalars are written as arrays of one element, which is all that the reader can cut out.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253
from torch.distributed.checkpoint.hf_storage import (  # noqa: TID253
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: TID253
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: TID253
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: TID253

from lake.errors import ContractError
from trainer.atomic import atomic_folder, partial_place
from trainer.backends.ranks import Ranks


@contextmanager
def shared_folder(target: Path, ranks: Ranks) -> Iterator[Path]:
    """A fresh folder for all ranks to write into; it becomes `target` when the block ends well on every rank."""
    if ranks.rank == 0:
        with atomic_folder(target) as partial:
            ranks.wait()
            yield partial
            ranks.wait()
    else:
        ranks.wait()
        yield partial_place(target)
        ranks.wait()
    ranks.wait()


def save_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write this rank's part of tensors; every rank calls it.

    Args:
        folder: where to; made.
        tensors: by name: DTensors, and whole tensors that are the same on every rank.
        ranks: who takes part.
    """
    if ranks.rank == 0:
        folder.mkdir()
    ranks.wait()
    arrays = {name: tensor.reshape(1) if tensor.ndim == 0 else tensor for name, tensor in tensors.items()}
    if arrays:
        save(arrays, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def shapes_in(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """What shards hold: the size and dtype of each tensor as a whole; scalars have size [1]."""
    if not any(folder.glob("*.safetensors")):
        return {}
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    shapes = {}
    for name, metadata in found.items():
        assert isinstance(metadata, TensorStorageMetadata)
        shapes[name] = (metadata.size, metadata.properties.dtype)
    return shapes


def load_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Read tensors in place, each rank its part, however many ranks wrote them.

    Args:
        folder: the shards.
        tensors: by name: what to fill.
        ranks: who takes part.

    Raises:
        ContractError: other names, shapes or dtypes than the shards hold.
    """
    found = shapes_in(folder)
    if found.keys() != tensors.keys():
        odd = sorted(found.keys() ^ tensors.keys())
        msg = f"the weights are of another model: {len(odd)} names differ, for example {odd[0]}"
        raise ContractError(msg)
    for name, tensor in tensors.items():
        if (tensor.shape, tensor.dtype) != found[name]:
            size, dtype = found[name]
            msg = f"weight {name} is {dtype} {tuple(size)}; the model has {tensor.dtype} {tuple(tensor.shape)}"
            raise ContractError(msg)
    if tensors:
        with warnings.catch_warnings():
            # One device reading what several ranks wrote is what is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(folder))
            load(dict(tensors), storage_reader=reader, no_dist=not ranks.joined)
