"""KL(pi_theta || reference) in the loss: estimators from one sampled token, and what their gradients estimate.

With d = lp_ref - lp (Schulman 2020, "Approximating KL divergence"):

    k1 = -d                  unbiased value, high variance; its gradient is 0 on average: useless in a loss
    k2 = d^2 / 2             biased value, right gradient on-policy: E[-d grad lp] = grad KL(pi || ref)
    k3 = exp(d) - d - 1      unbiased value, never negative; its gradient is that of the forward KL, not of this one
    k3_straight              value of k3, gradient of k2 (verl's k3+)

arXiv 2506.09477 and 2512.21852 show which gradients are right. On data that another policy sampled, every expectation
is taken under that policy, so the estimator is weighted by r = pi_theta / behaviour (DeepSeek-V3.2, arXiv 2512.02556):

    r k1, r k3               with the gradient through r: E = grad KL(pi || ref), on any data
    sg(r) k2, sg(r) k3_straight   the same gradient as r k3, token by token: r (lp - lp_ref) grad lp

sg stops the gradient. d is clamped to +-20 and k3 to at most 10 in value, as verl does; the gradients of k2 and
k3_straight are bounded by that, not cut off.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from trainer.frozen import FrozenModel

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, as verl does."""
MAX_K3 = 10.0
"""Upper limit of the value k3."""


class KLEstimator(StrEnum):
    """How KL is estimated from the sampled token."""

    K1 = "k1"
    """log-ratio; only with ratio_weighted, alone its gradient is 0 on average."""
    K2 = "k2"
    """Half the squared log-ratio."""
    K3 = "k3"
    """exp(d) - d - 1; unless ratio_weighted, its gradient is not that of the reverse KL."""
    K3_STRAIGHT = "k3_straight"
    """Value of k3, gradient of k2."""


class KLConfig(FrozenModel):
    """Pull towards the reference policy, in the loss."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference) per token; 0 needs no reference."""
    estimator: KLEstimator = KLEstimator.K3_STRAIGHT
    """k1, k2, k3 or k3_straight: see `trainer.losses.kl`."""
    ratio_weighted: bool = True
    """Weight by policy / behaviour, which stored data needs for an unbiased gradient."""
    max_ratio: float = Field(10.0, gt=0)
    """Upper limit of that weight."""

    @model_validator(mode="after")
    def _k1_has_a_gradient(self) -> Self:
        if self.coefficient > 0 and self.estimator is KLEstimator.K1 and not self.ratio_weighted:
            msg = "the gradient of k1 in the loss is 0 on average: choose k3_straight, or set ratio_weighted"
            raise ValueError(msg)
        return self


def estimate(logprobs_N: Tensor, reference_N: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(pi_theta || reference) in nats token by token, [N], from log-probabilities of the sampled tokens, [N].

    The gradient goes through `logprobs_N`.
    """
    d_N = (reference_N.detach() - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator is KLEstimator.K1:
        return -d_N
    k3_N = (d_N.exp() - d_N - 1).clamp(max=MAX_K3)
    if estimator is KLEstimator.K3:
        return k3_N
    value_N = d_N.square() / 2 if estimator is KLEstimator.K2 else k3_N
    return value_N.detach() - d_N.detach() * (logprobs_N - logprobs_N.detach())


def penalty(logprobs_N: Tensor, reference_N: Tensor, log_ratio_N: Tensor | None, config: KLConfig) -> Tensor:
    """The penalty per token, [N], without its coefficient; for log-probabilities see `estimate`.

    log_ratio_N is log(pi_theta / behaviour), [N], with gradient; None leaves the weight out.
    """
    kl_N = estimate(logprobs_N, reference_N, config.estimator)
    if log_ratio_N is None:
        return kl_N
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=config.max_ratio)
    through = config.estimator in {KLEstimator.K1, KLEstimator.K3}
    return (ratio_N if through else ratio_N.detach()) * kl_N
