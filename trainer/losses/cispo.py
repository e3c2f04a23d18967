"""CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is clipped and becomes a weight, so no token loses its gradient.

    L_t = -sg(clip(r, r_min, r_max)) A lp,    r = exp(lp - lp_b)

sg stops the gradient. PPO's clip silences exactly the rare tokens whose ratio moves most; here they keep a bounded
weight. r_max = 5 and no lower limit are ScaleRL's choice (arXiv 2510.13786); the paper leaves the lower one open as
well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from trainer.losses.base import Loss, LossResult, LossRows, required
from trainer.losses.policy import RatioConfig, anchored_log_ratio, corrected, prepare_correction, regularised
from trainer.losses.ppo import CLIPPED_NEEDS
from trainer.losses.ratios import clamped_ratio

if TYPE_CHECKING:
    from trainer.config import TrainConfig


class CISPOConfig(RatioConfig):
    """Clipped importance weights."""

    min_ratio: float = Field(0.0, ge=0, le=1)
    """Lower limit of the weight."""
    max_ratio: float = Field(5.0, ge=1)
    """Upper limit of the weight."""


def cispo(rows: LossRows, config: TrainConfig) -> LossResult:
    """Policy gradient weighted by the clipped ratio."""
    options = config.cispo
    advantages_N = required(rows.advantages_N, "advantages_N")
    ratio_N = clamped_ratio(anchored_log_ratio(rows, options).detach())
    loss_N = -ratio_N.clamp(options.min_ratio, options.max_ratio) * advantages_N * rows.logprobs_N
    loss_N, sums = corrected(rows, options, loss_N, weighted=options.correction.decoupled)
    sums |= {
        "clipped_high": (ratio_N > options.max_ratio).sum(),
        "clipped_low": (ratio_N < options.min_ratio).sum(),
    }
    return regularised(rows, options, loss_N, sums)


CISPO = Loss("cispo", CLIPPED_NEEDS, cispo, prepare_correction("cispo"))
