"""Log-ratios to the policy that sampled the data, and what is reported of them before anything limits them.

A stored log-probability that is not finite (engines give NaN now and then) counts as ratio 1, and is counted. TRL does
the same since its pull request 6693; before, such a token ended the run.

Axes: `_N` trained tokens, `_U` units of a packed buffer: turns, training sequences, or all sequences of an episode.
Atoms are packed as a whole, so a unit lies in one micro-batch and its sum needs no communication. Units without a token
(all of it masked) count one, so that nothing is divided by zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.losses.base import LossRows, required
from trainer.losses.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


def unit_sum(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Sum of the values of each unit.

    Args:
        value_N: floats [N]; the gradient goes through.
        unit_N: unit of each token, int64 [N].
        units: U.

    Returns:
        Floats [U], in the dtype of `value_N`; 0 for a unit without a token.
    """
    return value_N.new_zeros(units).index_add(0, unit_N, value_N)


def unit_tokens(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Tokens of each unit, at least 1: floats [U] in the dtype of `value_N`."""
    return unit_sum(value_N.new_ones(len(unit_N)), unit_N, units).clamp(min=1)


def unit_mean(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Mean of the values of each unit: floats [U]; 0 for a unit without a token."""
    return unit_sum(value_N, unit_N, units) / unit_tokens(value_N, unit_N, units)


STALENESS_BUCKETS: tuple[tuple[str, float, float], ...] = (
    ("staleness_0", 0, 0),
    ("staleness_1", 1, 1),
    ("staleness_2_4", 2, 4),
    ("staleness_5_16", 5, 16),
    ("staleness_17_up", 17, float("inf")),
)
"""Name, first and last number of policy versions of each bucket."""


def log_ratio(logprobs_N: Tensor, stored_N: Tensor) -> Tensor:
    """The difference lp - stored, 0 in value where the stored one is not finite.

    Args:
        logprobs_N: log-probabilities under the policy in question, [N]; the gradient goes through.
        stored_N: those it is compared with, [N].

    Returns:
        Log-ratios [N], not clamped.
    """
    return logprobs_N - stored_N.where(stored_N.isfinite(), logprobs_N).detach()


def clamped_ratio(log_ratio_N: Tensor) -> Tensor:
    """The ratio, from a log-ratio clamped to +-20."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def behaviour_log_ratio(rows: LossRows) -> Tensor:
    """log(pi_theta / behaviour), [N], with the gradient of pi_theta."""
    return log_ratio(rows.logprobs_N, required(rows.behaviour_logprobs_N, "behaviour_logprobs_N"))


def ratio_sums(rows: LossRows) -> dict[str, Tensor]:
    """Sums behind the metrics of pi_theta / behaviour, before clipping, truncation or masks."""
    stored_N = required(rows.behaviour_logprobs_N, "behaviour_logprobs_N")
    log_ratio_N = behaviour_log_ratio(rows).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    sums = {
        "ratio": ratio_N.sum(),
        "ratio_squared": ratio_N.square().sum(),
        "log_ratio_abs": log_ratio_N.abs().sum(),
        "kl_k3": (ratio_N - 1 - log_ratio_N).sum(),
        "outside_half_two": ((ratio_N < 0.5) | (ratio_N > 2)).sum(),
        "logprobs_missing": (~stored_N.isfinite()).sum(),
    }
    return sums | _staleness_sums(log_ratio_N, rows.staleness_N)


def _staleness_sums(log_ratio_N: Tensor, staleness_N: Tensor | None) -> dict[str, Tensor]:
    """Tokens of each staleness bucket, and the mean |log ratio| inside it."""
    if staleness_N is None:
        return {}
    sums = {}
    for name, first, last in STALENESS_BUCKETS:
        inside_N = (staleness_N >= first) & (staleness_N <= last)
        sums[name] = inside_N.sum()
        sums[f"log_ratio_abs_{name}/{name}"] = (log_ratio_N.abs() * inside_N).sum()
    return sums
