"""Clipped policy gradient (Schulman et al. 2017, arXiv 1707.06347) with clip-higher and dual clip.

    r = exp(lp - lp_b)
    L_t = max(-r A, -clip(r, 1 - e_lo, 1 + e_hi) A), for A < 0 at most -c A

lp_b are the behaviour log-probabilities stored with the data, so one ratio corrects for staleness and engine alike (the
two-policy form: no importance weight on top of it). With `correction.decoupled` the ratio is taken to the weights of
a few optimizer steps ago, and lp_b enters through the correction. Clip-higher e_lo 0.2, e_hi 0.28: DAPO, arXiv
2503.14476. Dual clip c = 3: arXiv 1912.09729. At r = 1 the gradient is REINFORCE's, -A grad lp. `grpo`, `dr_grpo` and
`dapo` are the same surrogate with other settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from trainer.losses.base import Loss, LossResult, LossRows, Needs, Temperature, required
from trainer.losses.policy import RatioConfig, anchored_log_ratio, corrected, prepare_correction, regularised
from trainer.losses.ratios import clamped_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import TrainConfig


class PPOConfig(RatioConfig):
    """Clipped policy gradient."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high; larger than clip_low, so that rare tokens may grow (DAPO)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Bounds the loss of a negative advantage at -dual_clip * A. None switches it off."""


def surrogate(
    ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """The clipped objective's loss per token.

    Args:
        ratio_N: pi_theta / anchor, [N], with gradient.
        advantages_N: [N].
        clip_low: lower clip distance.
        clip_high: upper clip distance.
        dual_clip: bound for negative advantages, or None.

    Returns:
        Loss per token, [N].
    """
    plain_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    loss_N = plain_N.maximum(clipped_N)
    if dual_clip is None:
        return loss_N
    return loss_N.minimum(-dual_clip * advantages_N).where(advantages_N < 0, loss_N)


def clip_sums(ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Tokens whose gradient the clip stops, by side."""
    return {
        "clipped_high": ((advantages_N > 0) & (ratio_N > 1 + clip_high)).sum(),
        "clipped_low": ((advantages_N < 0) & (ratio_N < 1 - clip_low)).sum(),
    }


def clipped(rows: LossRows, config: PPOConfig) -> LossResult:
    """The surrogate with its correction, KL and entropy terms."""
    advantages_N = required(rows.advantages_N, "advantages_N")
    ratio_N = clamped_ratio(anchored_log_ratio(rows, config))
    limits = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    loss_N = surrogate(ratio_N, advantages_N, dual_clip=config.dual_clip, **limits)
    loss_N, sums = corrected(rows, config, loss_N, weighted=config.correction.decoupled)
    sums |= clip_sums(ratio_N, advantages_N, **limits)
    if config.dual_clip is not None:
        sums["clipped_dual"] = ((advantages_N < 0) & (ratio_N > config.dual_clip)).sum()
    return regularised(rows, config, loss_N, sums)


def ppo(rows: LossRows, config: TrainConfig) -> LossResult:
    """`clipped` with the settings of `config.ppo`."""
    return clipped(rows, config.ppo)


CLIPPED_NEEDS = Needs(advantages=True, behaviour_logprobs=True, entropy=True, temperature=Temperature.AS_SAMPLED)
"""Of the surrogate in all its variants."""

PPO = Loss("ppo", CLIPPED_NEEDS, ppo, prepare_correction("ppo"))
