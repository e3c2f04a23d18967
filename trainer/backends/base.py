"""What a training loop may ask of a policy: log-probabilities, gradients, updates, and state by name.

Across ranks every call is collective: all ranks make the same calls in the same order. Whether tensors are whole or
sharded shows in four methods, which `SingleDevice` and `Sharded` fill in.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253 - loaded by commands only when they train

from lake.errors import ContractError
from trainer.backends.ranks import ALONE, Ranks
from trainer.config import OptimizerConfig
from trainer.data.stream.batch import PackedBatch
from trainer.losses import Loss, LossRows
from trainer.policy.model import Policy


def adamw(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over the parameters that are trained; its learning rate is set at each step.

    On a CPU it runs parameter by parameter: the order of its operations then never depends on how tensors are grouped.
    On a GPU it is one fused kernel.
    """
    trained = [p for p in parameters if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    plain = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=False,
        fused=bool(trained) and trained[0].is_cuda,
    )


def loss_rows(
    batch: PackedBatch,
    loss: Loss,
    logprobs_N: Tensor,
    entropy_N: Tensor | None,
    statistics: Mapping[str, float] | None = None,
) -> LossRows:
    """One micro-batch as a loss sees it.

    Where the batch has no log-probabilities of the proximal policy, that policy is the one whose weights are in place:
    they are the policy's own, without gradient.
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


def check_layout(found: Mapping[str, tuple[torch.Size, torch.dtype]], own: Mapping[str, Tensor]) -> None:
    """Refuse (ContractError) stored weights with other names, shapes or dtypes than the model's own."""
    if own.keys() != found.keys():
        odd = sorted(own.keys() ^ found.keys())
        raise ContractError(f"the weights are of another model: {len(odd)} names differ, for example {odd[0]}")
    for name, tensor in own.items():
        if (tensor.shape, tensor.dtype) != found[name]:
            size, dtype = found[name]
            raise ContractError(
                f"weight {name} is {dtype} {tuple(size)}; the model has {tensor.dtype} {tuple(tensor.shape)}"
            )


class FrozenPolicy:
    """A policy that is only asked for log-probabilities: a reference."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def vocabulary(self) -> int:
        """Number of token ids it knows."""
        return self.policy.vocabulary

    def logprobs(self, batch: PackedBatch, *, entropy: bool = False) -> Tensor:
        """Log-probabilities (or entropies in nats), float32 [N] on the backend's device, without gradient."""
        with torch.no_grad():
            logprobs_N, entropy_N = self.policy.logprobs(batch.to(self.policy.device), entropy=entropy)
        return logprobs_N if entropy_N is None else entropy_N


class PolicyBackend(FrozenPolicy, ABC):
    """A policy, whose parameters are updated in place, and its optimizer."""

    def __init__(self, policy: Policy, config: OptimizerConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(policy)
        self.ranks = ranks
        self._max_grad_norm = config.max_grad_norm
        self._trained = [p for p in policy.model.parameters() if p.requires_grad]
        self._base_digest: str | None = None
        self.optimizer = adamw(policy.model.parameters(), config)
        self.proximal: dict[str, Tensor] | None = None
        """The proximal policy: the trained weights of some optimizer steps ago as this rank holds them, or none."""

    @property
    def rank(self) -> int:
        """Number of this process, 0 to world_size - 1."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.ranks.world_size

    def forward_backward(
        self, batch: PackedBatch, loss: Loss, statistics: Mapping[str, float] | None = None
    ) -> dict[str, Tensor]:
        """Add the gradient of one micro-batch; gradients add up over micro-batches and ranks.

        Args:
            batch: the packed buffer; a dummy is run with weight 0.
            statistics: what `loss.prepare` came to over the optimizer step.

        Returns:
            Without gradient, of this rank: `loss` (weighted), and sums over the micro-batch's N: `logprob`, `entropy`
            if the loss needs it, and the loss's own. Empty for a dummy.
        """
        batch = batch.to(self.policy.device)
        logprobs_N, entropy_N = self.policy.logprobs(batch, entropy=loss.needs.entropy)
        if batch.dummy:
            (0.0 * logprobs_N.sum()).backward()  # type: ignore[no-untyped-call]
            return {}
        result = loss.compute(loss_rows(batch, loss, logprobs_N, entropy_N, statistics))
        result.total.backward()  # type: ignore[no-untyped-call]
        sums = {"loss": result.total.detach(), "logprob": logprobs_N.detach().sum(), **result.sums}
        if entropy_N is not None:
            sums["entropy"] = entropy_N.detach().sum()
        return sums

    def optim_step(self, learning_rate: float) -> float:
        """Clip the gradient, update the weights, clear the gradient; the norm of the whole gradient before clipping.

        Raises:
            ContractError: the gradient is not finite; the weights are left as they were.
        """
        norm = self._clip()
        if not math.isfinite(norm):
            msg = f"the gradient's norm is {norm}; lower --lr, or look for extreme advantages or log-probabilities"
            raise ContractError(msg)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def keep_proximal(self) -> None:
        """Copy the trained weights: from now on they are the proximal policy."""
        self.proximal = {name: tensor.clone() for name, tensor in self.policy.trained_state().items()}

    def drop_proximal(self) -> None:
        """Free the copy, if there is one."""
        self.proximal = None

    @contextmanager
    def as_proximal(self) -> Iterator[None]:
        """While the block lasts the trained weights are those of the copy; score in it, and do nothing else.

        A ContractError where no copy was kept.
        """
        if self.proximal is None:
            msg = "there is no proximal policy here: start at an optimizer step that begins its period, or resume"
            raise ContractError(msg)
        # One tensor at a time, so that no third copy of the weights exists.
        _exchange(self.policy.trained_state(), self.proximal)
        try:
            yield
        finally:
            _exchange(self.policy.trained_state(), self.proximal)

    def get_weights(self) -> dict[str, Tensor]:
        """The trained weights by name, tied ones once; with adapters only these. Not copies where they are whole here.

        Across ranks: whole on rank 0, nothing elsewhere.
        """
        return self._gathered(self.policy.trained_state())

    def get_all_weights(self) -> dict[str, Tensor]:
        """The same of every weight, frozen ones included."""
        return self._gathered(self.policy.state())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights into the model, bit for bit; every rank gets the whole.

        Raises:
            ContractError: other names, shapes or dtypes than the model's.
        """
        own = self.policy.trained_state()
        check_layout({name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}, own)
        for name, tensor in weights.items():
            # Copied into memory that torch allocated: mapped file memory is not aligned, and kernels may sum in
            # another order there.
            own[name].copy_(self._placed(tensor, own[name]))

    def local_optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's state as this rank holds it, named parameter/field; not copies."""
        return {
            f"{name}/{field}": tensor
            for name, parameter in sorted(self.policy.model.named_parameters())
            for field, tensor in sorted(self.optimizer.state.get(parameter, {}).items())
        }

    def get_optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state, named parameter/field, like `get_weights`. Empty before the first update."""
        return self._gathered(self.local_optimizer_state())

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
            restored[key] = self._restored(tensor, parameters[name])
        # Not by Optimizer.load_state_dict, which casts dtypes.
        self.adopt_optimizer_state(restored)

    def adopt_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take tensors as AdamW's state, as this rank holds it; the counterpart of `local_optimizer_state`."""
        parameters = dict(self.policy.model.named_parameters())
        self.optimizer.state.clear()
        for key, tensor in state.items():
            name, _, field = key.rpartition("/")
            self.optimizer.state[parameters[name]][field] = tensor

    def digest(self) -> str:
        """`tensor_digest` of `get_weights`; the same on every rank, and for any number of ranks."""
        return self.digest_of(self.policy.trained_state())

    def model_digest(self) -> str:
        """The same of every weight, frozen ones included."""
        return self.digest_of(self.policy.state())

    def base_digest(self) -> str:
        """Digest of the weights that are not trained; empty if all are. Computed once."""
        if self._base_digest is None:
            trained = self.policy.trained_state()
            frozen = {name: tensor for name, tensor in self.policy.state().items() if name not in trained}
            self._base_digest = self.digest_of(frozen) if frozen else ""
        return self._base_digest

    def digest_of(self, tensors: Mapping[str, Tensor]) -> str:
        """`tensor_digest` of tensors that this rank holds in part; one whole tensor at a time."""
        digest = TensorDigest()
        for name in sorted(tensors):
            whole = self._whole(tensors[name])
            if self.rank == 0:
                digest.add(name, whole)
        return self.ranks.on_rank_zero(digest.hexdigest)

    def _restored(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A copy of a field of the optimizer's state, where AdamW keeps it: its step counter is no array."""
        if tensor.ndim == 0:
            return tensor.to(parameter.device if parameter.is_cuda else "cpu", copy=True)
        return self._placed(tensor, parameter).clone()

    @abstractmethod
    def _clip(self) -> float:
        """Scale the gradient down to the limit; its norm before."""

    @abstractmethod
    def _whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor that this rank holds in part."""

    @abstractmethod
    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole of each tensor, on rank 0."""

    @abstractmethod
    def _placed(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole tensor, laid out as another is."""


def _exchange(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Swap the values of tensors of the same names."""
    for name, tensor in one.items():
        value = tensor.clone()
        tensor.copy_(other[name])
        other[name].copy_(value)


class SingleDevice(PolicyBackend):
    """Trains one policy on one device."""

    def _clip(self) -> float:
        on_gpu = self.policy.device.type == "cuda"
        return float(torch.nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm, foreach=on_gpu))

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def _placed(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.device)


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
