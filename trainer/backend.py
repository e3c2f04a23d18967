"""The single-device backend: gradients, updates, and the weights as plain tensors.

The loop asks for four things only (forward_backward, optim_step, get_weights, load_weights), so another backend can
take its place without touching it. AdamW runs parameter by parameter (foreach=False): the order of its operations then
never depends on how tensors are grouped.
"""

import math

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253

from lake.errors import ContractError
from trainer.batch import PackedBatch
from trainer.config import OptimizerConfig, TrainConfig
from trainer.losses import Loss, LossRows
from trainer.model import Policy


class SingleDevice:
    """Trains one policy on one device.

    Args:
        policy: the model; its parameters are updated in place.
        config: AdamW's constants.
    """

    def __init__(self, policy: Policy, config: OptimizerConfig) -> None:
        self.policy = policy
        self._max_grad_norm = config.max_grad_norm
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        decayed = [p for p in self._parameters if p.ndim >= 2]
        plain = [p for p in self._parameters if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=0.0,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            foreach=False,
        )

    def forward_backward(
        self, batch: PackedBatch, loss: Loss, config: TrainConfig, denominator: int
    ) -> dict[str, Tensor]:
        """Add the gradient of one micro-batch.

        Args:
            batch: the packed buffer.
            loss: the loss.
            config: its options.
            denominator: trained tokens of the whole optimizer step.

        Returns:
            Sums over the micro-batch's N without gradient: `loss`, `logprob`, `entropy` if the loss needs it, and the
            loss's own.
        """
        batch = batch.to(self.policy.device)
        logprobs_N, entropy_N = self.policy.logprobs(batch, entropy=loss.needs.entropy)
        rows = LossRows(logprobs_N, batch.advantages_N, batch.behaviour_logprobs_N, entropy_N)
        result = loss.function(rows, config)
        (result.total / denominator).backward()  # type: ignore[no-untyped-call]
        sums = {"loss": result.total.detach(), "logprob": logprobs_N.detach().sum(), **result.sums}
        if entropy_N is not None:
            sums["entropy"] = entropy_N.detach().sum()
        return sums

    def optim_step(self, learning_rate: float) -> float:
        """Clip the gradient, update the weights, clear the gradient.

        Returns:
            The gradient's norm before clipping.

        Raises:
            ContractError: the gradient is not finite; the weights are left as they were.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm, foreach=False))
        if not math.isfinite(norm):
            msg = f"the gradient's norm is {norm}; lower --lr, or look for extreme advantages or log-probabilities"
            raise ContractError(msg)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def get_optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's state as flat tensors, named parameter/field; not copies. Empty before the first update."""
        return {
            f"{name}/{field}": tensor
            for name, parameter in sorted(self.policy.model.named_parameters())
            for field, tensor in sorted(self.optimizer.state.get(parameter, {}).items())
        }

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """Restore AdamW's state exactly: values, shapes and dtypes (`Optimizer.load_state_dict` would cast them).

        Raises:
            ContractError: state of a parameter that the model does not have.
        """
        parameters = dict(self.policy.model.named_parameters())
        restored: dict[Tensor, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            name, _, field = key.rpartition("/")
            if name not in parameters:
                msg = f"the optimizer state is of another model: it names parameter {name}"
                raise ContractError(msg)
            # AdamW keeps its step counter on the CPU; moments live where their parameter does.
            device = "cpu" if tensor.ndim == 0 else parameters[name].device
            restored.setdefault(parameters[name], {})[field] = tensor.to(device, copy=True)
        self.optimizer.state.clear()
        self.optimizer.state.update(restored)

    def get_weights(self) -> dict[str, Tensor]:
        """The weights by name, tied ones once; not copies."""
        weights: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in sorted(self.policy.model.state_dict().items()):
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                weights[name] = tensor
        return weights

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy weights into the model, bit for bit.

        Raises:
            ContractError: other names, shapes or dtypes than the model's.
        """
        own = self.get_weights()
        if own.keys() != weights.keys():
            odd = sorted(own.keys() ^ weights.keys())
            msg = f"the weights are of another model: {len(odd)} names differ, for example {odd[0]}"
            raise ContractError(msg)
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
                found, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, own[name]))
                msg = f"weight {name} is {found}; the model has {wanted}"
                raise ContractError(msg)
            # Copied into memory that torch allocated: mapped file memory is not aligned, and kernels may sum in
            # another order there.
            own[name].copy_(tensor)
