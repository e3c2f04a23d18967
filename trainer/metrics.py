"""Metrics of an optimizer step: what each name means, spelled once, and where they go (the lake and a JSONL file)."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import polars as pl

METRICS = {
    "loss": "The loss, divided by the optimizer step's trained tokens.",
    "logprob": "Mean log-probability of the trained tokens, in nats.",
    "entropy": "Mean entropy of the next-token distribution at the trained tokens, in nats; low: a collapsed policy.",
    "advantage": "Mean advantage over the trained tokens, as the loss got it.",
    "grad_norm": "Norm of the gradient before clipping.",
    "learning_rate": "Learning rate of the update.",
    "action_tokens": "Trained tokens: the loss's denominator.",
    "tokens": "Tokens of all sequences, context included.",
    "micro_batches": "Forward and backward passes.",
    "seconds": "Wall time of the update, waiting for data included.",
    "weight": "awr: mean weight min(exp(A / beta), w_max).",
    "weight_clipped": "awr: share of tokens whose weight is at the limit.",
    "weight_ess": "awr: effective sample size of the weights, as a share of the tokens.",
    "ratio": "ppo: mean ratio pi_theta / behaviour.",
    "ratio_ess": "ppo: effective sample size of the ratios, as a share of the tokens.",
    "log_ratio_abs": "ppo: mean |log ratio|.",
    "kl_k3": "ppo: estimate of KL(behaviour || pi_theta) per token, ratio - 1 - log ratio.",
    "outside_half_two": "ppo: share of tokens whose ratio is outside [0.5, 2].",
    "clipped_high": "ppo: share of tokens clipped above (positive advantage).",
    "clipped_low": "ppo: share of tokens clipped below (negative advantage).",
    "clipped_dual": "ppo: share of tokens bounded by the dual clip.",
}
"""Every metric a training step can write, and its meaning."""


def from_sums(sums: Mapping[str, float], denominator: int) -> dict[str, float]:
    """Token means from sums over an optimizer step; `x_squared` beside `x` becomes `x_ess`.

    The effective sample size is (sum w)^2 / sum w^2 / n (Kish), taken before any truncation.
    """
    metrics = {}
    for name, value in sums.items():
        if not name.endswith("_squared"):
            metrics[name] = value / denominator
            continue
        base = name.removesuffix("_squared")
        metrics[f"{base}_ess"] = sums[base] ** 2 / value / denominator if value > 0 else 0.0
    return metrics


def metrics_frame(rows: list[tuple[int, dict[str, float]]]) -> pl.DataFrame:
    """Rows for the table `metrics`.

    Args:
        rows: (step, metrics) pairs.

    Returns:
        step, name, value, at.
    """
    now = datetime.now(UTC)
    flat = [(step, name, value, now) for step, metrics in rows for name, value in metrics.items()]
    schema = pl.Schema({"step": pl.Int64(), "name": pl.String(), "value": pl.Float64(), "at": pl.Datetime("us", "UTC")})
    return pl.DataFrame(flat, schema=schema, orient="row")


class JsonlLog:
    """Metrics as JSON lines, one per optimizer step, readable while a run goes on.

    A line that a kill cut off is ended first, so that every later line stands alone.

    Args:
        path: the file; appended to. Use the log as a context.
        attempt: of the run, written into each line.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        line: dict[str, Any] = {"step": step, "attempt": self._attempt, **metrics}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
