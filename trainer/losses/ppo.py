"""Clipped policy gradient (Schulman et al. 2017, arXiv 1707.06347) with clip-higher and dual clip.

    r = exp(lp - lp_b)
    L_t = max(-r A, -clip(r, 1 - e_lo, 1 + e_hi) A), for A < 0 at most -c A

lp_b are the behaviour log-probabilities stored with the data. One ratio therefore corrects for staleness and engine
together (the two-policy form, without an additional importance weight). With `correction.decoupled` the ratio is taken
to the weights of a few optimizer steps ago, and lp_b enters through the correction. Clip-higher e_lo 0.2, e_hi 0.28:
DAPO, arXiv 2503.14476. Dual clip c = 3: arXiv 1912.09729. At r = 1 the gradient is REINFORCE's, -A grad lp. `grpo`,
`dr_grpo` and `dapo` are the same surrogate with other settings.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from lake.read.training import is_clipped_above, is_clipped_below, is_clipped_dual
from trainer.losses.base import LossResult, LossRows, Needs, clamped_ratio, require
from trainer.losses.policy import RATIO_NEEDS, RatioLoss, add_regularisers, anchored_log_ratio, apply_correction

if TYPE_CHECKING:
    from torch import Tensor


def surrogate(
    ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """Return the clipped objective's loss per token, [N]; ratio_N is pi_theta / anchor, [N], with gradient."""
    plain_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    loss_N = plain_N.maximum(clipped_N)
    if dual_clip is None:
        return loss_N
    return loss_N.minimum(-dual_clip * advantages_N).where(advantages_N < 0, loss_N)


def clip_sums(ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Count the tokens whose gradient the clip stops, by side."""
    return {
        "clipped_high": is_clipped_above(ratio_N, advantages_N, clip_high).sum(),
        "clipped_low": is_clipped_below(ratio_N, advantages_N, clip_low).sum(),
    }


class ClippedLoss(RatioLoss, ABC):
    """The surrogate with its correction, KL and entropy terms; `ppo` and its variants set its defaults."""

    base_needs: ClassVar[Needs] = RATIO_NEEDS

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a negative advantage at -dual_clip * A. None switches it off."""

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the clipped policy gradient."""
        advantages_N = require(rows.advantages_N, "advantages_N")
        ratio_N = clamped_ratio(anchored_log_ratio(rows, self.correction))
        limits = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss_N = surrogate(ratio_N, advantages_N, dual_clip=self.dual_clip, **limits)
        loss_N, sums = apply_correction(rows, self.correction, loss_N, weighted=self.correction.decoupled)
        sums |= clip_sums(ratio_N, advantages_N, **limits)
        if self.dual_clip is not None:
            sums["clipped_dual"] = is_clipped_dual(ratio_N, advantages_N, self.dual_clip).sum()
        return add_regularisers(rows, self, loss_N, sums)


class PPO(ClippedLoss):
    """Clipped policy gradient."""

    name: Literal["ppo"] = "ppo"
    """Name of the loss."""
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high; larger than clip_low, so that rare tokens may grow (DAPO)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Bounds the loss of a negative advantage at -dual_clip * A. None switches it off."""
