"""Advantage-weighted regression (Peng et al. 2019, arXiv 1910.00177): imitate what turned out better than expected.

    L = - sum_N min(exp(A / beta), w_max) * lp

It needs no behaviour log-probabilities, so it learns from any trajectory, also from re-tokenised text. A is normalised
to mean 0 and standard deviation 1 over the plan's trained steps (one row per step), so that beta means the same
whatever the scale of the rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.losses.base import Loss, LossResult, LossRows, Needs, required

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import TrainConfig


def weights(advantages_N: Tensor, *, beta: float, max_weight: float) -> Tensor:
    """min(exp(A / beta), w_max), computed without overflow.

    Args:
        advantages_N: normalised advantages, float32 [N].
        beta: temperature.
        max_weight: upper limit.

    Returns:
        Weights, float32 [N], without gradient.
    """
    return (advantages_N.detach() / beta).clamp(max=80.0).exp().clamp(max=max_weight)


def awr(rows: LossRows, config: TrainConfig) -> LossResult:
    """Weighted negative log-likelihood, summed over N."""
    advantages_N = required(rows.advantages_N, "advantages_N")
    weights_N = weights(advantages_N, beta=config.awr.beta, max_weight=config.awr.max_weight)
    sums = {
        "weight": weights_N.sum(),
        "weight_squared": weights_N.square().sum(),
        "weight_clipped": (weights_N >= config.awr.max_weight).sum(),
        "advantage": advantages_N.sum(),
    }
    return LossResult(total=-(weights_N * rows.logprobs_N).sum(), sums=sums)


AWR = Loss("awr", Needs(advantages=True, normalised_advantages=True), awr)
