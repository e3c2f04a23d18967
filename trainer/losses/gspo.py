"""Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071): one ratio for a whole unit.

    s_u = exp(1/T_u sum_t (lp_t - lp_b,t))
    log s_t = sg(log s_u) + lp_t - sg(lp_t)
    L = 1/U sum_U 1/T_u sum_t max(-s_t A, -clip(s_t, 1 - e_lo, 1 + e_hi) A)

sg stops the gradient: s_t has the value of s_u and the gradient of its token (the paper's GSPO-token, which is GSPO
where A is constant in the unit). A unit is clipped as a whole, so the clip is narrow: 3e-4 and 4e-4. log s is at most
10, as in verl.

The paper's sequence is a response. An agent has no single response, so `unit` defines it. The default is the episode,
which is refused if advantages differ inside one (a step-level estimator). Set `unit` to turn, where they cannot differ,
or to episode to insist (SkyRL #1278 shows the effect of an undefined unit).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from trainer.losses.base import MAX_LOG_RATIO, Aggregation, LossResult, LossRows, Needs, Unit, require, unit_mean
from trainer.losses.policy import RATIO_NEEDS, RatioLoss, add_regularisers, anchored_log_ratio, apply_correction
from trainer.losses.ppo import clip_sums, surrogate

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_UNIT_RATIO = 10.0
"""Upper limit of log s."""


def unit_ratio(log_ratio_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Return s_t, [N]: the geometric mean of its unit's ratios in value, its token's ratio in gradient.

    log_ratio_N is log(pi_theta / anchor), [N], with gradient; unit_N is int64 [N].
    """
    log_U = unit_mean(log_ratio_N.detach(), unit_N, units)
    log_N = log_U[unit_N] + log_ratio_N - log_ratio_N.detach()
    return log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_UNIT_RATIO).exp()


class GSPO(RatioLoss):
    """One ratio for a whole unit."""

    base_needs: ClassVar[Needs] = replace(
        RATIO_NEEDS,
        unit=Unit.EPISODE,
        unit_above_token=True,
        unit_advantages=True,
        aggregation=Aggregation.UNIT_MEAN_TOKEN_MEAN,
    )

    name: Literal["gspo"] = "gspo"
    """Name of the loss."""
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The unit's ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(4e-4, gt=0)
    """The unit's ratio is clipped above at 1 + clip_high."""

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the clipped surrogate of the unit's ratio."""
        advantages_N = require(rows.advantages_N, "advantages_N")
        unit_N, weight_U = require(rows.unit_N, "unit_N"), require(rows.weight_U, "weight_U")
        ratio_N = unit_ratio(anchored_log_ratio(rows, self.correction), unit_N, len(weight_U))
        limits = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss_N = surrogate(ratio_N, advantages_N, dual_clip=None, **limits)
        loss_N, sums = apply_correction(rows, self.correction, loss_N, weighted=self.correction.decoupled)
        detached_N = ratio_N.detach()
        sums |= {"unit_ratio": detached_N.sum(), "unit_ratio_squared": detached_N.square().sum()}
        return add_regularisers(rows, self, loss_N, sums | clip_sums(detached_N, advantages_N, **limits))
