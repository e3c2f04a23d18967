"""What the policy gradient losses share: the anchor of the ratio, off-policy correction, KL and entropy terms.

    L = sum_N w (c L_t + k_kl KL_t - k_H H_t)

w is the plan's weight, c the weight of the correction (`trainer.losses.correction`), KL_t of `trainer.losses.kl`, H_t
the entropy. The correction acts on the policy term L_t alone.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from trainer.data.stream.aggregation import Unit
from trainer.losses.base import (
    LossResult,
    LossRows,
    Needs,
    Temperature,
    TokenLoss,
    behaviour_log_ratio,
    log_ratio,
    ratio_sums,
    required,
    summed,
)
from trainer.losses.correction import (
    NORMALISER_SUMS,
    OVER_UNITS,
    TRUNCATIONS,
    Correction,
    CorrectionConfig,
    CorrectionMethod,
    correct,
    normaliser,
    normaliser_sums,
)
from trainer.losses.kl import KLConfig, KLEstimator, estimate, penalty

if TYPE_CHECKING:
    from torch import Tensor


RATIO_NEEDS = Needs(advantages=True, behaviour_logprobs=True, entropy=True, temperature=Temperature.AS_SAMPLED)
"""Of a policy gradient loss that compares with the policy that sampled the data."""


class PolicyLoss(TokenLoss, ABC):
    """A policy gradient loss."""

    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, per action token."""
    kl: KLConfig = KLConfig()
    """Pull towards the reference policy."""

    def resolved(self, needs: Needs) -> Needs:
        """A reference if there is a pull to it, and what its weight takes."""
        pulled = self.kl.coefficient > 0
        return replace(
            needs,
            reference_logprobs=needs.reference_logprobs or pulled,
            behaviour_logprobs=needs.behaviour_logprobs or (pulled and self.kl.ratio_weighted),
        )


class CorrectedLoss(PolicyLoss, ABC):
    """A policy gradient loss that can be corrected for where its data comes from."""

    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""

    def prepare(self, rows_B: Sequence[LossRows]) -> Mapping[str, Tensor]:
        """What the mean weight is made of, where weights are divided by it."""
        if not self.correction.normalise:
            return {}
        return summed(normaliser_sums(correction_of(rows, self.correction), rows.weight_N) for rows in rows_B)

    def resolved(self, needs: Needs) -> Needs:
        """What the correction looks at."""
        needs = super().resolved(needs)
        method = self.correction.method
        over_units = method in OVER_UNITS
        return replace(
            needs,
            behaviour_logprobs=needs.behaviour_logprobs or method is not CorrectionMethod.NONE,
            proximal_logprobs=needs.proximal_logprobs or self.correction.decoupled,
            statistics=NORMALISER_SUMS if self.correction.normalise else needs.statistics,
            unit=Unit.SEQUENCE if over_units and needs.unit is Unit.TOKEN else needs.unit,
            unit_above_token=needs.unit_above_token or over_units,
        )


class RatioLoss(CorrectedLoss, ABC):
    """A loss with a ratio of its own."""

    @model_validator(mode="after")
    def _counts_the_distance_once(self) -> Self:
        chosen = self.correction
        if chosen.method in TRUNCATIONS and not chosen.decoupled:
            raise ValueError(
                f"correction {chosen.method} would weigh a second time by the ratio that this loss takes anyway: set "
                f"correction.decoupled, choose a mask, or use loss reinforce"
            )
        if chosen.normalise and not chosen.decoupled:
            raise ValueError("correction.normalise: the weights are 0 or 1 unless correction.decoupled is set")
        return self


def anchored_log_ratio(rows: LossRows, config: CorrectionConfig) -> Tensor:
    """The loss's own log-ratio: to the behaviour policy, or to the proximal one if decoupled; [N], with gradient."""
    if config.decoupled:
        return log_ratio(rows.logprobs_N, required(rows.proximal_logprobs_N, "proximal_logprobs_N"))
    return behaviour_log_ratio(rows)


def correction_of(rows: LossRows, config: CorrectionConfig) -> Correction:
    """Weights for where the tokens come from: to the proximal policy if decoupled, else to the current one."""
    policy_N = rows.logprobs_N
    if config.decoupled:
        policy_N = required(rows.proximal_logprobs_N, "proximal_logprobs_N")
    log_rho_N = log_ratio(policy_N.detach(), required(rows.behaviour_logprobs_N, "behaviour_logprobs_N"))
    units = 0 if rows.weight_U is None else len(rows.weight_U)
    return correct(log_rho_N, rows.unit_N, units, config)


def corrected(
    rows: LossRows, config: CorrectionConfig, loss_N: Tensor, *, weighted: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy term loss_N, [N], with the correction's weights, and sums behind the correction's metrics.

    Unless `weighted`, all that the weights decide is which tokens stay.
    """
    if config.method is CorrectionMethod.NONE:
        return loss_N, {}
    correction = correction_of(rows, config)
    weight_N = correction.weight_N if weighted else correction.keep_N.to(loss_N.dtype)
    if config.normalise:
        weight_N = weight_N / normaliser(rows.statistics)
    sums = {
        "correction_weight": weight_N.sum(),
        "correction_weight_squared": weight_N.square().sum(),
        "correction_limited": correction.limited_N.sum(),
        "correction_masked": (~correction.keep_N).sum(),
    }
    if config.decoupled:
        sums["log_ratio_abs_proximal"] = anchored_log_ratio(rows, config).detach().abs().sum()
    return weight_N * loss_N, sums


def regularised(rows: LossRows, options: PolicyLoss, loss_N: Tensor, sums: Mapping[str, Tensor]) -> LossResult:
    """Add the KL and entropy terms to the policy term loss_N, [N], weigh by the plan, and report."""
    found = {"advantage": required(rows.advantages_N, "advantages_N").sum(), **sums}
    if rows.behaviour_logprobs_N is not None:
        found |= ratio_sums(rows)
    if options.kl.coefficient > 0:
        reference_N = required(rows.reference_logprobs_N, "reference_logprobs_N")
        log_ratio_N = behaviour_log_ratio(rows) if options.kl.ratio_weighted else None
        loss_N = loss_N + options.kl.coefficient * penalty(rows.logprobs_N, reference_N, log_ratio_N, options.kl)
        found["kl_reference"] = estimate(rows.logprobs_N.detach(), reference_N, KLEstimator.K3).sum()
    if options.entropy_coefficient > 0:
        loss_N = loss_N - options.entropy_coefficient * required(rows.entropy_N, "entropy_N")
    return LossResult(total=(rows.weight_N * loss_N).sum(), sums=found)
