"""Metrics of an optimizer step: what each name means, spelled once, and where they go (the lake and a JSONL file)."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime

import numpy as np
import polars as pl

from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from trainer.data.plan.plan import OptimizerStep, Plan
from trainer.losses.base import STALENESS_BUCKETS


class Returns:
    """Mean returns by optimizer step."""

    def __init__(self, snapshot: Snapshot, plan: Plan) -> None:
        ids_E = pl.DataFrame({"episode_id": plan.episode_ids_E})
        returns = snapshot.scan("episodes").select("episode_id", "env_return")
        wanted = returns.filter(pl.col("episode_id").is_in(ids_E["episode_id"].unique().implode()))
        known = ids_E.join(collected(wanted), on="episode_id", how="left", maintain_order="left")
        self._return_E = known["env_return"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        """NaN where it is unknown."""

    def mean(self, step: OptimizerStep) -> float | None:
        """Mean return of the step's episodes whose return is known; None where none is."""
        return_E = self._return_E[step.episodes_E]
        known_E = return_E[~np.isnan(return_E)]
        return float(known_E.mean()) if len(known_E) else None


def _versions(first: float, last: float) -> str:
    """Number of policy versions, in words."""
    if first == last:
        return f"{first:g}"
    return f"{first:g} or more" if math.isinf(last) else f"{first:g} to {last:g}"


METRICS = {
    "loss": "The loss of the optimizer step, averaged as the configuration says (aggregation, unit).",
    "logprob": "Mean log-probability of the trained tokens, in nats.",
    "entropy": "Mean entropy of the next-token distribution at the trained tokens, in nats; low: a collapsed policy.",
    "advantage": "Mean advantage over the trained tokens, as the loss got it.",
    "reward": "Mean return of the optimizer step's episodes (`episodes.env_return`), of those where it is known.",
    "grad_norm": "Norm of the gradient before clipping.",
    "learning_rate": "Learning rate of the update.",
    "action_tokens": "Trained tokens.",
    "tokens": "Tokens of all sequences, context included.",
    "micro_batches": "Forward and backward passes.",
    "seconds": "Wall time of the update, waiting for data included.",
    "tokens_per_second": "Tokens of the update per second, context included.",
    "mfu": "Share of the device's peak arithmetic, see trainer.monitor.watch.",
    "validation_nll": "Mean negative log-likelihood of the held-out episodes' action tokens, in nats.",
    "alarms": "Alarms that are active.",
    "weight": "awr, bc_exp: mean weight min(exp(A / beta), w_max).",
    "weight_clipped": "awr, bc_exp: share of tokens whose weight is at the limit.",
    "weight_ess": "awr, bc_exp: effective sample size of the weights, as a share of the tokens.",
    "ratio": "ratio losses: mean ratio pi_theta / behaviour per token, before any limit (as the five below).",
    "ratio_ess": "ratio losses: effective sample size of the ratios, as a share of the tokens.",
    "log_ratio_abs": "ratio losses: mean |log ratio|.",
    "kl_k3": "ratio losses: estimate of KL(behaviour || pi_theta) per token, ratio - 1 - log ratio.",
    "outside_half_two": "ratio losses: share of tokens whose ratio is outside [0.5, 2].",
    "logprobs_missing": "ratio losses: share of tokens whose stored log-probability is not finite; their ratio is 1.",
    **{
        metric: text
        for bucket, first, last in STALENESS_BUCKETS
        for metric, text in (
            (bucket, f"ratio losses: share of tokens {_versions(first, last)} policy versions old."),
            (f"log_ratio_abs_{bucket}", f"ratio losses: mean |log ratio| of the tokens of {bucket}."),
        )
    },
    "clipped_high": "ratio losses: share of tokens clipped above (cispo: whose weight is; else positive advantage).",
    "clipped_low": "ratio losses: share of tokens clipped below (cispo: whose weight is; else negative advantage).",
    "clipped_dual": "ppo and its variants: share of tokens bounded by the dual clip.",
    "unit_ratio": "gspo: mean ratio of the token's unit, the geometric mean over its tokens.",
    "unit_ratio_ess": "gspo: effective sample size of those, as a share of the tokens.",
    "log_ratio_abs_proximal": "With decoupled: mean |log(pi_theta / proximal)|, 0 where a period of it begins.",
    "correction_weight": "Mean weight of the off-policy correction, 0 where masked.",
    "correction_weight_ess": "Effective sample size of those weights, as a share of the tokens.",
    "correction_limited": "Share of tokens whose correction weight is truncated.",
    "correction_masked": "Share of tokens that the correction leaves out.",
    "kl_reference": "With a pull to the reference: KL(policy || reference) per token, estimate k3, at most 10 a token.",
    "log_ratio_reference": "dpo, dmpo, kto: mean log(policy / reference) per token.",
    "pull": "dro: mean of beta/2 (lp - lp_b)^2.",
    "pairs": "dpo, dmpo: pairs of the optimizer step.",
    "margin": "dpo, dmpo: mean over pairs of beta (S_chosen - S_rejected).",
    "accuracy": "dpo, dmpo: share of pairs whose chosen side scores higher.",
    "desirable": "kto: desirable units of the optimizer step.",
    "undesirable": "kto: undesirable units of the optimizer step.",
    "reward_chosen": "dpo, dmpo, kto: mean beta S of the chosen or desirable units.",
    "reward_rejected": "dpo, dmpo, kto: mean beta S of the rejected or undesirable units.",
}
"""Every metric a training step can write, and its meaning."""
TOTALS = frozenset({"loss", "pairs", "desirable", "undesirable"})
"""Sums that are reported as they are."""


def from_sums(sums: Mapping[str, float], denominator: int) -> dict[str, float]:
    """Metrics from sums over an optimizer step with so many trained tokens (`denominator`).

    `x` becomes its mean over the trained tokens, unless it is one of `TOTALS`. `x_squared` beside `x` becomes `x_ess`,
    the effective sample size (sum w)^2 / sum w^2 / n (Kish). `x/y` becomes `x`, the sum divided by the sum called y;
    where that is 0 there is nothing to average, and the metric is left out.
    """
    metrics = {}
    for name, value in sums.items():
        metric, _, over = name.partition("/")
        if over:
            if sums[over] > 0:
                metrics[metric] = value / sums[over]
        elif name.endswith("_squared"):
            base = name.removesuffix("_squared")
            metrics[f"{base}_ess"] = sums[base] ** 2 / value / denominator if value > 0 else 0.0
        else:
            metrics[name] = value if name in TOTALS else value / denominator
    return metrics


def metrics_frame(rows: list[tuple[int, dict[str, float]]]) -> pl.DataFrame:
    """Rows for the table `metrics` (step, name, value, at), of pairs of a step and its metrics."""
    now = datetime.now(UTC)
    flat = [(step, name, value, now) for step, metrics in rows for name, value in metrics.items()]
    schema = pl.Schema({"step": pl.Int64(), "name": pl.String(), "value": pl.Float64(), "at": pl.Datetime("us", "UTC")})
    return pl.DataFrame(flat, schema=schema, orient="row")
