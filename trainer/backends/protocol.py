"""What a training loop asks of a backend, and nothing else: another one can take its place without touching the loop.

Calls that compute return futures, so that a backend may work elsewhere; the ones here resolve them before they return.
Across ranks every call is collective: all ranks make the same calls in the same order.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from torch import Tensor  # noqa: TID253 - loaded by commands only when they train

from trainer.backends.ranks import Ranks
from trainer.data.batch import PackedBatch
from trainer.losses import Loss
from trainer.policy.model import Policy

T = TypeVar("T")


class Scoring(Protocol):
    """Something that scores tokens: a policy that is trained, or a frozen reference."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids it knows."""
        ...

    def logprobs(self, batch: PackedBatch, *, entropy: bool = False) -> Future[Tensor]:
        """Log-probabilities without gradient.

        Args:
            batch: the packed buffer, on any device.
            entropy: return entropies in nats instead.

        Returns:
            float32 [N], on the backend's device.
        """
        ...


class Backend(Scoring, Protocol):
    """A policy in training."""

    policy: Policy
    """The model."""
    ranks: Ranks
    """Who takes part."""

    @property
    def rank(self) -> int:
        """Number of this process, 0 to world_size - 1."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def forward_backward(
        self, batch: PackedBatch, loss: Loss, statistics: Mapping[str, float] | None = None
    ) -> Future[dict[str, Tensor]]:
        """Add the gradient of one micro-batch; gradients add up over micro-batches and ranks.

        Args:
            batch: the packed buffer; a dummy is run with weight 0.
            loss: the loss, with its options.
            statistics: what `loss.prepare` came to over the optimizer step.

        Returns:
            Without gradient, of this rank: `loss` (weighted), and sums over the micro-batch's N: `logprob`, `entropy`
            if the loss needs it, and the loss's own. Empty for a dummy.
        """
        ...

    def optim_step(self, learning_rate: float) -> Future[float]:
        """Clip the gradient, update the weights, clear the gradient.

        Returns:
            The norm of the whole gradient before clipping.

        Raises:
            ContractError: the gradient is not finite; the weights are left as they were.
        """
        ...

    def keep_proximal(self) -> None:
        """Copy the trained weights: from now on they are the proximal policy."""
        ...

    def drop_proximal(self) -> None:
        """Free the copy, if there is one."""
        ...

    def as_proximal(self) -> AbstractContextManager[None]:
        """While the block lasts the trained weights are those of the copy; score in it, and do nothing else.

        Raises:
            ContractError: no copy was kept.
        """
        ...

    def get_weights(self) -> dict[str, Tensor]:
        """The trained weights by name, tied ones once; with adapters only these. Not copies where they are whole here.

        Across ranks: whole on rank 0, nothing elsewhere.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights into the model, bit for bit; every rank gets the whole.

        Raises:
            ContractError: other names, shapes or dtypes than the model's.
        """
        ...

    def get_optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state, named parameter/field, like `get_weights`. Empty before the first update."""
        ...

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the optimizer's state exactly: values, shapes and dtypes.

        Raises:
            ContractError: state of a parameter that the model does not have.
        """
        ...

    def digest(self) -> str:
        """`trainer.digest.tensor_digest` of `get_weights`; the same on every rank, and for any number of ranks."""
        ...

    def model_digest(self) -> str:
        """The same of every weight, frozen ones included."""
        ...


def resolved(value: T) -> Future[T]:
    """A future that has its result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
