"""The interface of a loss: its options, a pure function of rows that carry loss, and its requirements on the data.

Every loss multiplies by the weights of the plan and sums. The gradient therefore does not depend on how an optimizer
step is cut into micro-batches or spread over ranks. Weights come from lengths after drops and never from run-time masks
(verl #5798 and transformers #34191 are bugs of the other way). For the means the weights of a step sum to 1.

Axes: `_N` the rows of a packed buffer that carry loss, one per trained action token; `_U` its units (turns, sequences
or episodes); `_B` micro-batches; `_M` members of sequences; `_Q` sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from lake.read.training import STALENESS_BUCKETS
from lake.settings import FrozenModel

if TYPE_CHECKING:
    from torch import Tensor

Ints = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, as verl does."""


class Unit(StrEnum):
    """The unit over which a loss is averaged, and over which a sequence-level loss takes its ratio."""

    TOKEN = "token"
    """Each trained token."""
    TURN = "turn"
    """The action of one step."""
    SEQUENCE = "sequence"
    """The trained tokens of one training sequence: an append-only episode, or a fork of one."""
    EPISODE = "episode"
    """All sequences of an episode."""


class Aggregation(StrEnum):
    """Reduction of tokens' losses to one number; n trained tokens, U units, n_u trained tokens of unit u."""

    TOKEN_MEAN = "token_mean"
    """1 / n: long units weigh more (DAPO, arXiv 2503.14476)."""
    UNIT_MEAN_TOKEN_MEAN = "unit_mean_token_mean"
    """1 / (U n_u): units weigh the same, tokens of long units less (GRPO, arXiv 2402.03300; GSPO)."""
    UNIT_MEAN_TOKEN_SUM = "unit_mean_token_sum"
    """1 / U: the log-probability of a unit is that of all its tokens (REINFORCE)."""
    UNIT_MEAN_TOKEN_SUM_NORM = "unit_mean_token_sum_norm"
    """1 / (U C) with a constant C (Dr. GRPO, arXiv 2503.20783)."""


class Atom(StrEnum):
    """Data that must share a micro-batch."""

    SEQUENCE = "sequence"
    """A training sequence."""
    EPISODE = "episode"
    """All sequences of an episode: its forks."""
    PAIR = "pair"
    """Both sides of a pair."""


def number_units(unit: Unit, trained_M: npt.NDArray[np.bool_], members_Q: Ints, opens_Q: npt.NDArray[np.bool_]) -> Ints:
    """Number the unit of each member through a buffer: int64 [M], ascending, without gaps where trained.

    Args:
        unit: the unit; for TOKEN all members of a sequence get one number, which no weight depends on.
        trained_M: the member carries loss, bool [M]. Numbers of other members are arbitrary.
        members_Q: members of each sequence, int64 [Q]; each sequence has a trained one.
        opens_Q: the sequence is the first of an episode, bool [Q].
    """
    if unit is Unit.TURN:
        return np.cumsum(trained_M) - 1
    number_Q = np.cumsum(opens_Q) - 1 if unit is Unit.EPISODE else np.arange(len(members_Q))
    return np.repeat(number_Q, members_Q)


@dataclass(frozen=True, slots=True)
class Weighting:
    """The resolved average of a run's loss."""

    aggregation: Aggregation
    unit: Unit
    atom: Atom
    constant: float | None
    """C of unit_mean_token_sum_norm; None for other aggregations."""

    def weights(self, tokens_U: Ints, *, tokens: int, units: int) -> Weights:
        """Return the weight of each trained token of some units, float64 [U].

        tokens_U are the token counts of these units, int64 [U]. `tokens` and `units` are those of the whole optimizer
        step, over all ranks.
        """
        if self.aggregation is Aggregation.UNIT_MEAN_TOKEN_MEAN:
            return 1.0 / (units * tokens_U.astype(np.float64))
        divisor: float = tokens if self.aggregation is Aggregation.TOKEN_MEAN else units
        if self.aggregation is Aggregation.UNIT_MEAN_TOKEN_SUM_NORM:
            assert self.constant is not None
            divisor = units * self.constant
        return np.full(len(tokens_U), 1.0 / divisor)

    def describe(self) -> str:
        """Describe the average, for example `unit_mean_token_mean over episodes`."""
        over = "" if self.unit is Unit.TOKEN else f" over {self.unit}s"
        norm = f", C = {self.constant:g}" if self.aggregation is Aggregation.UNIT_MEAN_TOKEN_SUM_NORM else ""
        return f"{self.aggregation}{over}{norm}"


class PairsConfig(FrozenModel):
    """Pairs of episodes or steps that losses on pairs compare."""

    kind: Literal["episode", "step"] = "episode"
    """Whole sibling episodes, by A_E of the credit job; or single steps that share an anchor, by their return-to-go."""
    margin: float = Field(0.0, ge=0)
    """Smallest difference of a pair's A_E or returns. Equal ones are never paired."""
    per_group: int | None = Field(None, ge=1)
    """Maximum pairs of a group (kind step: of an anchor); None: no limit."""
    graft: bool = False
    """Kind step: put both actions onto the context of the chosen one. Otherwise the contexts must be identical."""

    @model_validator(mode="after")
    def _check_graft(self) -> Self:
        if self.graft and self.kind != "step":
            raise ValueError('graft is for pairs of steps: set kind to "step", or leave graft out')
        return self


@dataclass(frozen=True, slots=True)
class LabelRule:
    """Rule that labels episodes as desirable."""

    threshold: float | None
    """Lowest score of a desirable episode. None: episodes with A_E > 0 in the credit job are desirable."""
    score: str
    """Score that the threshold is compared with."""


class Temperature(StrEnum):
    """Distribution of the log-probabilities."""

    ONE = "one"
    """The model's distribution: likelihood losses."""
    AS_SAMPLED = "as_sampled"
    """Logits divided by the sampling temperature stored with each step: ratio losses."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a loss on the data. `trainer.data.refusals` checks them before anything is trained."""

    advantages: bool = False
    """An advantage for every trained step, from one credit job."""
    step_advantages: bool = False
    """The advantages are the step advantages A_S inside an anchor group (column a_step), not their combination."""
    normalised_advantages: bool = False
    """Advantages shifted and scaled to mean 0, standard deviation 1 over the plan's trained steps."""
    behaviour_logprobs: bool = False
    """Log-probabilities of the sampled tokens under the policy that sampled them."""
    reference_logprobs: bool = False
    """Log-probabilities of the sampled tokens under a frozen reference policy."""
    proximal_logprobs: bool = False
    """Log-probabilities of the sampled tokens under the proximal policy: earlier weights of this run."""
    statistics: tuple[str, ...] = ()
    """Names of the sums over the whole optimizer step that `Loss.prepare` computes in a first pass without gradient."""
    entropy: bool = False
    """Entropy of the next-token distribution at every trained token."""
    temperature: Temperature = Temperature.ONE
    """Distribution of the log-probabilities."""
    pairs: PairsConfig | None = None
    """Units in pairs, one preferred to the other; how to pair them."""
    labels: LabelRule | None = None
    """Units labelled desirable or undesirable, both kinds; how to label them."""
    unit: Unit = Unit.TOKEN
    """Unit of the average, unless the configuration sets another."""
    unit_above_token: bool = False
    """The loss is a function of whole units, so the unit must not be the token."""
    unit_advantages: bool = False
    """The advantage must be constant inside a unit; not required if the configuration sets the unit."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """Default aggregation, unless the configuration sets another."""
    atom: Atom = Atom.SEQUENCE
    """Smallest data that must share a micro-batch."""

    @property
    def credit(self) -> bool:
        """Whether the loss reads a credit job, for advantages or for preferences."""
        by_credit = self.labels is not None and self.labels.threshold is None
        return self.advantages or self.pairs is not None or by_credit


@dataclass(frozen=True, slots=True)
class LossRows:
    """The rows of one micro-batch; float32 of shape [N] unless stated otherwise. N and U may be 0.

    Columns have the meaning and shape of the same columns of `trainer.data.batch.PackedBatch`.
    """

    logprobs_N: Tensor
    """log pi_theta of each trained token, with gradient."""
    weight_N: Tensor
    advantages_N: Tensor | None = None
    behaviour_logprobs_N: Tensor | None = None
    """log of the behaviour policy, as stored; NaN where the engine returned none."""
    entropy_N: Tensor | None = None
    """Entropy in nats at the token, with gradient."""
    reference_logprobs_N: Tensor | None = None
    proximal_logprobs_N: Tensor | None = None
    unit_N: Tensor | None = None
    weight_U: Tensor | None = None
    step_index_N: Tensor | None = None
    staleness_N: Tensor | None = None
    pair_U: Tensor | None = None
    sign_U: Tensor | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Sums of `Loss.prepare` over the whole optimizer step."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """Total and metrics of a loss on one micro-batch."""

    total: Tensor
    """Scalar: (loss_N * weight_N).sum(); totals add up over micro-batches and ranks."""
    sums: Mapping[str, Tensor]
    """Scalars without gradient: sums over N behind the metrics of `trainer.runs.loop`."""


class Loss(FrozenModel, ABC):
    """A loss with its options."""

    base_needs: ClassVar[Needs] = Needs()
    """Needs of the loss under any options."""

    name: str
    """Name of the loss and of its module in `trainer.losses`."""

    def model_post_init(self, context: Any) -> None:
        """Mark the name as set, so that dumps of set fields contain it."""
        self.model_fields_set.add("name")

    @abstractmethod
    def compute(self, rows: LossRows) -> LossResult:
        """Compute the loss of a micro-batch."""

    def prepare(self, rows_B: Sequence[LossRows]) -> Mapping[str, Tensor]:
        """Compute the sums that `Needs.statistics` names, over some micro-batches of an optimizer step.

        This runs in a first pass: `logprobs_N` in `rows_B` belong to the weights at the step's start and have no
        gradient. The caller adds the scalars over ranks and passes them to `compute` as `LossRows.statistics`.
        """
        del rows_B
        return {}

    @property
    def needs(self) -> Needs:
        """Requirements on the data under these options."""
        return self.resolve_needs(self.base_needs)

    def resolve_needs(self, needs: Needs) -> Needs:
        """Return needs with the additions of the options."""
        return needs

    def weighting(self, max_length: int) -> Weighting:
        """Return the average; max_length is the longest sequence of the run, in tokens."""
        del max_length
        needs = self.needs
        needs_episode = needs.unit is Unit.EPISODE and needs.atom is Atom.SEQUENCE
        return Weighting(needs.aggregation, needs.unit, Atom.EPISODE if needs_episode else needs.atom, None)


class TokenLoss(Loss, ABC):
    """A loss per token, averaged over an optimizer step."""

    aggregation: Aggregation | None = None
    """Aggregation of the losses of an optimizer step's tokens; None: the default of the loss."""
    unit: Unit | None = None
    """Unit of the average: token, turn, sequence or episode; None: the default of the loss, or token."""
    aggregation_constant: float | None = Field(None, gt=0)
    """C of unit_mean_token_sum_norm; None: max_length."""

    @property
    def needs(self) -> Needs:
        """Requirements on the data, with the unit and aggregation of the options."""
        needs = super().needs
        if self.unit is not None:
            # A unit in the configuration is deliberate, so advantages may differ inside it.
            needs = replace(needs, unit=self.unit, unit_advantages=False)
        return needs if self.aggregation is None else replace(needs, aggregation=self.aggregation)

    def weighting(self, max_length: int) -> Weighting:
        """Return the average, with the constant of unit_mean_token_sum_norm."""
        weighting = super().weighting(max_length)
        if weighting.aggregation is not Aggregation.UNIT_MEAN_TOKEN_SUM_NORM:
            return weighting
        return replace(weighting, constant=self.aggregation_constant or float(max_length))

    @model_validator(mode="after")
    def _check_unit(self) -> Self:
        needs = self.needs
        if needs.unit is Unit.TOKEN and needs.unit_above_token:
            msg = f"{self.name} uses whole units under these options: set loss.unit to turn, sequence or episode"
            raise ValueError(msg)
        if needs.unit is Unit.TOKEN and needs.aggregation is not Aggregation.TOKEN_MEAN:
            msg = f"aggregation {needs.aggregation} averages over units: set loss.unit to turn, sequence or episode"
            raise ValueError(msg)
        return self


def require(value: Tensor | None, name: str) -> Tensor:
    """Return a tensor that the loss needs; raise ValueError if the caller omitted it."""
    if value is None:
        raise ValueError(f"this loss needs {name}")
    return value


def compute_value_loss(value_S: Tensor, target_S: Tensor, weight_S: Tensor) -> LossResult:
    """Return the mean squared error of values as a part of its sum over the optimizer step.

    Args:
        value_S: values of trained steps, float32 [S], with gradient.
        target_S: their targets, float32 [S].
        weight_S: 1 / number of trained steps of the optimizer step, float32 [S].
    """
    error_S = target_S - value_S
    total = (weight_S * error_S.square()).sum()
    # In float64, as variances are differences of these moments.
    weight_S, exact_S, target_S = weight_S.double(), error_S.detach().double(), target_S.double()
    return LossResult(
        total,
        {
            "value_loss": (weight_S * exact_S.square()).sum(),
            "value_error": (weight_S * exact_S).sum(),
            "value_target": (weight_S * target_S).sum(),
            "value_power": (weight_S * target_S.square()).sum(),
        },
    )


def sum_by_name(sums: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sum values by name over micro-batches, which all have the same names; without micro-batches return {}."""
    total: dict[str, Tensor] = {}
    for terms in sums:
        total = {name: term + total[name] if name in total else term for name, term in terms.items()}
    return total


def unit_sum(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Sum the values (floats [N], with gradient) of each unit (int64 [N]; U units).

    Returns floats [U], in the dtype of `value_N`; 0 for a unit without a token.
    """
    return value_N.new_zeros(units).index_add(0, unit_N, value_N)


def unit_mean(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Average the values of each unit: floats [U]; 0 for a unit without a token, because all of it is masked.

    Atoms are not split, so a unit lies in one micro-batch and its sum needs no communication.
    """
    tokens_U = unit_sum(value_N.new_ones(len(unit_N)), unit_N, units).clamp(min=1)
    return unit_sum(value_N, unit_N, units) / tokens_U


def log_ratio(logprobs_N: Tensor, stored_N: Tensor) -> Tensor:
    """Return the difference lp - stored, [N], not clamped; its value is 0 where the stored one is not finite.

    The gradient flows through `logprobs_N` alone. Engines sometimes return NaN. Such a token counts as ratio 1 and
    appears in the metrics. TRL does the same since its pull request 6693; before, it ended the run.
    """
    return logprobs_N - stored_N.where(stored_N.isfinite(), logprobs_N).detach()


def clamped_ratio(log_ratio_N: Tensor) -> Tensor:
    """Return the ratio, from a log-ratio clamped to +-20."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def behaviour_log_ratio(rows: LossRows) -> Tensor:
    """Return log(pi_theta / behaviour), [N], with the gradient of pi_theta."""
    return log_ratio(rows.logprobs_N, require(rows.behaviour_logprobs_N, "behaviour_logprobs_N"))


def ratio_sums(rows: LossRows) -> dict[str, Tensor]:
    """Return the sums behind the metrics of pi_theta / behaviour, before clipping, truncation or masks."""
    stored_N = require(rows.behaviour_logprobs_N, "behaviour_logprobs_N")
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
    if rows.staleness_N is None:
        return sums
    # Tokens of each staleness bucket, and the mean |log ratio| inside it.
    for name, first, last in STALENESS_BUCKETS:
        inside_N = (rows.staleness_N >= first) & (rows.staleness_N <= last)
        sums[name] = inside_N.sum()
        sums[f"log_ratio_abs_{name}/{name}"] = (log_ratio_N.abs() * inside_N).sum()
    return sums
