"""Metrics of an optimizer step: from sums to values and rows. `lake.read.metric_names` says what the names mean."""

from collections.abc import Mapping
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import polars as pl

from lake.errors import UsageError
from lake.judgements.credit import Credit
from lake.judgements.scores import ENV_RETURN, episode_scores
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from trainer.data.plan.plan import OptimizerStep, Plan


class EpisodeFigures:
    """What the episodes of an optimizer step came to: the score that credit used, the return, and their turns."""

    def __init__(self, snapshot: Snapshot, plan: Plan) -> None:
        ids_E = pl.DataFrame({"episode_id": plan.episode_ids_E})
        rows = snapshot.scan("episodes").select("episode_id", ENV_RETURN, "num_steps")
        wanted = collected(rows.filter(pl.col("episode_id").is_in(ids_E["episode_id"].unique().implode())))
        score = ENV_RETURN if plan.source is None else credited_score(plan.source)
        figures = {"reward": ENV_RETURN, "episode_turns": "num_steps"}
        if score != ENV_RETURN:
            figures = {"reward": "score", "env_return": ENV_RETURN, "episode_turns": "num_steps"}
            wanted = wanted.join(_scores(snapshot, score), on="episode_id", how="left")
        known = ids_E.join(wanted, on="episode_id", how="left", maintain_order="left")
        self._values_E = {
            name: known[column].cast(pl.Float64).fill_null(float("nan")).to_numpy() for name, column in figures.items()
        }
        """By metric; NaN where it is unknown."""
        if "advantage" in plan.members.columns:
            self._values_E["episode_advantage"] = _advantages_E(plan)

    def means(self, step: OptimizerStep) -> dict[str, float]:
        """Means over the step's episodes of which the figure is known; left out where it is known of none."""
        found = {}
        for name, values_E in self._values_E.items():
            known_E = values_E[step.episodes_E]
            known_E = known_E[~np.isnan(known_E)]
            if len(known_E):
                found[name] = float(known_E.mean())
        return found


def _advantages_E(plan: Plan) -> npt.NDArray[np.float64]:
    """Return the mean advantage of each episode's trained steps, float64 [E]; NaN where none is trained."""
    first_E = plan.member_starts_Q[plan.sequence_starts_E[:-1]]
    advantage_M = plan.members.select("advantage").to_series().cast(pl.Float64).to_numpy()
    sums_E = np.add.reduceat(np.where(plan.trained_M, advantage_M, 0.0), first_E)
    trained_E = np.add.reduceat(plan.trained_M.astype(np.int64), first_E)
    means_E = np.full(len(first_E), np.nan)
    np.divide(sums_E, trained_E, out=means_E, where=trained_E > 0)
    return means_E


def credited_score(credit: Credit) -> str:
    """The episode score that advantages were computed from, in the version that they were computed from."""
    version = credit.parameters.get("scorer_versions", {}).get(credit.score)
    return credit.score if version is None or "@" in credit.score else f"{credit.score}@{version}"


def _scores(snapshot: Snapshot, score: str) -> pl.DataFrame:
    """Scores of episodes; no row where they were erased since, as no run fails for what it only shows."""
    try:
        return episode_scores(snapshot, score)
    except UsageError:
        return pl.DataFrame(schema={"episode_id": pl.Int64, "score": pl.Float64})


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
