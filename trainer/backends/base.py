"""The interface of a policy in training: log-probabilities, gradients, updates, and state by name.

Across ranks every call is collective: all ranks make the same calls in the same order. Four methods, which
`SingleDevice` and `Sharded` implement, depend on whether a rank has whole tensors or shards.

With dtype float16 the loss has a scale (Micikevicius et al. 2018, arXiv 1710.03740), by torch.amp.GradScaler. The
smallest float16 above zero is 6e-8, so small gradients of float16 products would become 0. The loss is therefore
multiplied before the backward pass, and the gradients are divided by the same number before they are clipped. Where a
gradient overflows, the update is skipped and the scale halved; after many updates without overflow it is doubled. The
scale is the same on all ranks: an overflow on one of them skips the update on all.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch  # noqa: TID253 - a script that does nothing without it
from torch import Tensor  # noqa: TID253

from lake.errors import ContractError
from trainer.backends.optimizer import adamw
from trainer.backends.ranks import ALONE, Ranks
from trainer.config import LossScaleConfig, OptimizerConfig
from trainer.data.batch import PackedBatch
from trainer.losses import Loss, LossRows
from trainer.losses.base import compute_value_loss, require
from trainer.policy.model import PackedPolicy, leave_out_value_head


class ScalerState(msgspec.Struct, frozen=True):
    """A loss scale in a checkpoint."""

    scale: float
    """Factor of the next loss."""
    growth_updates: int
    """Number of updates since the scale last changed, without skipped ones."""
    consecutive_skips: int
    """Number of skipped updates in a row."""
    skips: int
    """Number of skipped updates since the run began."""


class LossScaler:
    """The loss scale of one optimizer.

    Args:
        config: first scale, and how it changes.
        device: device of the loss.
        optimizer: optimizer whose gradients are divided by the scale.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device, optimizer: torch.optim.Optimizer) -> None:
        self._config, self._optimizer = config, optimizer
        self._scaler = torch.amp.GradScaler(
            device.type, init_scale=config.initial, growth_interval=config.growth_interval
        )
        self._consecutive_skips = 0
        self.skips = 0
        """Number of skipped updates since the run began."""

    @property
    def scale(self) -> float:
        """Factor of the next loss."""
        return self._scaler.get_scale()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the scale, before its backward pass."""
        return self._scaler.scale(loss)

    def unscale_gradients(self) -> None:
        """Divide the gradients of an update by the scale, and check that they are finite."""
        self._scaler.unscale_(self._optimizer)

    def change_scale(self) -> bool:
        """Halve the scale if a gradient was not finite, else let it grow; return whether to skip the update.

        Raises:
            ContractError: too many updates in a row are skipped.
        """
        before = self.scale
        self._scaler.update()
        is_skipped = self.scale < before
        self.skips += is_skipped
        self._consecutive_skips = self._consecutive_skips + 1 if is_skipped else 0
        if self._consecutive_skips >= self._config.max_consecutive_skips:
            raise ContractError(
                f"{self._consecutive_skips} updates in a row were skipped: gradients are not finite in float16, even "
                f"with a loss scale of {before:.10g}; train with dtype bfloat16 or float32, or lower --lr"
            )
        return is_skipped

    def state(self) -> ScalerState:
        """Return the state for a checkpoint."""
        growth_updates = int(self._scaler.state_dict()["_growth_tracker"])
        return ScalerState(self.scale, growth_updates, self._consecutive_skips, self.skips)

    def load_state(self, state: ScalerState) -> None:
        """Restore the state of a checkpoint."""
        fields = {"scale": state.scale, "_growth_tracker": state.growth_updates}
        self._scaler.load_state_dict(self._scaler.state_dict() | fields)
        self._consecutive_skips, self.skips = state.consecutive_skips, state.skips


def loss_rows(
    batch: PackedBatch,
    loss: Loss,
    logprobs_N: Tensor,
    entropy_N: Tensor | None,
    statistics: Mapping[str, float] | None = None,
) -> LossRows:
    """Return one micro-batch as the input of a loss.

    A batch without log-probabilities of the proximal policy takes those of the present policy, without gradient.
    """
    proximal_N = batch.proximal_logprobs_N
    if proximal_N is None and loss.needs.proximal_logprobs:
        proximal_N = logprobs_N.detach()
    return LossRows(
        logprobs_N=logprobs_N,
        weight_N=batch.weight_N,
        advantages_N=batch.advantages_N,
        behaviour_logprobs_N=batch.behaviour_logprobs_N,
        entropy_N=entropy_N,
        reference_logprobs_N=batch.reference_logprobs_N,
        proximal_logprobs_N=proximal_N,
        unit_N=batch.unit_N,
        weight_U=batch.weight_U,
        pair_U=batch.pair_U,
        sign_U=batch.sign_U,
        step_index_N=batch.step_index_N,
        staleness_N=batch.staleness_N,
        statistics=statistics or {},
    )


def check_layout(stored: Mapping[str, tuple[torch.Size, torch.dtype]], tensors: Mapping[str, Tensor]) -> None:
    """Refuse (ContractError) stored weights whose names, shapes or dtypes differ from the model's tensors."""
    if tensors.keys() != stored.keys():
        odd = sorted(tensors.keys() ^ stored.keys())
        raise ContractError(f"the weights are of another model: {len(odd)} names differ, for example {odd[0]}")
    for name, tensor in tensors.items():
        if (tensor.shape, tensor.dtype) != stored[name]:
            size, dtype = stored[name]
            raise ContractError(
                f"weight {name} is {dtype} {tuple(size)}; the model has {tensor.dtype} {tuple(tensor.shape)}"
            )


class FrozenPolicy:
    """A policy that only gives log-probabilities: a reference."""

    def __init__(self, policy: PackedPolicy) -> None:
        self.policy = policy

    @property
    def vocabulary(self) -> int:
        """Number of token ids in the vocabulary."""
        return self.policy.vocabulary

    def logprobs(self, batch: PackedBatch, *, entropy: bool = False) -> Tensor:
        """Return log-probabilities (or entropies in nats), float32 [N] on the backend's device, without gradient."""
        with torch.no_grad():
            logprobs_N, entropy_N = self.policy.logprobs(batch.to(self.policy.device), entropy=entropy)
        return logprobs_N if entropy_N is None else entropy_N


class PolicyBackend(FrozenPolicy, ABC):
    """A policy, whose parameters are updated in place, and its optimizer."""

    def __init__(self, policy: PackedPolicy, config: OptimizerConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(policy)
        self.ranks = ranks
        self._max_grad_norm = config.max_grad_norm
        self._trained = [p for p in policy.model.parameters() if p.requires_grad]
        self._base_digest: str | None = None
        self.optimizer = adamw(policy.model.parameters(), config)
        self.scaler: LossScaler | None = None
        """Loss scale of float16 products; None for other types."""
        if policy.dtype == "float16":
            self.scaler = LossScaler(config.loss_scale, policy.device, self.optimizer)
        self.proximal: dict[str, Tensor] | None = None
        """Proximal policy: this rank's trained weights of some optimizer steps ago, or None."""

    @property
    def rank(self) -> int:
        """Index of this process, 0 to world_size - 1."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.ranks.world_size

    @property
    def loss_scale(self) -> float | None:
        """Factor of the next update's loss; None unless dtype is float16."""
        return None if self.scaler is None else self.scaler.scale

    def forward_backward(
        self, batch: PackedBatch, loss: Loss, statistics: Mapping[str, float] | None = None
    ) -> dict[str, Tensor]:
        """Add the gradient of one micro-batch; gradients add up over micro-batches and ranks.

        With dtype float16 it is multiplied by the loss scale, until `optim_step` divides by it.

        Args:
            batch: the packed buffer; a dummy runs with weight 0.
            statistics: sums of `loss.prepare` over the optimizer step.

        Returns:
            This rank's `loss` (weighted) and sums over the micro-batch's N without gradient: `logprob`, `entropy` if
            the loss needs it, and the sums of the loss and of `compute_value_loss`. Empty for a dummy.
        """
        batch = batch.to(self.policy.device)
        logprobs_N, entropy_N, value_S = self.policy.score(batch, entropy=loss.needs.entropy)
        if batch.dummy:
            self._backward(0.0 * (logprobs_N.sum() + (0.0 if value_S is None else value_S.sum())))
            return {}
        result = loss.compute(loss_rows(batch, loss, logprobs_N, entropy_N, statistics))
        total, sums = result.total, {"loss": result.total.detach(), "logprob": logprobs_N.detach().sum(), **result.sums}
        if value_S is not None and self.policy.value is not None:
            of_values = compute_value_loss(
                value_S, require(batch.value_target_S, "targets"), require(batch.value_weight_S, "weights")
            )
            total = total + self.policy.value.coefficient * of_values.total
            sums |= of_values.sums
        self._backward(total)
        if entropy_N is not None:
            sums["entropy"] = entropy_N.detach().sum()
        return sums

    def optim_step(self, learning_rate: float) -> float:
        """Clip the gradient, update the weights, clear the gradient; return the norm of the gradient before clipping.

        With dtype float16 the gradient is divided by the loss scale first. An update whose gradient is not finite is
        skipped: weights and moments stay, the scale is halved, and the norm is infinite or NaN.

        Raises:
            ContractError: the gradient is not finite, in float16 too many times in a row; the weights stay.
        """
        if self.scaler is not None:
            self.scaler.unscale_gradients()
        norm = self._clip()
        if self.scaler is not None and self.scaler.change_scale():
            self.optimizer.zero_grad(set_to_none=True)
            return norm
        if not math.isfinite(norm):
            msg = f"the gradient's norm is {norm}; lower --lr, or look for extreme advantages or log-probabilities"
            raise ContractError(msg)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.policy.cast_weights()
        return norm

    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss, multiplied by the loss scale if there is one."""
        if self.scaler is not None:
            loss = self.scaler.scale_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def keep_proximal(self) -> None:
        """Copy the trained weights as the proximal policy."""
        self.proximal = {name: tensor.clone() for name, tensor in self.policy.trained_state().items()}

    def drop_proximal(self) -> None:
        """Free the copy, if there is one."""
        self.proximal = None

    @contextmanager
    def use_proximal(self) -> Iterator[None]:
        """Put the weights of the proximal policy in place while the block runs; the block may only score.

        Raises:
            ContractError: there is no copy.
        """
        if self.proximal is None:
            msg = "there is no proximal policy here: start at an optimizer step that begins its period, or resume"
            raise ContractError(msg)
        # One tensor at a time, so that no third copy of the weights exists.
        self._swap_proximal(self.proximal)
        try:
            yield
        finally:
            self._swap_proximal(self.proximal)

    def _swap_proximal(self, proximal: dict[str, Tensor]) -> None:
        """Swap the values of the trained weights and of the proximal policy."""
        for name, tensor in self.policy.trained_state().items():
            former = tensor.clone()
            tensor.copy_(proximal[name])
            proximal[name].copy_(former)
        self.policy.cast_weights()

    def get_weights(self) -> dict[str, Tensor]:
        """Return the trained weights (with LoRA the adapters) by name, tied ones once; not copies on a single device.

        The value head, which only checkpoints hold, is not among them. Across ranks: whole tensors on rank 0, nothing
        elsewhere.
        """
        return self._gather_tensors(leave_out_value_head(self.policy.trained_state()))

    def get_all_weights(self) -> dict[str, Tensor]:
        """Return all weights, also frozen ones, like `get_weights`."""
        return self._gather_tensors(leave_out_value_head(self.policy.state()))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights into the model bit for bit; every rank passes whole tensors.

        Raises:
            ContractError: names, shapes or dtypes differ from the model's.
        """
        trained = self.policy.trained_state()
        check_layout({name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}, trained)
        for name, tensor in weights.items():
            # Copied into memory that torch allocated: mapped file memory is not aligned, and kernels may sum in
            # another order there.
            trained[name].copy_(self._cut_shard(tensor, trained[name]))
        self.policy.cast_weights()

    def get_local_optimizer_state(self) -> dict[str, Tensor]:
        """Return AdamW's state on this rank, named parameter/field; not copies. Empty before the first update."""
        return {
            f"{name}/{field}": tensor
            for name, parameter in sorted(self.policy.model.named_parameters())
            for field, tensor in sorted(self.optimizer.state.get(parameter, {}).items())
        }

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the optimizer's state exactly: values, shapes and dtypes.

        Raises:
            ContractError: state of a parameter that the model does not have.
        """
        parameters = dict(self.policy.model.named_parameters())
        restored: dict[str, Tensor] = {}
        for key, tensor in state.items():
            name = key.rpartition("/")[0]
            if name not in parameters:
                raise ContractError(f"the optimizer state is of another model: it names parameter {name}")
            parameter = parameters[name]
            if tensor.ndim == 0:  # the step counter, which a fused AdamW has on the GPU
                restored[key] = tensor.to(parameter.device if parameter.is_cuda else "cpu", copy=True)
            else:
                restored[key] = self._cut_shard(tensor, parameter).clone()
        # Not by Optimizer.load_state_dict, which casts dtypes.
        self.adopt_optimizer_state(restored)

    def adopt_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take tensors as AdamW's state on this rank; the inverse of `get_local_optimizer_state`."""
        parameters = dict(self.policy.model.named_parameters())
        self.optimizer.state.clear()
        for key, tensor in state.items():
            name, _, field = key.rpartition("/")
            self.optimizer.state[parameters[name]][field] = tensor

    def digest(self) -> str:
        """Return the `tensor_digest` of `get_weights`, the same on every rank and for any number of ranks."""
        return self.digest_of(self.policy.trained_state())

    def model_digest(self) -> str:
        """Return the digest of all weights, also frozen ones."""
        return self.digest_of(self.policy.state())

    def base_digest(self) -> str:
        """Return the digest of the weights that are not trained, empty if all are; computed once."""
        if self._base_digest is None:
            trained = self.policy.trained_state()
            frozen = {name: tensor for name, tensor in self.policy.state().items() if name not in trained}
            self._base_digest = self.digest_of(frozen) if frozen else ""
        return self._base_digest

    def digest_of(self, tensors: Mapping[str, Tensor]) -> str:
        """Return the `tensor_digest` of sharded tensors, gathering one at a time."""
        digest = TensorDigest()
        for name in sorted(tensors):
            tensor = self._gather_tensor(tensors[name])
            if self.rank == 0:
                digest.add(name, tensor)
        return self.ranks.on_rank_zero(digest.hexdigest)

    @abstractmethod
    def _clip(self) -> float:
        """Scale the gradient down to the limit; return its norm before."""

    @abstractmethod
    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor of a shard."""

    @abstractmethod
    def _gather_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole tensors on rank 0."""

    @abstractmethod
    def _cut_shard(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor, laid out like another."""


class SingleDevice(PolicyBackend):
    """Trains one policy on one device."""

    def _clip(self) -> float:
        on_gpu = self.policy.device.type == "cuda"
        return float(torch.nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm, foreach=on_gpu))

    def _gather_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def _cut_shard(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.device)


class TensorDigest:
    """Digest of tensors that are added in name order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add the next tensor."""
        tensor = tensor.detach().cpu().contiguous()
        self._digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        self._digest.update(tensor.flatten().view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """Return 64 hexadecimal characters."""
        return self._digest.hexdigest()


def tensor_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return sha256 over (name, dtype, shape, bytes) of each tensor in name order, as 64 hexadecimal characters.

    A safetensors file has no such stable hash: the order of its metadata varies.
    """
    digest = TensorDigest()
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return sha256 of a file's bytes, as 64 hexadecimal characters."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
