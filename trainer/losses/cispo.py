"""CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is clipped and becomes a weight, so no token loses its gradient.

    L_t = -sg(clip(r, r_min, r_max)) A lp,    r = exp(lp - lp_b)

sg stops the gradient. PPO's clip zeroes the gradient of the rare tokens whose ratio moves most; here they keep a
bounded weight. r_max = 5 and no lower limit are ScaleRL's choice (arXiv 2510.13786). The paper does not set the lower
limit either.
"""

from typing import ClassVar, Literal

from pydantic import Field

from trainer.losses.base import LossResult, LossRows, Needs, clamped_ratio, require
from trainer.losses.policy import RATIO_NEEDS, RatioLoss, add_regularisers, anchored_log_ratio, apply_correction


class CISPO(RatioLoss):
    """Clipped importance weights."""

    base_needs: ClassVar[Needs] = RATIO_NEEDS

    name: Literal["cispo"] = "cispo"
    """Name of the loss."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Lower limit of the weight."""
    max_ratio: float = Field(5.0, ge=1)
    """Upper limit of the weight."""

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the policy gradient weighted by the clipped ratio."""
        advantages_N = require(rows.advantages_N, "advantages_N")
        ratio_N = clamped_ratio(anchored_log_ratio(rows, self.correction).detach())
        loss_N = -ratio_N.clamp(self.min_ratio, self.max_ratio) * advantages_N * rows.logprobs_N
        loss_N, sums = apply_correction(rows, self.correction, loss_N, weighted=self.correction.decoupled)
        sums |= {"clipped_high": (ratio_N > self.max_ratio).sum(), "clipped_low": (ratio_N < self.min_ratio).sum()}
        return add_regularisers(rows, self, loss_N, sums)
