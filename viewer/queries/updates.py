"""What training did with a step: the jobs that consumed it, what its tokens weighed, and the jobs' rescored policies.

A policy is known by the digest of its weights: a rescored checkpoint is a job's own if the job saved these weights, and
the policy of an update if that many updates had been done. Nothing is taken to be the policy of an update that was not.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import polars as pl

from lake.documents import json_object
from lake.read.ratio_limits import RatioLimits, limits_of
from viewer.queries import Reads, Row
from viewer.queries.training import credit_of

JOBS, UPDATES = 4, 20
"""Jobs that are told of, and updates of each, at most; the newest jobs, and the first updates."""
WITH_REFERENCE = {"dpo", "dmpo", "kto"}
"""Losses that take a reference policy whatever their options."""
Policies = dict[int, int]
"""Series of `ratios` -> updates after which its weights were the job's."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """What one training job did with a step."""

    run: str | None
    loss: str
    averaged: str | None
    """How the loss averages, where its options say so."""
    limits: RatioLimits | str
    """What it does because of ratios, or why that is not known."""
    times: int
    """Rows of `batches` that hold the step."""
    updates: list[int]
    """The first of them."""
    weights: tuple[float, float] | None
    """Lightest and heaviest that a token of the step counted in an update; None if it is not on record."""
    credit: str | None
    """Where its advantages come from."""
    advantage: float | None
    policies: Policies
    """Its own policies that were rescored."""
    references: frozenset[int]
    """Series of its reference policy."""
    unit_log_ratios: dict[tuple[int, int], float | None] = field(default_factory=dict)
    """By series and encoding, of losses that clip units: the mean log-ratio of the step's unit; None if unknown."""


def of_step(lake: Reads, episode_id: int, step_index: int) -> list[Consumed]:
    """What training jobs did with a step, the newest first."""
    query = f"""
        WITH mine AS (
            SELECT *, token_weights[$step - first_step + 1] AS weight FROM trained_batches
            WHERE episode_id = $episode AND $step BETWEEN first_step AND last_step
        )
        SELECT m.job_id, r.run_id, r.parameters, count(*) AS times,
               list(m.optimizer_step ORDER BY m.optimizer_step)[:{UPDATES}] AS updates,
               min(m.weight) AS lightest, max(m.weight) AS heaviest,
               arg_min(m.first_step, m.optimizer_step) AS first_step,
               arg_min(m.last_step, m.optimizer_step) AS last_step,
               arg_min(m.token_weights, m.optimizer_step) AS token_weights
        FROM mine AS m JOIN job_runs AS r USING (job_id)
        WHERE m.weight IS NULL OR m.weight > 0
        GROUP BY m.job_id, r.run_id, r.parameters, r.started_at ORDER BY r.started_at DESC, m.job_id LIMIT {JOBS}
        """
    rows = lake.sql(query, {"episode": episode_id, "step": step_index}).to_dicts()
    if not rows:
        return []
    scored = _scored(lake, episode_id, step_index)
    own, initial = _own(lake, [row["job_id"] for row in rows], scored)
    return [_consumed(lake, row, episode_id, step_index, scored, own[row["job_id"]], initial) for row in rows]


def policies(lake: Reads, job_id: int) -> dict[int, tuple[str, int]]:
    """A job's own policies that were rescored on anything: series -> name, and updates done; in order of these."""
    scored = lake.sql(
        f"SELECT DISTINCT {_SERIES} FROM job_runs AS j WHERE j.kind = 'rescore' AND j.status = 'succeeded'"
    )
    own, _ = _own(lake, [job_id], scored)
    names = dict(scored.select("series_id", "checkpoint").iter_rows())
    return {series: (names[series], done) for series, done in sorted(own[job_id].items(), key=lambda item: item[1])}


_SERIES = """
    j.series_id, j.parameters ->> '$.checkpoint' AS checkpoint, j.parameters ->> '$.weights_sha256' AS sha256,
    j.parameters ->> '$.path' AS path, j.parameters ->> '$.spelled' AS spelled
    """


def _scored(lake: Reads, episode_id: int, step_index: int) -> pl.DataFrame:
    """Policies that scored the step: series_id, encoding_id, checkpoint, sha256, path, spelled."""
    query = f"""
        SELECT DISTINCT r.encoding_id, {_SERIES} FROM ratios AS r JOIN job_runs AS j USING (job_id)
        WHERE r.episode_id = $episode AND r.step_index = $step LIMIT 100
        """
    return lake.sql(query, {"episode": episode_id, "step": step_index})


def _own(
    lake: Reads, job_ids: list[int], scored: pl.DataFrame
) -> tuple[dict[int, Policies], dict[int, frozenset[int]]]:
    """The jobs' policies among those that scored; and of each job the series of the weights that it began with."""
    query = """
        SELECT DISTINCT job_id, optimizer_step AS done, sha256 FROM checkpoints WHERE list_contains($jobs, job_id)
        UNION
        SELECT DISTINCT job_id, 0, "cursor" ->> '$.model_sha256' FROM checkpoints WHERE list_contains($jobs, job_id)
        """
    saved = lake.sql(query, {"jobs": job_ids}).join(scored.select("series_id", "sha256").unique(), on="sha256")
    found: dict[int, Policies] = defaultdict(dict)
    for row in saved.sort("done").iter_rows(named=True):
        found[row["job_id"]].setdefault(row["series_id"], row["done"])
    begins = {job: frozenset(series for series, done in own.items() if done == 0) for job, own in found.items()}
    return found, begins


def _consumed(
    lake: Reads,
    row: Row,
    episode_id: int,
    step_index: int,
    scored: pl.DataFrame,
    own: Policies,
    initial: dict[int, frozenset[int]],
) -> Consumed:
    parameters = json_object(row["parameters"])
    loss = parameters.get("loss")
    options = loss if isinstance(loss, dict) else {}
    limits = limits_of(loss)
    credit = credit_of(lake, row["job_id"])
    advantage = None
    if credit is not None:
        query = f"SELECT advantage FROM {credit.rows} WHERE episode_id = $episode AND step_index = $step"
        found = lake.sql(query, {"episode": episode_id, "step": step_index})
        advantage = found["advantage"].item() if found.height == 1 else None
    of_units: dict[tuple[int, int], float | None] = {}
    if isinstance(limits, RatioLimits) and limits.unit in {"turn", "episode"}:
        weights = row["token_weights"]
        span = range(row["first_step"], row["last_step"] + 1)
        steps = [n for n, weight in zip(span, weights or [1.0] * len(span), strict=True) if weight > 0]
        steps = steps if limits.unit == "episode" else [step_index]
        mine = scored.filter(pl.col("series_id").is_in(list(own)))
        of_units = _unit_log_ratios(lake, episode_id, steps, mine, whole=weights is not None or limits.unit == "turn")
    return Consumed(
        run=row["run_id"],
        loss=str(options.get("name") or loss or "an unknown loss"),
        averaged=options.get("aggregation"),
        limits=limits,
        times=row["times"],
        updates=row["updates"],
        weights=None if row["lightest"] is None else (row["lightest"], row["heaviest"]),
        credit=None if credit is None else credit.title,
        advantage=advantage,
        policies=own,
        references=_references(parameters, options, scored, initial.get(row["job_id"], frozenset())),
        unit_log_ratios=of_units,
    )


def _unit_log_ratios(
    lake: Reads, episode_id: int, steps: list[int], mine: pl.DataFrame, *, whole: bool
) -> dict[tuple[int, int], float | None]:
    """Mean log-ratio of a unit's tokens by series and encoding; None where a step was not rescored, or not compared.

    Args:
        whole: the steps are known to be all of the unit.
    """
    query = """
        SELECT series_id, encoding_id, if(count(log_ratio) = $wanted, sum(log_ratio) / sum(tokens), NULL) AS mean
        FROM rescored_steps
        WHERE episode_id = $episode AND list_contains($steps, step_index) AND list_contains($series, series_id)
        GROUP BY series_id, encoding_id
        """
    params = {"episode": episode_id, "steps": steps, "series": mine["series_id"].to_list(), "wanted": len(steps)}
    rows = lake.sql(query, params).iter_rows()
    return {(series, encoding): mean if whole else None for series, encoding, mean in rows}


def _references(parameters: Row, options: Row, scored: pl.DataFrame, initial: frozenset[int]) -> frozenset[int]:
    """Series of the reference policy of a job, if its loss has one: the model it names, or the one it began with."""
    if not (options.get("kl") or {}).get("coefficient") and options.get("name") not in WITH_REFERENCE:
        return frozenset()
    named = parameters.get("reference")
    if named is None:
        return initial
    return frozenset(scored.filter((pl.col("spelled") == named) | (pl.col("path") == named))["series_id"])
