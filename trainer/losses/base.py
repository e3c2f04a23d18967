"""What a loss is: its options, a pure function of rows that carry loss, and a statement of what it needs from the data.

Axes: `_N` the rows of a packed buffer that carry loss, one per trained action token; `_U` its units (turns, sequences
or episodes); `_B` micro-batches. Every loss multiplies by the weights of the plan (`trainer.data.stream.aggregation`)
and adds up, so the gradient does not depend on how an optimizer step is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lake.read.metric_names import STALENESS_BUCKETS
from trainer.data.stream.aggregation import Aggregation, Atom, Unit, Weighting
from trainer.frozen import FrozenModel
from trainer.losses.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


class PairsConfig(FrozenModel):
    """Which episodes or steps are compared by losses on pairs."""

    kind: Literal["episode", "step"] = "episode"
    """Whole sibling episodes, by A_E of the credit job; or single steps that share an anchor, by their
    return-to-go."""
    margin: float = Field(0.0, ge=0)
    """Smallest difference of a pair's A_E or returns. Equal ones are never paired."""
    per_group: int | None = Field(None, ge=1)
    """Pairs of a group (kind step: of an anchor) at most; None: as many as there are."""
    graft: bool = False
    """Kind step: put both actions onto the context of the chosen one. Otherwise the contexts must be identical."""

    @model_validator(mode="after")
    def _graft_has_an_effect(self) -> Self:
        if self.graft and self.kind != "step":
            raise ValueError('graft is for pairs of steps: set kind to "step", or leave graft out')
        return self


@dataclass(frozen=True, slots=True)
class LabelRule:
    """Which episodes are desirable."""

    threshold: float | None
    """Those whose score reaches it. None: those with A_E > 0 in the credit job."""
    score: str
    """Score that the threshold is compared with."""


class Temperature(StrEnum):
    """Which distribution the log-probabilities are taken of."""

    ONE = "one"
    """The model's own: likelihood losses."""
    AS_SAMPLED = "as_sampled"
    """Logits divided by the sampling temperature stored with each step: ratio losses."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a loss needs from the data. `trainer.data.select.refusals` checks it before anything is trained."""

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
    pairs: PairsConfig | None = None
    """Units in pairs, one preferred to the other: which."""
    labels: LabelRule | None = None
    """Units labelled desirable or undesirable, both kinds: by what."""
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

    @property
    def credit(self) -> bool:
        """It reads a credit job: for advantages, or for what is preferred."""
        by_credit = self.labels is not None and self.labels.threshold is None
        return self.advantages or self.pairs is not None or by_credit


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


class Loss(FrozenModel, ABC):
    """A loss with its options."""

    always: ClassVar[Needs] = Needs()
    """What it needs whatever its options."""

    name: str
    """Which loss: the name of its module in `trainer.losses`."""

    def model_post_init(self, context: Any) -> None:
        """Which loss it is counts as said, also where none of its options is."""
        self.model_fields_set.add("name")

    @abstractmethod
    def compute(self, rows: LossRows) -> LossResult:
        """The loss of a micro-batch."""

    def prepare(self, rows_B: Sequence[LossRows]) -> Mapping[str, Tensor]:
        """The sums that `Needs.statistics` names, over some micro-batches of an optimizer step.

        In `rows_B`, of a first pass, `logprobs_N` are those of the weights at the step's start, without gradient. The
        caller adds the scalars up over ranks and hands them to `compute` as `LossRows.statistics`.
        """
        del rows_B
        return {}

    @property
    def needs(self) -> Needs:
        """What it needs from the data under these options."""
        return self.resolved(self.always)

    def resolved(self, needs: Needs) -> Needs:
        """What the options add."""
        return needs

    def weighting(self, max_length: int) -> Weighting:
        """How it is averaged; max_length is the longest sequence of the run, in tokens."""
        del max_length
        needs = self.needs
        whole = needs.unit is Unit.EPISODE and needs.atom is Atom.SEQUENCE
        return Weighting(needs.aggregation, needs.unit, Atom.EPISODE if whole else needs.atom, None)


class TokenLoss(Loss, ABC):
    """A loss per token, averaged over an optimizer step."""

    aggregation: Aggregation | None = None
    """How the losses of an optimizer step's tokens are averaged; None: as the loss does by default."""
    unit: Unit | None = None
    """Over what: token, turn, sequence or episode; None: as the loss does by default, token where it has none."""
    aggregation_constant: float | None = Field(None, gt=0)
    """C of unit_mean_token_sum_norm; None takes max_length."""

    @property
    def needs(self) -> Needs:
        """What it needs, averaged as the options say."""
        needs = super().needs
        if self.unit is not None:
            # Whoever names the unit means it, also where advantages differ inside.
            needs = replace(needs, unit=self.unit, unit_advantages=False)
        return needs if self.aggregation is None else replace(needs, aggregation=self.aggregation)

    def weighting(self, max_length: int) -> Weighting:
        """How it is averaged, with the constant that unit_mean_token_sum_norm divides by."""
        chosen = super().weighting(max_length)
        if chosen.aggregation is not Aggregation.UNIT_MEAN_TOKEN_SUM_NORM:
            return chosen
        return replace(chosen, constant=self.aggregation_constant or float(max_length))

    @model_validator(mode="after")
    def _has_the_unit_that_it_looks_at(self) -> Self:
        needs = self.needs
        if needs.unit is Unit.TOKEN and needs.unit_above_token:
            msg = f"{self.name} as configured looks at whole units: set loss.unit to turn, sequence or episode"
            raise ValueError(msg)
        if needs.unit is Unit.TOKEN and needs.aggregation is not Aggregation.TOKEN_MEAN:
            msg = f"aggregation {needs.aggregation} averages over units: set loss.unit to turn, sequence or episode"
            raise ValueError(msg)
        return self


def required(value: Tensor | None, name: str) -> Tensor:
    """The tensor, which the loss declared that it needs; a ValueError where the caller left it out."""
    if value is None:
        raise ValueError(f"this loss needs {name}")
    return value


def summed(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums by name over micro-batches, which all have the same names; nothing for none."""
    total: dict[str, Tensor] = {}
    for part in parts:
        total = {name: value + total[name] if name in total else value for name, value in part.items()}
    return total


def unit_sum(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Sum of the values (floats [N]; the gradient goes through) of each unit (int64 [N]; U units).

    Floats [U], in the dtype of `value_N`; 0 for a unit without a token.
    """
    return value_N.new_zeros(units).index_add(0, unit_N, value_N)


def unit_mean(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Mean of the values of each unit: floats [U]; 0 for a unit without a token, as all of it is masked.

    Atoms are packed as a whole, so a unit lies in one micro-batch and its sum needs no communication.
    """
    tokens_U = unit_sum(value_N.new_ones(len(unit_N)), unit_N, units).clamp(min=1)
    return unit_sum(value_N, unit_N, units) / tokens_U


def log_ratio(logprobs_N: Tensor, stored_N: Tensor) -> Tensor:
    """The difference lp - stored, 0 in value where the stored one is not finite; [N], not clamped.

    The gradient goes through `logprobs_N` alone. Engines give NaN now and then: such a token counts as ratio 1, and is
    counted. TRL does the same since its pull request 6693; before, it ended the run.
    """
    return logprobs_N - stored_N.where(stored_N.isfinite(), logprobs_N).detach()


def clamped_ratio(log_ratio_N: Tensor) -> Tensor:
    """The ratio, from a log-ratio clamped to +-20."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def behaviour_log_ratio(rows: LossRows) -> Tensor:
    """log(pi_theta / behaviour), [N], with the gradient of pi_theta."""
    return log_ratio(rows.logprobs_N, required(rows.behaviour_logprobs_N, "behaviour_logprobs_N"))


def ratio_sums(rows: LossRows) -> dict[str, Tensor]:
    """Sums behind the metrics of pi_theta / behaviour, before clipping, truncation or masks."""
    stored_N = required(rows.behaviour_logprobs_N, "behaviour_logprobs_N")
    log_ratio_N = behaviour_log_ratio(rows).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    sums = {
        "ratio": ratio_N.sum(),
        "ratio_squared": ratio_N.square().sum(),
        "log_ratio_abs": log_ratio_N.abs().sum(),
        "kl_k3": (ratio_N - 1 - log_ratio_N).sum(),
        "outside_half_two": ((ratio_N < 0.5) | (ratio_N > 2)).sum(),
        "logprobs_missing": (~stored_N.isfinite()).sum(),
    }
    return sums | _staleness_sums(log_ratio_N, rows.staleness_N)


def _staleness_sums(log_ratio_N: Tensor, staleness_N: Tensor | None) -> dict[str, Tensor]:
    """Tokens of each staleness bucket, and the mean |log ratio| inside it."""
    if staleness_N is None:
        return {}
    sums = {}
    for name, first, last in STALENESS_BUCKETS:
        inside_N = (staleness_N >= first) & (staleness_N <= last)
        sums[name] = inside_N.sum()
        sums[f"log_ratio_abs_{name}/{name}"] = (log_ratio_N.abs() * inside_N).sum()
    return sums
