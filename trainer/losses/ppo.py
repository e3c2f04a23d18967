"""Clipped policy gradient (Schulman et al. 2017, arXiv 1707.06347) with clip-higher and dual clip.

    r = exp(lp - lp_b)
    L = sum_N max(-r A, -clip(r, 1 - e_lo, 1 + e_hi) A), for A < 0 at most -c A,  minus  k * H

lp_b are the behaviour log-probabilities stored with the data, so one ratio corrects for staleness and engine alike (the
two-policy form: no importance weight on top of it). Clip-higher e_lo 0.2, e_hi 0.28: DAPO, arXiv 2503.14476. Dual clip
c = 3: arXiv 1912.09729. At r = 1 the gradient is REINFORCE's, -A grad lp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.losses.base import Loss, LossResult, LossRows, Needs, Temperature, required

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import TrainConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, as verl does."""


def surrogate(
    ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """The clipped objective's loss per token.

    Args:
        ratio_N: pi_theta / behaviour, float32 [N], with gradient.
        advantages_N: float32 [N].
        clip_low: lower clip distance.
        clip_high: upper clip distance.
        dual_clip: bound for negative advantages, or None.

    Returns:
        Loss per token, float32 [N].
    """
    plain_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    loss_N = plain_N.maximum(clipped_N)
    if dual_clip is None:
        return loss_N
    return loss_N.minimum(-dual_clip * advantages_N).where(advantages_N < 0, loss_N)


def ppo(rows: LossRows, config: TrainConfig) -> LossResult:
    """Clipped surrogate minus the entropy bonus, summed over N."""
    options = config.ppo
    advantages_N = required(rows.advantages_N, "advantages_N")
    behaviour_N = required(rows.behaviour_logprobs_N, "behaviour_logprobs_N")
    log_ratio_N = (rows.logprobs_N - behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    loss_N = surrogate(
        ratio_N,
        advantages_N,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    total = loss_N.sum()
    if options.entropy_coefficient > 0:
        total = total - options.entropy_coefficient * required(rows.entropy_N, "entropy_N").sum()
    return LossResult(total=total, sums=_diagnostics(log_ratio_N.detach(), advantages_N, config))


def _diagnostics(log_ratio_N: Tensor, advantages_N: Tensor, config: TrainConfig) -> dict[str, Tensor]:
    """Sums behind the metrics, taken before any clipping."""
    options = config.ppo
    ratio_N = log_ratio_N.exp()
    positive_N = advantages_N > 0
    negative_N = advantages_N < 0
    sums = {
        "ratio": ratio_N.sum(),
        "ratio_squared": ratio_N.square().sum(),
        "log_ratio_abs": log_ratio_N.abs().sum(),
        "kl_k3": (ratio_N - 1 - log_ratio_N).sum(),
        "outside_half_two": ((ratio_N < 0.5) | (ratio_N > 2)).sum(),
        "clipped_high": (positive_N & (ratio_N > 1 + options.clip_high)).sum(),
        "clipped_low": (negative_N & (ratio_N < 1 - options.clip_low)).sum(),
        "advantage": advantages_N.sum(),
    }
    if options.dual_clip is not None:
        sums["clipped_dual"] = (negative_N & (ratio_N > options.dual_clip)).sum()
    return sums


PPO = Loss(
    "ppo",
    Needs(advantages=True, behaviour_logprobs=True, entropy=True, temperature=Temperature.AS_SAMPLED),
    ppo,
)
