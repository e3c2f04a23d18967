"""Parts shared by the policy gradient losses: off-policy correction, KL and entropy terms, and the anchor of the ratio.

    L = sum_N w (c L_t + k_kl KL_t - k_H H_t)

w is the plan's weight, c the weight of the correction, KL_t the KL estimate, H_t the entropy. The correction acts on
the policy term L_t alone.

KL(pi_theta || reference) is estimated from one sampled token, with d = lp_ref - lp (Schulman 2020, "Approximating KL
divergence"):

    k1 = -d                  unbiased value, high variance; its gradient is 0 on average: useless in a loss
    k2 = d^2 / 2             biased value, right gradient on-policy: E[-d grad lp] = grad KL(pi || ref)
    k3 = exp(d) - d - 1      unbiased value, never negative; its gradient is that of the forward KL, not of this one
    k3_straight              value of k3, gradient of k2 (verl's k3+)

arXiv 2506.09477 and 2512.21852 show which gradients are right. On data that another policy sampled, every expectation
is taken under that policy, so the estimator is weighted by r = pi_theta / behaviour (DeepSeek-V3.2, arXiv 2512.02556):

    r k1, r k3               with the gradient through r: E = grad KL(pi || ref), on any data
    sg(r) k2, sg(r) k3_straight   the same gradient as r k3, token by token: r (lp - lp_ref) grad lp

sg stops the gradient. d is clamped to +-20 and k3 to at most 10 in value, as verl does. This bounds the gradients of k2
and k3_straight but does not zero them.

Off-policy correction is needed because an older policy, and an engine that computes differently, sampled the stored
tokens. rho is the probability of a stored token under the target policy, divided by that under the policy that sampled
it. Each method gives every token a weight, 0 where it is masked:

    token_truncate      min(rho, high)                          (TIS; bias grows with the distance)
    token_mask          rho where rho <= high, else 0
    icepop              rho where low <= rho <= high, else 0    (arXiv 2510.18855)
    sequence_truncate   min(prod rho, high), product over the unit
    sequence_mask       prod rho where it is <= high, else 0    (TRL's default)
    geometric_mask      1 where low <= (prod rho)^(1/T) <= high, else 0; does not depend on the length T

Masks act on the loss alone; the denominators come from the plan (`trainer.losses.base`) and do not change. With
`decoupled` the target is the proximal policy, and the ratio of the loss is taken to that policy (Hilton et al. 2021,
arXiv 2110.00641; AReaL, arXiv 2505.24298):

    L_t = rho_t max(-r A, -clip(r) A)        rho = pi_prox / pi_b (limited),   r = pi_theta / pi_prox

The proximal policy is the one at the start of every `proximal_every` optimizer steps, stored as a copy of the trained
weights. The clip keeps the policy near these recent weights, however old the data is. In the first step of a period the
two policies are equal, and r is 1. Without `decoupled` a ratio loss compares with the behaviour policy, and an
additional weight would count the distance twice. Only masks act there, as 0 or 1.

The plan limits staleness, not the correction: steps that are too old are dropped and count in no denominator.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from lake.read.training import CORRECTION_LIMITS, get_correction_bounds, is_outside
from lake.settings import FrozenModel
from trainer.losses.base import (
    MAX_LOG_RATIO,
    LossResult,
    LossRows,
    Needs,
    Temperature,
    TokenLoss,
    Unit,
    behaviour_log_ratio,
    log_ratio,
    ratio_sums,
    require,
    sum_by_name,
    unit_mean,
    unit_sum,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_K3 = 10.0
"""Upper limit of the value k3."""


class KLEstimator(StrEnum):
    """Estimator of KL from the sampled token; the module docstring has the formulas."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_STRAIGHT = "k3_straight"


class KLConfig(FrozenModel):
    """Pull towards the reference policy, in the loss."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference) per token; 0 needs no reference."""
    estimator: KLEstimator = KLEstimator.K3_STRAIGHT
    """k1, k2, k3 or k3_straight: see `trainer.losses.policy`."""
    ratio_weighted: bool = True
    """Weight by policy / behaviour; stored data needs this for an unbiased gradient."""
    max_ratio: float = Field(10.0, gt=0)
    """Upper limit of that weight."""

    @model_validator(mode="after")
    def _check_gradient(self) -> Self:
        if self.coefficient > 0 and self.estimator is KLEstimator.K1 and not self.ratio_weighted:
            msg = "the gradient of k1 in the loss is 0 on average: choose k3_straight, or set ratio_weighted"
            raise ValueError(msg)
        return self


def estimate_kl(logprobs_N: Tensor, reference_N: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(pi_theta || reference) in nats per token, [N], from log-probabilities of the sampled tokens, [N].

    The gradient flows through `logprobs_N`.
    """
    d_N = (reference_N.detach() - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator is KLEstimator.K1:
        return -d_N
    k3_N = (d_N.exp() - d_N - 1).clamp(max=MAX_K3)
    if estimator is KLEstimator.K3:
        return k3_N
    value_N = d_N.square() / 2 if estimator is KLEstimator.K2 else k3_N
    return value_N.detach() - d_N.detach() * (logprobs_N - logprobs_N.detach())


def kl_penalty(logprobs_N: Tensor, reference_N: Tensor, log_ratio_N: Tensor | None, config: KLConfig) -> Tensor:
    """Return the penalty per token, [N], without its coefficient; for log-probabilities see `estimate_kl`.

    log_ratio_N is log(pi_theta / behaviour), [N], with gradient; None omits the weight.
    """
    kl_N = estimate_kl(logprobs_N, reference_N, config.estimator)
    if log_ratio_N is None:
        return kl_N
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=config.max_ratio)
    through = config.estimator in {KLEstimator.K1, KLEstimator.K3}
    return (ratio_N if through else ratio_N.detach()) * kl_N


class CorrectionMethod(StrEnum):
    """Use of rho in the loss; the module docstring has the weight of each method."""

    NONE = "none"
    TOKEN_TRUNCATE = "token_truncate"
    TOKEN_MASK = "token_mask"
    ICEPOP = "icepop"
    SEQUENCE_TRUNCATE = "sequence_truncate"
    SEQUENCE_MASK = "sequence_mask"
    GEOMETRIC_MASK = "geometric_mask"


TRUNCATIONS = frozenset({CorrectionMethod.TOKEN_TRUNCATE, CorrectionMethod.SEQUENCE_TRUNCATE})
"""Methods that mask nothing."""
OVER_UNITS = frozenset(
    {CorrectionMethod.SEQUENCE_TRUNCATE, CorrectionMethod.SEQUENCE_MASK, CorrectionMethod.GEOMETRIC_MASK}
)
"""Methods that use a whole unit."""
NORMALISER_SUMS = ("correction_mass", "correction_kept")
"""Names of the sums that `normaliser` divides."""


class CorrectionConfig(FrozenModel):
    """Off-policy correction."""

    method: CorrectionMethod = CorrectionMethod.NONE
    """Use of rho = target policy / behaviour policy; see `trainer.losses.policy`."""
    low: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Lower limit, for icepop and geometric_mask; None: the method's default (0.5, 0.999)."""
    high: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Upper limit; None: the method's default (token 2, icepop 5, sequence_truncate 5, sequence_mask 3, geometric
    1.001)."""
    decoupled: bool = False
    """Correct from the behaviour policy to the proximal policy, the one at the start of every `proximal_every`
    optimizer steps. The loss takes its ratio to that policy, so the clip limits the change in these steps, not the
    data's age."""
    proximal_every: int | None = Field(None, ge=1)
    """With decoupled: number of optimizer steps between updates of the proximal policy. Above 1 it costs a copy of the
    trained weights and, except in the first of these steps, a forward pass. With 1 the ratio is 1 and nothing is
    clipped. None: the steps of an epoch if `minibatches` is set, else 4."""
    normalise: bool = False
    """Divide the weights by their mean over the unmasked tokens of the optimizer step. Costs a forward pass."""

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        defaults = CORRECTION_LIMITS[self.method]
        for name, value, default in zip(("low", "high"), (self.low, self.high), defaults, strict=True):
            if value is not None and default is None:
                raise ValueError(f"method {self.method} has no limit `{name}`: leave it out")
        if (self.normalise or self.decoupled) and self.method is CorrectionMethod.NONE:
            raise ValueError("normalise and decoupled need a method, for example token_truncate")
        if self.proximal_every is not None and not self.decoupled:
            msg = "proximal_every has no effect unless decoupled is set: set it, or leave proximal_every out"
            raise ValueError(msg)
        if self.normalise and self.method is CorrectionMethod.GEOMETRIC_MASK:
            raise ValueError("geometric_mask weights by 0 or 1, so there is nothing to normalise")
        return self

    @property
    def limits(self) -> tuple[float, float]:
        """Low and high: the configured ones, or the method's defaults (0 and infinity where it has none)."""
        return get_correction_bounds(self.method, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Correction:
    """The effect of a method on each token; all [N], without gradient."""

    weight_N: Tensor
    """Weight, floats; 0 where masked."""
    keep_N: Tensor
    """Whether the token is not masked, bool."""
    limited_N: Tensor
    """Whether the weight was truncated, bool."""


def compute_correction(log_rho_N: Tensor, unit_N: Tensor | None, units: int, config: CorrectionConfig) -> Correction:
    """Compute the weights of stored tokens, from log(target / behaviour), [N].

    Args:
        unit_N: unit of each token, int64 [N]; needed by the methods that use whole units.

    Raises:
        ValueError: the method needs units; `unit_N` is missing.
    """
    log_rho_N = log_rho_N.detach()
    method, (low, high) = config.method, config.limits
    if method in OVER_UNITS:
        if unit_N is None:
            raise ValueError(f"correction {method} needs a unit: turn, sequence or episode")
        over = unit_mean if method is CorrectionMethod.GEOMETRIC_MASK else unit_sum
        log_rho_N = over(log_rho_N, unit_N, units)[unit_N]
    rho_N = log_rho_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if method is CorrectionMethod.NONE:
        rho_N = rho_N.new_ones(len(rho_N))
    if method in TRUNCATIONS:
        limited_N = rho_N > high
        return Correction(rho_N.clamp(max=high), limited_N.new_ones(len(limited_N)), limited_N)
    keep_N = ~is_outside(rho_N, low, high)
    weight_N = rho_N.new_ones(len(rho_N)) if method is CorrectionMethod.GEOMETRIC_MASK else rho_N
    return Correction(weight_N * keep_N, keep_N, keep_N.new_zeros(len(keep_N)))


def normaliser_sums(correction: Correction, plan_weight_N: Tensor) -> dict[str, Tensor]:
    """Return the two sums over an optimizer step that `normaliser` divides, weighted as the loss is."""
    unmasked_N = plan_weight_N * correction.keep_N
    return {"correction_mass": (unmasked_N * correction.weight_N).sum(), "correction_kept": unmasked_N.sum()}


def normaliser(statistics: Mapping[str, float]) -> float:
    """Return the mean weight over the unmasked tokens of the optimizer step; 1 if all are masked."""
    mass, unmasked = statistics["correction_mass"], statistics["correction_kept"]
    return mass / unmasked if mass > 0 and unmasked > 0 else 1.0


RATIO_NEEDS = Needs(advantages=True, behaviour_logprobs=True, entropy=True, temperature=Temperature.AS_SAMPLED)
"""Needs of a policy gradient loss that compares with the policy that sampled the data."""


class PolicyLoss(TokenLoss, ABC):
    """A policy gradient loss."""

    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, per action token."""
    kl: KLConfig = KLConfig()
    """Pull towards the reference policy."""

    def resolve_needs(self, needs: Needs) -> Needs:
        """Add a reference if there is a pull to it, and the log-probabilities of its weight."""
        pulled = self.kl.coefficient > 0
        return replace(
            needs,
            reference_logprobs=needs.reference_logprobs or pulled,
            behaviour_logprobs=needs.behaviour_logprobs or (pulled and self.kl.ratio_weighted),
        )


class CorrectedLoss(PolicyLoss, ABC):
    """A policy gradient loss with an off-policy correction."""

    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""

    def prepare(self, rows_B: Sequence[LossRows]) -> Mapping[str, Tensor]:
        """Sum the terms of the mean weight, if weights are divided by it."""
        if not self.correction.normalise:
            return {}
        return sum_by_name(normaliser_sums(correct_rows(rows, self.correction), rows.weight_N) for rows in rows_B)

    def resolve_needs(self, needs: Needs) -> Needs:
        """Add the needs of the correction."""
        needs = super().resolve_needs(needs)
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
    """A loss with an importance ratio."""

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        correction = self.correction
        if correction.method in TRUNCATIONS and not correction.decoupled:
            raise ValueError(
                f"correction {correction.method} would apply the ratio of this loss a second time: set "
                f"correction.decoupled, choose a mask, or use loss reinforce"
            )
        if correction.normalise and not correction.decoupled:
            raise ValueError("correction.normalise: the weights are 0 or 1 unless correction.decoupled is set")
        return self


def anchored_log_ratio(rows: LossRows, config: CorrectionConfig) -> Tensor:
    """Return the loss's log-ratio to the behaviour policy, or to the proximal one if decoupled; [N], with gradient."""
    if config.decoupled:
        return log_ratio(rows.logprobs_N, require(rows.proximal_logprobs_N, "proximal_logprobs_N"))
    return behaviour_log_ratio(rows)


def correct_rows(rows: LossRows, config: CorrectionConfig) -> Correction:
    """Compute the correction from the behaviour policy to the proximal one if decoupled, else to the current one."""
    policy_N = rows.logprobs_N
    if config.decoupled:
        policy_N = require(rows.proximal_logprobs_N, "proximal_logprobs_N")
    log_rho_N = log_ratio(policy_N.detach(), require(rows.behaviour_logprobs_N, "behaviour_logprobs_N"))
    units = 0 if rows.weight_U is None else len(rows.weight_U)
    return compute_correction(log_rho_N, rows.unit_N, units, config)


def apply_correction(
    rows: LossRows, config: CorrectionConfig, loss_N: Tensor, *, weighted: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy term loss_N, [N], with the correction's weights, and sums behind the correction's metrics.

    Unless `weighted`, the weights only mask tokens.
    """
    if config.method is CorrectionMethod.NONE:
        return loss_N, {}
    correction = correct_rows(rows, config)
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


def add_regularisers(rows: LossRows, options: PolicyLoss, loss_N: Tensor, sums: Mapping[str, Tensor]) -> LossResult:
    """Add the KL and entropy terms to the policy term loss_N, [N], apply the plan's weights, and collect metrics."""
    sums = {"advantage": require(rows.advantages_N, "advantages_N").sum(), **sums}
    if rows.behaviour_logprobs_N is not None:
        sums |= ratio_sums(rows)
    if options.kl.coefficient > 0:
        reference_N = require(rows.reference_logprobs_N, "reference_logprobs_N")
        log_ratio_N = behaviour_log_ratio(rows) if options.kl.ratio_weighted else None
        loss_N = loss_N + options.kl.coefficient * kl_penalty(rows.logprobs_N, reference_N, log_ratio_N, options.kl)
        sums["kl_reference"] = estimate_kl(rows.logprobs_N.detach(), reference_N, KLEstimator.K3).sum()
    if options.entropy_coefficient > 0:
        loss_N = loss_N - options.entropy_coefficient * require(rows.entropy_N, "entropy_N")
    return LossResult(total=(rows.weight_N * loss_N).sum(), sums=sums)
