"""What a loss is: a pure function over the rows that carry loss, and a statement of what it needs from the data.

Axes: `_N` the rows of a packed buffer that carry loss, one per trained action token. Every loss returns a sum over N;
the caller divides by the number of trained tokens of the whole optimizer step (DAPO's token mean with a global
denominator, arXiv 2503.14476), so the gradient does not depend on how the step is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import TrainConfig


class Unit(StrEnum):
    """Over what a loss is averaged, and so what must stay in one optimizer step."""

    TOKEN = "token"
    """Every trained token of the optimizer step weighs the same."""


class Temperature(StrEnum):
    """Which distribution the log-probabilities are taken of."""

    ONE = "one"
    """The model's own: likelihood losses."""
    AS_SAMPLED = "as_sampled"
    """Logits divided by the sampling temperature stored with each step: ratio losses."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a loss needs from the data. `trainer.refusals` checks it before anything is trained."""

    advantages: bool = False
    """An advantage for every trained step, from one credit job."""
    normalised_advantages: bool = False
    """Advantages shifted and scaled to mean 0, standard deviation 1 over the plan's trained steps."""
    behaviour_logprobs: bool = False
    """Log-probabilities of the sampled tokens under the policy that sampled them."""
    entropy: bool = False
    """Entropy of the next-token distribution at every trained token."""
    temperature: Temperature = Temperature.ONE
    """Which distribution the log-probabilities are taken of."""
    unit: Unit = Unit.TOKEN
    """Over what it is averaged."""


@dataclass(frozen=True, slots=True)
class LossRows:
    """One micro-batch as a loss sees it; all float32 of shape [N]."""

    logprobs_N: Tensor
    """log pi_theta of each trained token; carries the gradient."""
    advantages_N: Tensor | None = None
    """Advantage of the token's step."""
    behaviour_logprobs_N: Tensor | None = None
    """log of the behaviour policy, as stored."""
    entropy_N: Tensor | None = None
    """Entropy in nats at the token; carries the gradient."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """What a loss returns."""

    total: Tensor
    """Scalar: the loss summed over N, to be divided by the optimizer step's number of trained tokens."""
    sums: Mapping[str, Tensor]
    """Scalars without gradient: sums over N behind the metrics of `trainer.metrics`."""


LossFunction = Callable[[LossRows, "TrainConfig"], LossResult]


@dataclass(frozen=True, slots=True)
class Loss:
    """A named loss."""

    name: str
    needs: Needs
    function: LossFunction


def required(value_N: Tensor | None, name: str) -> Tensor:
    """The tensor, which the loss declared that it needs.

    Raises:
        ValueError: the caller left it out.
    """
    if value_N is None:
        msg = f"this loss needs {name}"
        raise ValueError(msg)
    return value_N
