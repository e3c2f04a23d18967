"""Training: metrics of jobs, the batches of their optimizer steps, advantages, and online runs (`trajlake loop`).

`lake.judgements.credit` decides which rows a choice of credit means, as for every reader of a lake. In an online run,
version k of the weights plays round k, where k is the number of trained rounds. An evaluation of version k comes before
round k. The metrics of the run's job hold its decisions, one step a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl

from lake import ids
from lake.documents import parse_json_object
from lake.errors import DataRefusedError, UsageError
from lake.judgements import outcomes
from lake.judgements.credit import Credit, find_credit
from lake.judgements.scores import ENV_RETURN
from lake.read.training import LOOP, name_evaluation_run, round_predicate
from lake.statistics import success_interval
from viewer.queries import NO_ADVANTAGES, LakeReader, ListWindow, Params, Row, Sort, get_first_row

_SOME = 50
"""Episodes of a job that are checked first: nearly always all of them have advantages, or none."""
GROUPS = 8
"""Largest number of listed groups of a batch."""
POINTS = 1000
"""Largest number of points of a curve; a longer curve averages neighbouring steps."""


JOBS = 500
"""Largest number of training jobs in a choice."""


def list_jobs(lake: LakeReader, named: Sequence[int] = (), limit: int = JOBS) -> pl.DataFrame:
    """Return jobs with metrics or batches: updates with a batch, number of metrics, and the time of the last metric.

    Training comes first, the newest in front; total is the number of jobs. The limit never cuts the jobs in `named`. An
    online run appears as its training job, with the status of the run.
    """
    query = f"""
        SELECT r.job_id, r.kind, r.run_id, r.parameters, coalesce(l.status, r.status) AS status, r.started_at,
               r.seconds, l.status IS NOT NULL AS online, coalesce(b.updates, 0) AS updates,
               coalesce(m.metrics, 0) AS metrics, m.last_at, count(*) OVER () AS total,
               row_number() OVER (
                   ORDER BY r.kind = 'train' OR b.updates > 0 DESC, r.started_at DESC, r.job_id
               ) AS place
        FROM job_runs AS r
        LEFT JOIN (
            SELECT job_id, count(DISTINCT optimizer_step) AS updates FROM trained_batches GROUP BY job_id
        ) AS b USING (job_id)
        LEFT JOIN (
            SELECT job_id, count(DISTINCT name) AS metrics, max(written_at) AS last_at FROM run_metrics GROUP BY job_id
        ) AS m USING (job_id)
        LEFT JOIN (
            SELECT json_extract_string(parameters, '$.train_job') AS train_job, status FROM job_runs
            WHERE kind = '{LOOP}'
        ) AS l ON l.train_job = id_text(r.job_id)
        WHERE r.kind <> '{LOOP}' AND (r.kind = 'train' OR b.updates > 0 OR m.metrics > 0)
        ORDER BY list_contains($named::BIGINT[], r.job_id) DESC, place LIMIT $limit
        """
    return lake.sql(query, {"named": list(named), "limit": limit}).sort("place").drop("place")


def read_metrics(lake: LakeReader, job_id: int) -> pl.DataFrame:
    """Return the curves of a job in order: name, step (the first of the point), value (NULL: not computable)."""
    return _average_curves(lake, "job_id = $job", {"job": job_id})


def list_alarms(lake: LakeReader, job_id: int, limit: int = 200) -> tuple[list[tuple[int, int]], int]:
    """Return the stretches of updates with an active alarm, and their number.

    A stretch is its first and last step; at most `limit` are listed.
    """
    query = """
        WITH active AS (
            SELECT step, value > 0 AS is_on, row_number() OVER (ORDER BY step) AS place
            FROM run_metrics WHERE job_id = $job AND name = 'alarms'
        ),
        on_now AS (SELECT step, place - row_number() OVER (ORDER BY step) AS stretch FROM active WHERE is_on)
        SELECT min(step), max(step), count(*) OVER () AS total FROM on_now GROUP BY stretch ORDER BY 1 LIMIT $limit
        """
    rows = lake.sql(query, {"job": job_id, "limit": limit}).rows()
    return [(int(first), int(last)) for first, last, _ in rows], int(rows[0][2]) if rows else 0


def find_rate_jumps(lake: LakeReader, job_id: int, limit: int = 20) -> list[tuple[int, float, float]]:
    """Return the updates whose learning rate is more than twice, or less than half, that of the update before.

    Each is the update, the rate before and its rate. A warm-up (every update so far raised the rate) and a decay to the
    end (every further update lowers it) are left out.
    """
    query = """
        WITH rates AS (
            SELECT step, lag(value) OVER (ORDER BY step) AS before, value AS after FROM run_metrics
            WHERE job_id = $job AND name = 'learning_rate' AND value IS NOT NULL
        ),
        slopes AS (
            SELECT *, bool_and(coalesce(after > before, true)) OVER (ORDER BY step) AS is_warm_up,
                   bool_and(coalesce(after < before, true)) OVER (ORDER BY step DESC) AS is_decay
            FROM rates
        )
        SELECT step, before, after FROM slopes
        WHERE greatest(before, after) > 2 * least(before, after) AND NOT is_warm_up AND NOT is_decay
        ORDER BY step LIMIT $limit
        """
    return lake.sql(query, {"job": job_id, "limit": limit}).rows()


def read_round_metrics(lake: LakeReader, run: str) -> pl.DataFrame:
    """Return the curves of the jobs that collected the rounds of a run; columns as in `read_metrics`."""
    return _average_curves(lake, "kind = 'collect' AND run_id = $run", {"run": run})


def _average_curves(lake: LakeReader, where: str, params: Params) -> pl.DataFrame:
    query = f"""
        WITH mine AS (SELECT name, step, value FROM run_metrics WHERE {where}),
        span AS (SELECT min(step) AS first, greatest(1, ceil((max(step) - min(step) + 1) / {POINTS}))::BIGINT AS width
                 FROM mine)
        SELECT name, first + (step - first) // width * width AS step, avg(value) AS value
        FROM mine, span GROUP BY ALL ORDER BY name, step
        """
    return lake.sql(query, params)


def list_jobs_of_run(lake: LakeReader, run: str, limit: int = 50) -> pl.DataFrame:
    """Return the jobs of a run that have metrics: job_id, kind, parameters, status, started_at, metrics.

    The online run comes first, then training, then other jobs; the newest of each in front.
    """
    query = f"""
        SELECT r.job_id, r.kind, r.parameters, r.status, r.started_at, count(DISTINCT m.name) AS metrics
        FROM job_runs AS r JOIN run_metrics AS m USING (job_id)
        WHERE r.run_id = $run GROUP BY r.job_id, r.kind, r.parameters, r.status, r.started_at
        ORDER BY r.kind = '{LOOP}' DESC, r.kind = 'train' DESC, r.started_at DESC, r.job_id LIMIT $limit
        """
    return lake.sql(query, {"run": run, "limit": limit})


def find_credit_of_job(lake: LakeReader, job_id: int) -> Credit | None:
    """Return the advantages that a training job read; None if none of its episodes had any.

    The job's parameters may name them (`advantages`). Otherwise they are the current ones: of the snapshot that the job
    read, or, for a loop that computes credit as it runs, of its end.
    """
    query = "SELECT parameters, input_snapshot, sequence FROM job_runs WHERE job_id = ?"
    row = get_first_row(lake.sql(query, [job_id]))
    if row is None:
        return None
    named = parse_json_object(row["parameters"]).get("advantages")
    read = parse_json_object(row["input_snapshot"]).get("jobs", row["sequence"])
    credit = look_up_credit(lake, named if isinstance(named, str) else None, read)
    if credit is None:
        return None
    if credit.before is None:
        credit = replace(credit, before=read)
    consumed = f"SELECT DISTINCT episode_id FROM trained_batches WHERE job_id = {job_id}"
    some = lake.sql(f"{consumed} LIMIT {_SOME}")["episode_id"]
    for rows in (credit.rows_of(lake, some), f"(SELECT * FROM {credit.rows} WHERE episode_id IN ({consumed}))"):
        if lake.sql(f"SELECT EXISTS (SELECT 1 FROM {rows})").item():
            return credit
    return None


def read_consumption(lake: LakeReader, job_id: int, credit: Credit | None) -> pl.DataFrame:
    """Return the episodes of a job's updates as at most `POINTS` points in order; NULL without credit.

    mean_return is of the runs' usual outcomes. dead_share, positive, negative and undefined are shares of the steps;
    mean_size is the mean |advantage|.
    """
    mine = f"""
        WITH mine AS (SELECT * FROM trained_batches WHERE job_id = $job),
        span AS (SELECT min(optimizer_step) AS first,
                        greatest(1, ceil((max(optimizer_step) - min(optimizer_step) + 1) / {POINTS}))::BIGINT AS width
                 FROM mine),
        binned AS (SELECT *, first + (optimizer_step - first) // width * width AS step FROM mine, span)
        """
    relation, params = outcomes.build_relation(lake, None)
    of_episodes = f"""{mine}
        SELECT step, count(*) AS episodes, count(DISTINCT e.group_id) AS groups,
               sum(b.action_tokens)::BIGINT AS action_tokens, avg(e.outcome) AS mean_return
        FROM binned AS b LEFT JOIN {relation} AS e USING (episode_id) GROUP BY step ORDER BY step
        """
    # A separate query: it scans all advantages, and its cached answer outlives a commit of episodes. It filters them
    # before the join, which would otherwise hold all of them in memory.
    rows = credit.rows if credit else NO_ADVANTAGES
    of_steps = f"""{mine},
        sums AS (
            SELECT step, count(*) AS credited, count(a.advantage) AS defined,
                   count(*) FILTER (list_contains(string_split(a.flags, ','), 'dead_group')) AS dead,
                   sum(abs(a.advantage)) AS total_size, count(*) FILTER (a.advantage > 0) AS positive,
                   count(*) FILTER (a.advantage < 0) AS negative
            FROM (FROM {rows} WHERE episode_id IN (SELECT episode_id FROM mine)) AS a JOIN binned AS b
                ON a.episode_id = b.episode_id AND a.step_index BETWEEN b.first_step AND b.last_step
            GROUP BY step
        )
        SELECT step, dead / credited AS dead_share, total_size / nullif(defined, 0) AS mean_size,
               positive / credited AS positive, negative / credited AS negative,
               (credited - defined) / credited AS undefined
        FROM sums
        """
    episodes = lake.sql(of_episodes, params | {"job": job_id})
    steps = lake.sql(of_steps, {"job": job_id})
    return episodes.join(steps, on="step", how="left", maintain_order="left")


BATCH_ORDERS = (
    *("run_id", "task_id", "rollout_index", "policy_version", "status", "outcome", "action_tokens"),
    *("undefined", "dead", "a_episode", "mean_advantage", "lowest", "highest"),
)
"""Columns that may order a batch."""
_BATCH = (
    *("episode_id", "group_id", "run_id", "task_id", "rollout_index", "policy_version", "status", "outcome"),
    *("first_step", "last_step", "action_tokens", "credit_job", "a_episode", "mean_advantage", "lowest", "highest"),
    *("mean_size", "undefined", "dead"),
)


def read_batch(
    lake: LakeReader, job_id: int, update: int, credit: Credit | None, window: ListWindow, sort: Sort | None = None
) -> pl.DataFrame:
    """Return the episodes that an optimizer step consumed, by default the largest mean |advantage| first.

    credit_job is the job that computed their advantages.
    """
    by, falls = ["mean_size", "episode_id"], [True, False]
    if sort is not None and sort.column in BATCH_ORDERS:
        first = ["task_number", "task_id"] if sort.column == "task_id" else [sort.column]
        by, falls = first + by, [sort.descending] * len(first) + falls
    rows = _read_update(lake, job_id, update, credit).sort(by, descending=falls, nulls_last=True)
    return rows.slice(window.offset, window.limit).select(_BATCH)


def read_batch_groups(
    lake: LakeReader, job_id: int, update: int, credit: Credit | None, limit: int = GROUPS
) -> pl.DataFrame:
    """Return the groups of the episodes that an optimizer step consumed, the largest mean |advantage| first.

    group_id, run_id, task_id, collection_round, policy_version (the oldest), episodes, mean_return (each episode counts
    once), mean_size, action_tokens; dead follows from the advantages of the whole group. total is the number of groups,
    dead_total the number of dead ones.
    """
    defined = pl.col("defined").sum()
    rows = _read_update(lake, job_id, update, credit).filter(pl.col("group_id").is_not_null())
    groups = rows.group_by("group_id").agg(
        pl.col("run_id", "task_id", "collection_round").drop_nulls().first(),
        pl.col("policy_version").min(),
        episodes=pl.col("episode_id").n_unique().cast(pl.Int64),
        mean_return=pl.col("outcome").filter(pl.col("episode_id").is_first_distinct()).mean(),
        mean_size=pl.when(defined > 0).then(pl.col("total_size").sum() / defined),
        action_tokens=pl.col("action_tokens").sum(),
        dead=pl.col("dead").any(),
    )
    groups = groups.sort("mean_size", "task_id", "group_id", descending=[True, False, False], nulls_last=True)
    return groups.with_columns(
        total=pl.lit(groups.height, pl.Int64), dead_total=pl.lit(int(groups["dead"].sum()), pl.Int64)
    ).head(limit)


def count_batch(lake: LakeReader, job_id: int, update: int, credit: Credit | None) -> int:
    """Count the rows that an optimizer step consumed."""
    return _read_update(lake, job_id, update, credit).height


def _read_update(lake: LakeReader, job_id: int, update: int, credit: Credit | None) -> pl.DataFrame:
    """Return rows of `_build_consumption` for an optimizer step, and task_number, mean_size, undefined, dead (whether).

    All queries about a batch read this frame, because its advantages are spread over their whole table.
    """
    advantages = NO_ADVANTAGES
    if credit is not None:
        of_update = "SELECT episode_id FROM trained_batches WHERE job_id = $job AND optimizer_step = $update"
        advantages = credit.rows_of(lake, lake.sql(of_update, {"job": job_id, "update": update})["episode_id"])
    consumed, params = _build_consumption(lake, job_id, advantages, "AND b.optimizer_step = $update")
    query = f"""
        SELECT * REPLACE (dead > 0 AS dead), TRY_CAST(task_id AS BIGINT) AS task_number,
               total_size / nullif(defined, 0) AS mean_size, nullif(credited, 0) - defined AS undefined
        FROM ({consumed})
        """
    return lake.sql(query, params | {"update": update})


def find_update_range(lake: LakeReader, job_id: int) -> tuple[int, int] | None:
    """Return the first and last optimizer step of a job with a batch; None without batches."""
    query = "SELECT min(optimizer_step), max(optimizer_step) FROM trained_batches WHERE job_id = ?"
    first, last = lake.sql(query, [job_id]).row(0)
    return None if first is None else (int(first), int(last))


def list_jobs_with_update(lake: LakeReader, update: int) -> list[int]:
    """Return the training jobs with a batch of an optimizer step, the newest first."""
    query = """
        SELECT job_id FROM job_runs WHERE job_id IN (SELECT job_id FROM trained_batches WHERE optimizer_step = ?)
        ORDER BY started_at DESC, job_id
        """
    return lake.sql(query, [update])["job_id"].to_list()


CHECKPOINTS = 200
"""Largest number of listed checkpoints of a job."""


def read_checkpoints(lake: LakeReader, job_id: int, limit: int = CHECKPOINTS) -> pl.DataFrame:
    """Return the checkpoints of a job, the last first.

    optimizer_step, attempt, policy_version, at, uri, sha256; total is the number of checkpoints.
    """
    query = """
        SELECT optimizer_step, attempt, policy_version, "at", uri, sha256, count(*) OVER () AS total FROM checkpoints
        WHERE job_id = ? ORDER BY optimizer_step DESC, attempt DESC LIMIT ?
        """
    return lake.sql(query, [job_id, limit])


def count_updates_per_point(lake: LakeReader, job_id: int) -> int:
    """Return the number of updates that a point of `read_metrics` averages."""
    query = "SELECT max(step) - min(step) + 1 FROM run_metrics WHERE job_id = ?"
    return max(1, -(-(lake.sql(query, [job_id]).item() or 1) // POINTS))


def read_metrics_at(lake: LakeReader, job_id: int, step: int) -> Row:
    """Return the metrics of a job at one step, by name."""
    rows = lake.sql("SELECT name, value FROM run_metrics WHERE job_id = ? AND step = ? ORDER BY name", [job_id, step])
    return dict(rows.iter_rows())


def _build_consumption(lake: LakeReader, job_id: int, advantages: str, where: str = "") -> tuple[str, Params]:
    """Return SQL of the batch rows of a job with their episodes and the advantages of their steps, and its parameters.

    Args:
        advantages: a relation.
    """
    relation, params = outcomes.build_relation(lake, None)
    query = f"""
        SELECT b.optimizer_step, b.episode_id, b.first_step, b.last_step, b.action_tokens, e.group_id, e.run_id,
               e.task_id, e.rollout_index, e.collection_round, e.policy_version, e.status, e.outcome,
               any_value(a.job_id) AS credit_job,
               arg_min(a.a_episode, a.step_index) AS a_episode, avg(a.advantage) AS mean_advantage,
               min(a.advantage) AS lowest, max(a.advantage) AS highest, sum(abs(a.advantage)) AS total_size,
               count(a.episode_id) AS credited, count(a.advantage) AS defined,
               count(*) FILTER (a.advantage > 0) AS positive, count(*) FILTER (a.advantage < 0) AS negative,
               count(*) FILTER (list_contains(string_split(a.flags, ','), 'dead_group')) AS dead
        FROM trained_batches AS b
        LEFT JOIN {relation} AS e ON e.episode_id = b.episode_id
        LEFT JOIN {advantages} AS a
            ON a.episode_id = b.episode_id AND a.step_index BETWEEN b.first_step AND b.last_step
        WHERE b.job_id = $job {where}
        GROUP BY ALL
        """
    return query, params | {"job": job_id}


def look_up_credit(lake: LakeReader, text: str | None = None, before: int | None = None) -> Credit | None:
    """Return the credit that a text names (None: the current one); None if there is no such credit.

    Args:
        before: a version of `jobs`; only earlier jobs count.
    """
    try:
        return find_credit(lake, text, before=before)
    except (UsageError, DataRefusedError):
        return None


def find_covering_jobs(
    lake: LakeReader, credit: Credit, *, episode_id: int | None = None, group_id: int | None = None
) -> pl.DataFrame:
    """Return the jobs that computed the advantages of an episode or group: job_id, ended_at, only (their filter)."""
    rows, condition = credit.rows, f"group_id = {group_id}"
    if episode_id is not None:
        rows, condition = credit.rows_of(lake, [episode_id]), f"episode_id = {episode_id}"
    query = f"""
        SELECT job_id, ended_at, json_extract_string(parameters, '$.only') AS only FROM job_runs
        WHERE job_id IN (SELECT DISTINCT job_id FROM {rows} WHERE {condition}) ORDER BY ended_at DESC, job_id LIMIT 3
        """
    return lake.sql(query)


def read_advantages(lake: LakeReader, episode_id: int, credit: Credit) -> pl.DataFrame:
    """Return the advantages of an episode by step: step_index and the columns of `advantages`."""
    query = f"""
        SELECT step_index, group_id, defined, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
               anchor_size, anchor_episodes, flags
        FROM {credit.rows_of(lake, [episode_id])} ORDER BY step_index
        """
    return lake.sql(query)


def summarise_credit(lake: LakeReader, job_id: int) -> Row:
    """Return figures of the advantages that a credit job computed.

    undefined counts NULL, judged_groups the groups with two or more scored siblings, and shared the steps whose anchor
    holds two or more episodes. mean_size is the mean |advantage|.
    """
    query = """
        SELECT count(*) AS steps, count(*) FILTER (NOT defined) AS undefined,
               count(*) FILTER (advantage > 0) AS positive, count(*) FILTER (advantage < 0) AS negative,
               count(*) FILTER (advantage = 0) AS zero, count(DISTINCT group_id) AS groups,
               count(DISTINCT group_id) FILTER (list_contains(string_split(flags, ','), 'dead_group')) AS dead_groups,
               count(DISTINCT group_id) FILTER (group_size > 1) AS judged_groups,
               count(*) FILTER (anchor_episodes > 1) AS shared, avg(abs(advantage)) AS mean_size
        FROM advantages WHERE job_id = $job
        """
    return lake.sql(query, {"job": job_id}).row(0, named=True)


_NOTES = """
    noted AS (
        SELECT step AS round, max(value) FILTER (name = 'loop/return') AS mean_return,
               max(value) FILTER (name = 'loop/score') AS mean_score,
               max(value) FILTER (name = 'loop/carried') AS carried,
               max(value) FILTER (name = 'loop/episodes') AS episodes,
               max(value) FILTER (name = 'loop/failed') AS failed,
               max(value) FILTER (name = 'loop/tokens') AS tokens,
               max(value) FILTER (name = 'loop/seconds') AS seconds,
               max(value) FILTER (name = 'loop/live_groups') AS live_groups,
               max(value) FILTER (name = 'loop/dead_groups') AS dead_groups
        FROM run_metrics WHERE job_id = $loop GROUP BY step HAVING count(*) FILTER (name = 'loop/seconds') > 0
    )
    """
# The updates of a round lie between two checkpoints. A round without updates has no checkpoint.
_ROUNDS = f"""
    {_NOTES},
    saved AS (
        SELECT policy_version - 1 AS round, max(optimizer_step) AS until
        FROM checkpoints WHERE job_id = $train GROUP BY policy_version
    ),
    spans AS (SELECT round, coalesce(lag(until) OVER (ORDER BY round), 0) AS first_update, until FROM saved),
    trained AS (
        SELECT s.round, any_value(s.first_update) AS first_update, any_value(s.until - s.first_update) AS updates,
               avg(m.value) FILTER (m.name = 'entropy') AS entropy, avg(m.value) FILTER (m.name = 'kl_k3') AS kl,
               1 - avg(m.value) FILTER (m.name = 'staleness_0') AS stale
        FROM spans AS s LEFT JOIN run_metrics AS m
            ON m.job_id = $train AND m.step >= s.first_update AND m.step < s.until
            AND m.name IN ('entropy', 'kl_k3', 'staleness_0')
        GROUP BY s.round
    ),
    pushed AS (
        SELECT step AS round, max(value) FILTER (name = 'sync/logprob_diff_max') AS parity,
               max(value) FILTER (name = 'sync/seconds') AS push_seconds
        FROM run_metrics WHERE kind = 'push' AND run_id = $run GROUP BY step
    ),
    rounds AS (
        SELECT n.*, live_groups / nullif(live_groups + dead_groups, 0) AS live_share,
               failed / nullif(episodes, 0) AS failed_share,
               sum(tokens) OVER (ORDER BY round) AS tokens_so_far, first_update, updates, entropy, kl, stale, parity,
               push_seconds
        FROM noted AS n LEFT JOIN trained USING (round) LEFT JOIN pushed USING (round)
    )
    """


@dataclass(frozen=True, slots=True)
class Loop:
    """An online run, as its job records it."""

    job_id: int
    train_job: int
    run: str
    status: str
    """started (running, or killed), succeeded or failed."""
    error: str | None
    settings: dict[str, Any] = field(hash=False)
    """Settings of [loop]."""
    counts: dict[str, Any] = field(hash=False)
    """Results after its end: rounds, stopped_by, best_version."""

    @property
    def planned(self) -> int | None:
        """Number of planned rounds; None if the settings do not say."""
        rounds = 0 if self.settings.get("mode") == "sft" else self.settings.get("rounds")
        return rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else None

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """Settings of [loop.evaluation]; None without evaluations."""
        evaluation = self.settings.get("evaluation")
        return evaluation if isinstance(evaluation, dict) else None

    @property
    def score(self) -> str:
        """The score of its advantages: env_return, or a scorer or reward."""
        credit = self.settings.get("credit")
        return str(credit.get("score") or ENV_RETURN).partition("@")[0] if isinstance(credit, dict) else ENV_RETURN

    @property
    def params(self) -> Params:
        """Values of $loop, $train and $run."""
        return {"loop": self.job_id, "train": self.train_job, "run": self.run}


@dataclass(frozen=True, slots=True)
class LoopActivity:
    """A current activity of an online run."""

    phase: str
    """collecting, evaluating, scoring, computing advantages or training."""
    number: int
    """Of the round, or of the evaluation, counted from 0."""
    done: int | None = None
    """Episodes in the lake."""
    planned: int | None = None
    """Planned episodes."""


def find_loop(lake: LakeReader, job_id: int) -> Loop | None:
    """Return the online run of a `loop` or `train` job; None for another job."""
    query = f"""
        SELECT job_id, json_extract_string(parameters, '$.train_job') AS train_job, run_id, status, error,
               json_extract(parameters, '$.loop')::VARCHAR AS settings, counts
        FROM job_runs
        WHERE kind = '{LOOP}' AND (job_id = $job OR json_extract_string(parameters, '$.train_job') = id_text($job))
        """
    row = get_first_row(lake.sql(query, {"job": job_id}))
    if row is None or not ids.is_text(row["train_job"] or ""):
        return None
    settings, counts = (parse_json_object(row.pop(name)) for name in ("settings", "counts"))
    run, train_job = str(row.pop("run_id")), ids.from_text(row.pop("train_job"))
    return Loop(run=run, train_job=train_job, settings=settings, counts=counts, **row)


def read_rounds(lake: LakeReader, loop: Loop, window: ListWindow) -> pl.DataFrame:
    """Return a page of the trained rounds, the newest first; unknown values are NULL.

    stale is the share of trained tokens from an older version. parity is the largest difference in nats between the
    log-probabilities of an engine and the trainer.
    """
    query = f"WITH {_ROUNDS} SELECT * FROM rounds ORDER BY round DESC LIMIT $limit OFFSET $offset"
    return lake.sql(query, loop.params | window.params())


def read_round(lake: LakeReader, loop: Loop, number: int) -> pl.DataFrame:
    """Return a round as in `read_rounds`; no row if it was not trained."""
    return lake.sql(f"WITH {_ROUNDS} SELECT * FROM rounds WHERE round = $round", loop.params | {"round": number})


def sum_rounds(lake: LakeReader, loop: Loop) -> dict[str, float]:
    """Return sums over the trained rounds: rounds, episodes, tokens, seconds, and the longest round in seconds."""
    query = f"""
        WITH {_NOTES}
        SELECT count(*) AS rounds, coalesce(sum(episodes), 0) AS episodes, coalesce(sum(tokens), 0) AS tokens,
               coalesce(sum(seconds), 0) AS seconds, coalesce(max(seconds), 0) AS longest FROM noted
        """
    return lake.sql(query, {"loop": loop.job_id}).row(0, named=True)


def read_round_curves(lake: LakeReader, loop: Loop) -> pl.DataFrame:
    """Return the rounds in order as at most `POINTS` points, each the mean of its rounds up to `last`.

    first_update is the first update of the point; NULL without updates.
    """
    query = f"""
        WITH {_ROUNDS},
        span AS (
            SELECT min(round) AS first, greatest(1, ceil((max(round) - min(round) + 1) / {POINTS}))::BIGINT AS width
            FROM rounds
        )
        SELECT first + (round - first) // width * width AS round, max(round) AS last, sum(episodes) AS episodes,
               arg_min(first_update, round) FILTER (updates > 0) AS first_update,
               avg(mean_return) AS mean_return, avg(mean_score) AS mean_score, avg(live_share) AS live_share,
               avg(failed_share) AS failed_share, avg(tokens) AS tokens,
               avg(seconds) AS seconds, avg(entropy) AS entropy, avg(kl) AS kl, avg(stale) AS stale,
               max(parity) AS parity, max(tokens_so_far) AS tokens_so_far
        FROM rounds, span GROUP BY ALL ORDER BY round
        """
    return lake.sql(query, loop.params)


def read_evaluations(lake: LakeReader, loop: Loop) -> pl.DataFrame:
    """Return the complete evaluations by version, at most about `POINTS`.

    version, tokens (collected before it), success with its 95 % interval over tasks (low, high), score (the mean),
    episodes (scored attempts), unscored. success, score and the interval are NULL without scores.
    """
    config = loop.evaluation
    if config is None:
        return pl.DataFrame(schema=_EVALUATIONS | {"tokens": pl.Float64})
    run = name_evaluation_run(loop.run)
    relation, params = outcomes.build_relation(lake, str(config.get("score", ENV_RETURN)), run)
    query = f"""
        WITH complete AS (
            SELECT DISTINCT json_extract(parameters, '$.plan.round')::BIGINT AS number
            FROM job_runs WHERE kind = 'collect' AND run_id = $run AND status = 'succeeded'
        ),
        thinned AS (
            SELECT number FROM complete
            WHERE number % (SELECT greatest(1, ceil((max(number) + 1) / {POINTS}))::BIGINT FROM complete) = 0
        ),
        tasks AS (
            SELECT policy_version AS version, count(*) AS attempts, count(outcome) AS scored, sum(outcome) AS total,
                   count(*) FILTER (outcome >= $threshold) AS hits
            FROM {relation} WHERE run_id = $run AND policy_version IS NOT NULL
                AND collection_round IN (SELECT number FROM thinned)
            GROUP BY policy_version, task_id
        )
        SELECT version, scored, hits, count(*) AS tasks, sum(attempts)::BIGINT AS attempts, sum(total) AS total
        FROM tasks GROUP BY ALL ORDER BY version
        """
    attempts = lake.sql(query, params | {"run": run, "threshold": float(config.get("threshold", 1.0))})
    rows = [_evaluate(version, tasks) for (version,), tasks in attempts.group_by("version", maintain_order=True)]
    spent = lake.sql(
        f"WITH {_NOTES} SELECT 0 AS version, 0.0 AS tokens UNION ALL "
        "SELECT round + 1, sum(tokens) OVER (ORDER BY round) FROM noted",
        {"loop": loop.job_id},
    )
    frame = pl.DataFrame(rows, schema=_EVALUATIONS, orient="row")
    return frame.join(spent.cast({"version": pl.Int64}), on="version", how="left", maintain_order="left")


def list_activities(lake: LakeReader, loop: Loop) -> list[LoopActivity]:
    """Return the current activities of a run, or its last ones if it was killed; empty while weights are synced."""
    current = int(sum_rounds(lake, loop)["rounds"])
    evaluation_run = name_evaluation_run(loop.run)
    query = """
        SELECT kind, run_id, status, json_extract(parameters, '$.plan.round')::BIGINT AS number,
               json_extract(parameters, '$.plan.tasks')::BIGINT
               * if(json_extract_string(parameters, '$.limits.keep') = 'first',
                    json_extract(parameters, '$.plan.group_size')::BIGINT,
                    json_extract(parameters, '$.plan.siblings')::BIGINT) AS planned
        FROM job_runs
        WHERE (kind = 'collect' AND run_id IN ($run, $evaluations))
           OR (kind IN ('score', 'reward', 'credit')
               -- A round with carried-over rollouts names its episodes after this prefix.
               AND starts_with(coalesce(json_extract_string(parameters, '$.only'),
                                        json_extract_string(parameters, '$.where')) || ' ', $of_round || ' '))
        QUALIFY row_number() OVER (PARTITION BY kind, run_id ORDER BY number DESC NULLS LAST, started_at DESC) = 1
        """
    params = {"run": loop.run, "evaluations": evaluation_run, "of_round": round_predicate(loop.run, current)}
    jobs = {(row["kind"], row["run_id"]): row for row in lake.sql(query, params).iter_rows(named=True)}
    activities = []
    for run, phase in ((evaluation_run, "evaluating"), (loop.run, "collecting")):
        job = jobs.get(("collect", run))
        if job is not None and job["status"] == "started":
            episodes = "SELECT count(*) FROM episodes WHERE run_id = ? AND collection_round = ?"
            done = int(lake.sql(episodes, [run, job["number"]]).item())
            activities.append(LoopActivity(phase, job["number"], done, job["planned"]))
    collected = jobs.get(("collect", loop.run))
    is_collected = collected is not None and (
        collected["number"] > current or (collected["number"] == current and collected["status"] == "succeeded")
    )
    if is_collected and not any(activity.phase == "evaluating" for activity in activities):
        open_kinds = {kind for (kind, _), job in jobs.items() if job["status"] == "started" and kind != "collect"}
        phase = "computing advantages" if "credit" in open_kinds else "scoring" if open_kinds else "training"
        activities.insert(0, LoopActivity(phase, current))
    return activities


def find_last_write(lake: LakeReader, loop: Loop) -> datetime:
    """Return the time of the run's last row."""
    query = """
        SELECT max("at") FROM (
            SELECT max("at") AS "at" FROM jobs WHERE run_id IN ($run, $evaluations) OR job_id IN ($loop, $train)
            UNION ALL SELECT max("at") FROM metrics WHERE job_id IN ($loop, $train)
            UNION ALL SELECT max("at") FROM checkpoints WHERE job_id = $train
        )
        """
    last_write: datetime = lake.sql(query, loop.params | {"evaluations": name_evaluation_run(loop.run)}).item()
    return last_write


_EVALUATIONS = {
    "version": pl.Int64,
    "success": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "score": pl.Float64,
    "episodes": pl.Int64,
    "unscored": pl.Int64,
}


def _evaluate(version: object, tasks: pl.DataFrame) -> tuple[object, ...]:
    """Return a row of `read_evaluations` from counts of tasks by scored and successful attempts."""
    scored, attempts = int((tasks["scored"] * tasks["tasks"]).sum()), int(tasks["attempts"].sum())
    if not scored:
        return version, None, None, None, None, 0, attempts
    scored_tasks = tasks.filter(pl.col("scored") > 0)
    success = float((scored_tasks["hits"] * scored_tasks["tasks"]).sum()) / scored
    wins_P, trials_P = (
        np.repeat(scored_tasks[name].to_numpy().astype(np.float64), scored_tasks["tasks"].to_numpy())
        for name in ("hits", "scored")
    )
    low, high = success_interval(wins_P, trials_P)
    return version, success, low, high, float(tasks["total"].sum()) / scored, scored, attempts - scored
