"""What a loss is: a pure function over the rows that carry loss, and a statement of what it needs from the data.

Axes: `_N` the rows of a packed buffer that carry loss, one per trained action token; `_U` its units (turns, sequences
or episodes); `_B` micro-batches. Every loss multiplies by the weights of the plan (`trainer.data.aggregation`) and adds
up, so the gradient does not depend on how an optimizer step is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from trainer.data.aggregation import Aggregation, Atom, Unit
from trainer.frozen import FrozenModel

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import TrainConfig


class Temperature(StrEnum):
    """Which distribution the log-probabilities are taken of."""

    ONE = "one"
    """The model's own: likelihood losses."""
    AS_SAMPLED = "as_sampled"
    """Logits divided by the sampling temperature stored with each step: ratio losses."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a loss needs from the data. `trainer.data.refusals` checks it before anything is trained."""

    advantages: bool = False
    """An advantage for every trained step, from one credit job."""
    step_advantages: bool = False
    """Those are the step advantages A_S inside an anchor group (column a_step), not their combination."""
    normalised_advantages: bool = False
    """Advantages shifted and scaled to mean 0, standard deviation 1 over the plan's trained steps."""
    behaviour_logprobs: bool = False
    """Log-probabilities of the sampled tokens under the policy that sampled them."""
    reference_logprobs: bool = False
    """Log-probabilities of the sampled tokens under a frozen reference policy."""
    proximal_logprobs: bool = False
    """Log-probabilities of the sampled tokens under the proximal policy, the weights of some optimizer steps ago."""
    statistics: tuple[str, ...] = ()
    """Names of the sums over the whole optimizer step that `Loss.prepare` makes after a first pass without gradient."""
    entropy: bool = False
    """Entropy of the next-token distribution at every trained token."""
    temperature: Temperature = Temperature.ONE
    """Which distribution the log-probabilities are taken of."""
    pairs: bool = False
    """Units in pairs, one preferred to the other."""
    labels: bool = False
    """Units labelled desirable or undesirable, both kinds."""
    unit: Unit = Unit.TOKEN
    """Over what it is averaged, unless the configuration says otherwise."""
    unit_above_token: bool = False
    """It is a function of whole units: the token will not do."""
    unit_advantages: bool = False
    """The advantage must be constant inside a unit; not asked for where the configuration names the unit."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How it is averaged, unless the configuration says otherwise."""
    atom: Atom = Atom.SEQUENCE
    """What must share a micro-batch, at least."""


@dataclass(frozen=True, slots=True)
class LossRows:
    """One micro-batch as a loss sees it; float32 of shape [N] unless said otherwise. N and U may be 0."""

    logprobs_N: Tensor
    """log pi_theta of each trained token; carries the gradient."""
    weight_N: Tensor
    """What the token's loss is multiplied by: `PackedBatch.weight_N`."""
    advantages_N: Tensor | None = None
    """Advantage of the token's step."""
    behaviour_logprobs_N: Tensor | None = None
    """log of the behaviour policy, as stored; NaN where the engine gave none."""
    entropy_N: Tensor | None = None
    """Entropy in nats at the token; carries the gradient."""
    reference_logprobs_N: Tensor | None = None
    """log of the frozen reference policy."""
    proximal_logprobs_N: Tensor | None = None
    """log of the proximal policy."""
    unit_N: Tensor | None = None
    """Number of the token's unit, 0..U-1, int64 [N]; None where the unit is the token."""
    weight_U: Tensor | None = None
    """1 / number of units of the optimizer step, [U]."""
    step_index_N: Tensor | None = None
    """The episode's step that the token belongs to, int32 [N]."""
    staleness_N: Tensor | None = None
    """Policy versions between sampling and the newest of the plan; NaN where unknown."""
    pair_U: Tensor | None = None
    """Number of the unit's pair, 0..P-1, int64 [U]."""
    sign_U: Tensor | None = None
    """+1 chosen or desirable, -1 rejected or undesirable, [U]."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """What `Loss.prepare` summed over the whole optimizer step."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """What a loss returns."""

    total: Tensor
    """Scalar: (loss_N * weight_N).sum(); totals add up over micro-batches and ranks."""
    sums: Mapping[str, Tensor]
    """Scalars without gradient: sums over N behind the metrics of `trainer.runs.metrics`."""


LossFunction = Callable[[LossRows, "TrainConfig"], LossResult]
Prepare = Callable[[Sequence[LossRows], "TrainConfig"], Mapping[str, "Tensor"]]


@dataclass(frozen=True, slots=True)
class Loss:
    """A named loss."""

    name: str
    """Also the name of its module in `trainer.losses` and of its options in `TrainConfig`."""
    needs: Needs
    """What it needs whatever its options; `find_loss` adds what they ask for."""
    function: LossFunction
    """The loss of a micro-batch."""
    prepare: Prepare | None = None
    """Sums over the micro-batches of an optimizer step, given their rows after the first pass (`logprobs_N` are those
    of the weights at its start, without gradient). The caller adds them up over ranks and hands them to `function` as
    `LossRows.statistics`."""


class LossConfig(FrozenModel):
    """Settings of one loss."""

    def resolve(self, needs: Needs) -> Needs:
        """What the loss needs with these settings.

        Args:
            needs: what it needs whatever the settings.
        """
        return needs


def required(value: Tensor | None, name: str) -> Tensor:
    """The tensor, which the loss declared that it needs.

    Raises:
        ValueError: the caller left it out.
    """
    if value is None:
        msg = f"this loss needs {name}"
        raise ValueError(msg)
    return value


def added(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums by name over micro-batches, which all have the same names; nothing for none."""
    total: dict[str, Tensor] = {}
    for part in parts:
        total = {name: value + total[name] if name in total else value for name, value in part.items()}
    return total
