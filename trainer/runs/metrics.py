"""Metrics of an optimizer step: from sums to values and rows. `lake.read.metric_names` says what the names mean."""

from collections.abc import Mapping
from datetime import UTC, datetime

import numpy as np
import polars as pl

from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from trainer.data.plan.plan import OptimizerStep, Plan


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
