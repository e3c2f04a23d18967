"""FSDP2: weights, gradients and moments in shards, one per rank (Zhao et al. 2023, arXiv 2304.11277; fully_shard).

Each layer's weights are gathered before its forward and backward pass and freed afterwards; embedding, final norm and
head stay gathered for a complete pass. Gradients are summed over ranks and not averaged, because the plan's weights are
those of the optimizer step. Every rank has its shard in float32. With a 16-bit dtype the gathered weights are of that
type, and gradients are summed in float32; with float16 before they are divided by the loss scale.

All ranks write checkpoints, and any number of ranks reads them: torch.distributed.checkpoint with safetensors as its
format. Each file's header has the positions of its shards, so nothing is pickled. Scalars are written as arrays of one
element, which the reader needs.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - a script that does nothing without it
from torch import Tensor, distributed  # noqa: TID253
from torch.distributed.checkpoint.hf_storage import (  # noqa: TID253
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: TID253
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: TID253
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: TID253
from torch.distributed.device_mesh import init_device_mesh  # noqa: TID253
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: TID253
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: TID253

from lake.storage.atomic import atomic_folder, partial_path
from trainer.backends.base import PolicyBackend, check_layout
from trainer.backends.ranks import Ranks
from trainer.config import OptimizerConfig
from trainer.policy.model import PackedPolicy, get_layers


@contextmanager
def open_shared_folder(target: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield a new folder for all ranks; it becomes `target` when the block succeeds on every rank."""
    if ranks.rank == 0:
        with atomic_folder(target) as partial:
            ranks.wait()
            yield partial
            ranks.wait()
    else:
        ranks.wait()
        yield partial_path(target)
        ranks.wait()
    ranks.wait()


def save_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write this rank's shards of DTensors, and tensors that are equal on all ranks; every rank calls it."""
    if ranks.rank == 0:
        folder.mkdir()
    ranks.wait()
    arrays = {name: tensor.reshape(1) if tensor.ndim == 0 else tensor for name, tensor in tensors.items()}
    if arrays:
        save(arrays, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read_shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return size and dtype of each whole tensor in a folder of shards; scalars have size [1]."""
    if not any(folder.glob("*.safetensors")):
        return {}
    metadata_of = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    shapes = {}
    for name, metadata in metadata_of.items():
        assert isinstance(metadata, TensorStorageMetadata)
        shapes[name] = (metadata.size, metadata.properties.dtype)
    return shapes


def load_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Read tensors in place, each rank its shards, written by any number of ranks.

    Raises:
        ContractError: names, shapes or dtypes differ from those of the shards.
    """
    check_layout(read_shapes(folder), tensors)
    if tensors:
        with warnings.catch_warnings():
            # It warns when one device reads the files of several ranks.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(folder))
            load(dict(tensors), storage_reader=reader, no_dist=not ranks.joined)


def load_on_rank_zero(load: Callable[[bool], PackedPolicy], ranks: Ranks) -> PackedPolicy:
    """Load a policy to shard: `load(False)` with weights on rank 0, `load(True)` without on the others.

    Raises:
        UsageError: on rank 0, where the model cannot be loaded or trained packed.
    """
    policies: list[PackedPolicy] = []
    ranks.on_rank_zero(lambda: policies.append(load(False)))
    return policies[0] if policies else load(True)


def shard_policy(policy: PackedPolicy, ranks: Ranks) -> None:
    """Shard a policy in place: weights that are equal on every rank, or those of `load_on_rank_zero`."""
    policy.compute_with_model()
    tensors = _name_tensors(policy.model)
    empty = any(tensor.is_meta for tensor in tensors.values())
    mesh = init_device_mesh(torch.device(ranks.device).type, (ranks.world_size,))
    narrow = policy.scorer.autocast
    policy.scorer.autocast = None
    precision = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in get_layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fully_shard(policy.scorer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in policy.scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo supports only sums.
            module.set_force_sum_reduction_for_comms(True)
    if ranks.sum_over_ranks({"empty": float(empty)})["empty"]:
        if empty:
            policy.scorer.to_empty(device=ranks.device)
        _send(tensors, _name_tensors(policy.model), ranks)


def _name_tensors(model: Any) -> dict[str, Tensor]:
    """Return parameters and buffers by name, also those that checkpoints lack."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def _send(tensors: Mapping[str, Tensor], shards: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Send rank 0's tensors to all ranks, one at a time, into their `shards`, which have the same order."""
    for name, shard in shards.items():
        like = tensors[name]
        sent = (
            like.to(ranks.device).contiguous()
            if ranks.leads
            else torch.empty(like.shape, dtype=like.dtype, device=ranks.device)
        )
        # As bytes: some dtypes cannot be sent.
        distributed.broadcast(sent.reshape(-1).view(torch.uint8), src=0)
        if isinstance(shard, DTensor):
            sent = distribute_tensor(sent, shard.device_mesh, shard.placements, src_data_rank=None)
        shard.copy_(sent)


class Sharded(PolicyBackend):
    """Trains one policy over several ranks, and shards it in place."""

    def __init__(self, policy: PackedPolicy, config: OptimizerConfig, ranks: Ranks) -> None:
        shard_policy(policy, ranks)
        super().__init__(policy, config, ranks)

    def _clip(self) -> float:
        gradients = [p.grad.to_local() for p in self._trained if isinstance(p.grad, DTensor)]
        squared = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        for gradient in gradients:
            squared += gradient.float().square().sum(dtype=torch.float64)
        distributed.all_reduce(squared)
        norm = float(squared.sqrt())
        factor = min(1.0, self._max_grad_norm / (norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _gather_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered = {}
        for name, tensor in tensors.items():
            full = self._gather_tensor(tensor).cpu()
            if self.rank == 0:
                gathered[name] = full
        return gathered

    def _cut_shard(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return tensor.to(like.device)
        # Every rank has the full tensor and cuts its shard: nothing is sent.
        full = tensor.to(like.device)
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
