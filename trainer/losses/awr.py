"""Advantage-weighted regression (Peng et al. 2019, arXiv 1910.00177): imitate actions that exceeded expectations.

    L_t = -min(exp(A / beta), w_max) lp

It needs no behaviour log-probabilities, so it learns from any trajectory, also from re-tokenised text. A is normalised
to mean 0 and standard deviation 1 over the plan's trained steps (one row per step). beta therefore does not depend on
the scale of the rewards. As beta grows the loss becomes `sft`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from trainer.losses.base import LossResult, LossRows, Needs, TokenLoss, require

if TYPE_CHECKING:
    from torch import Tensor


def weights(advantages_N: Tensor, *, beta: float, max_weight: float) -> Tensor:
    """Return min(exp(A / beta), w_max), computed without overflow: [N], without gradient."""
    return (advantages_N.detach() / beta).clamp(max=80.0).exp().clamp(max=max_weight)


def weighted_likelihood(rows: LossRows, *, beta: float, max_weight: float) -> LossResult:
    """Compute the negative log-likelihood weighted by `weights`."""
    advantages_N = require(rows.advantages_N, "advantages_N")
    weights_N = weights(advantages_N, beta=beta, max_weight=max_weight)
    sums = {
        "weight": weights_N.sum(),
        "weight_squared": weights_N.square().sum(),
        "weight_clipped": (weights_N >= max_weight).sum(),
        "advantage": advantages_N.sum(),
    }
    return LossResult(total=-(rows.weight_N * weights_N * rows.logprobs_N).sum(), sums=sums)


class AWR(TokenLoss):
    """Advantage-weighted regression."""

    base_needs: ClassVar[Needs] = Needs(advantages=True, normalised_advantages=True)

    name: Literal["awr"] = "awr"
    """Name of the loss."""
    beta: float = Field(1.0, gt=0)
    """Temperature of the weights exp(A / beta), in standard deviations of the plan's advantages."""
    max_weight: float = Field(20.0, gt=0)
    """Upper limit of a weight."""

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the likelihood weighted by the exponential of the normalised advantage."""
        return weighted_likelihood(rows, beta=self.beta, max_weight=self.max_weight)
