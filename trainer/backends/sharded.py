"""FSDP2: weights, gradients and moments in shards, one per rank (Zhao et al. 2023, arXiv 2304.11277; fully_shard).

Each layer's weights are gathered before its forward and backward pass and freed afterwards; embedding, final norm and
head are gathered for the whole of each pass. Gradients are summed over ranks, not averaged: the plan's weights are
those of the whole optimizer step. Every rank holds its shard in float32; with dtype bfloat16 the gathered weights are
bfloat16, and gradients are summed in float32.

Checkpoints are written by all ranks, and read by any number of them: torch.distributed.checkpoint with safetensors as
its format. Each file's header says where its shards belong, so nothing is pickled. Scalars are written as arrays of one
element, which is all that the reader can cut out.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
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

from lake.storage.atomic import atomic_folder, partial_place
from trainer.backends.base import PolicyBackend, check_layout
from trainer.backends.ranks import Ranks
from trainer.config import OptimizerConfig
from trainer.policy.model import Policy, layers_of


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
    """Write this rank's part of DTensors, and of tensors that are the same on every rank; every rank calls it."""
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

    Raises:
        ContractError: other names, shapes or dtypes than the shards hold.
    """
    check_layout(shapes_in(folder), tensors)
    if tensors:
        with warnings.catch_warnings():
            # One device reading what several ranks wrote is what is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(folder))
            load(dict(tensors), storage_reader=reader, no_dist=not ranks.joined)


def loaded_on_rank_zero(load: Callable[[bool], Policy], ranks: Ranks) -> Policy:
    """A policy with weights on rank 0 and without on the others (`load` is told whether without), to be sharded.

    Raises:
        UsageError: on rank 0, where the model cannot be loaded or is not served.
    """
    whole: list[Policy] = []
    ranks.on_rank_zero(lambda: whole.append(load(False)))
    return whole[0] if whole else load(True)


def shard_policy(policy: Policy, ranks: Ranks) -> None:
    """Spread a policy's weights, the same on every rank or of `loaded_on_rank_zero`, over the ranks, in place."""
    whole = _tensors(policy.model)
    empty = any(tensor.is_meta for tensor in whole.values())
    mesh = init_device_mesh(torch.device(ranks.device).type, (ranks.world_size,))
    narrow = policy.scorer.autocast
    policy.scorer.autocast = None
    precision = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers_of(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fully_shard(policy.scorer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in policy.scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo knows sums only.
            module.set_force_sum_reduction_for_comms(True)
    if ranks.summed({"empty": float(empty)})["empty"]:
        if empty:
            policy.scorer.to_empty(device=ranks.device)
        _send(whole, _tensors(policy.model), ranks)


def _tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers by name, also those that no checkpoint holds."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def _send(whole: Mapping[str, Tensor], own: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Send rank 0's tensors to all ranks, one at a time; each keeps its part in `own`, which has the same order."""
    for name, mine in own.items():
        like = whole[name]
        sent = (
            like.to(ranks.device).contiguous()
            if ranks.leads
            else torch.empty(like.shape, dtype=like.dtype, device=ranks.device)
        )
        # As bytes: not every kind of number can be sent.
        distributed.broadcast(sent.reshape(-1).view(torch.uint8), src=0)
        if isinstance(mine, DTensor):
            sent = distribute_tensor(sent, mine.device_mesh, mine.placements, src_data_rank=None)
        mine.copy_(sent)


class Sharded(PolicyBackend):
    """Trains one policy over several ranks; it is sharded in place by `shard_policy`."""

    def __init__(self, policy: Policy, config: OptimizerConfig, ranks: Ranks) -> None:
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

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = {}
        for name, tensor in tensors.items():
            value = self._whole(tensor).cpu()
            if self.rank == 0:
                whole[name] = value
        return whole

    def _placed(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return tensor.to(like.device)
        # Every rank has the whole tensor and cuts its own shard: nothing is sent.
        whole = tensor.to(like.device)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
