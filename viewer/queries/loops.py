"""Online runs (`trajlake loop`): how far they are, what they do now, and what each round came to.

Round k is played by version k of the weights, the number of rounds that were trained on; an evaluation of version k
comes before it. What the loop decided by is in the metrics of its job, a step a round.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl

from lake import ids
from lake.documents import json_object
from lake.judgements.scores import ENV_RETURN
from lake.read.online_runs import LOOP, evaluation_run, of_round
from lake.statistics.intervals import success_interval
from viewer.queries import Params, Reads, Window, only_row, outcomes
from viewer.queries.training import POINTS

_NOTED = """
    noted AS (
        SELECT step AS round, max(value) FILTER (name = 'loop/return') AS mean_return,
               max(value) FILTER (name = 'loop/score') AS mean_score,
               max(value) FILTER (name = 'loop/carried') AS carried,
               max(value) FILTER (name = 'loop/episodes') AS episodes,
               max(value) FILTER (name = 'loop/tokens') AS tokens,
               max(value) FILTER (name = 'loop/seconds') AS seconds,
               max(value) FILTER (name = 'loop/live_groups') AS live_groups,
               max(value) FILTER (name = 'loop/dead_groups') AS dead_groups
        FROM run_metrics WHERE job_id = $loop GROUP BY step HAVING count(*) FILTER (name = 'loop/seconds') > 0
    )
    """
# A round's updates are those between the checkpoint before it and its own; one that trained nothing has no checkpoint.
_ROUNDS = f"""
    {_NOTED},
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
               sum(tokens) OVER (ORDER BY round) AS tokens_so_far, first_update, updates, entropy, kl, stale, parity,
               push_seconds
        FROM noted AS n LEFT JOIN trained USING (round) LEFT JOIN pushed USING (round)
    )
    """


@dataclass(frozen=True, slots=True)
class Loop:
    """An online run, as its job tells it."""

    job_id: int
    train_job: int
    run: str
    status: str
    """started (running, or killed), succeeded or failed."""
    error: str | None
    settings: dict[str, Any]
    """The part [loop] of its document."""
    counts: dict[str, Any]
    """What it came to, once it ended: rounds, stopped_by, best_version."""

    @property
    def planned(self) -> int | None:
        """Rounds it is to have; None if it does not say."""
        return 0 if self.settings.get("mode") == "sft" else _whole(self.settings.get("rounds"))

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The part [loop.evaluation]; None without evaluations."""
        found = self.settings.get("evaluation")
        return found if isinstance(found, dict) else None

    @property
    def score(self) -> str:
        """The score that its advantages come from: env_return, or a scorer or reward."""
        found = self.settings.get("credit")
        return str(found.get("score") or ENV_RETURN).partition("@")[0] if isinstance(found, dict) else ENV_RETURN

    @property
    def params(self) -> Params:
        """Values of $loop, $train and $run."""
        return {"loop": self.job_id, "train": self.train_job, "run": self.run}


@dataclass(frozen=True, slots=True)
class Doing:
    """Something that an online run does now."""

    what: str
    """collecting, evaluating, scoring, computing advantages or training."""
    number: int
    """Of the round; of an evaluation its own, counted from 0."""
    done: int | None = None
    """Episodes that are in the lake."""
    planned: int | None = None
    """Episodes that are to come into it."""


def loop_of(lake: Reads, job_id: int) -> Loop | None:
    """The online run that a job belongs to: its `loop` job or its `train` job. None of another job."""
    query = f"""
        SELECT job_id, json_extract_string(parameters, '$.train_job') AS train_job, run_id, status, error,
               json_extract(parameters, '$.loop')::VARCHAR AS settings, counts
        FROM job_runs
        WHERE kind = '{LOOP}' AND (job_id = $job OR json_extract_string(parameters, '$.train_job') = id_text($job))
        """
    row = only_row(lake.sql(query, {"job": job_id}))
    if row is None or not ids.is_text(row["train_job"] or ""):
        return None
    settings, counts = (json_object(row.pop(name)) for name in ("settings", "counts"))
    run, train_job = str(row.pop("run_id")), ids.from_text(row.pop("train_job"))
    return Loop(run=run, train_job=train_job, settings=settings, counts=counts, **row)


def rounds(lake: Reads, loop: Loop, window: Window) -> pl.DataFrame:
    """A page of the rounds that were trained on, the newest first; what is not known is NULL.

    stale is the share of trained tokens that an older version sampled, parity the largest difference in nats between
    the log-probabilities of an engine and the trainer.
    """
    query = f"WITH {_ROUNDS} SELECT * FROM rounds ORDER BY round DESC LIMIT $limit OFFSET $offset"
    return lake.sql(query, loop.params | window.params())


def one_round(lake: Reads, loop: Loop, number: int) -> pl.DataFrame:
    """A round as `rounds` has it; no row if it was not trained on."""
    return lake.sql(f"WITH {_ROUNDS} SELECT * FROM rounds WHERE round = $round", loop.params | {"round": number})


def sums(lake: Reads, loop: Loop) -> dict[str, float]:
    """Of the rounds that were trained on: rounds, episodes, tokens, seconds, and the longest round in seconds."""
    query = f"""
        WITH {_NOTED}
        SELECT count(*) AS rounds, coalesce(sum(episodes), 0) AS episodes, coalesce(sum(tokens), 0) AS tokens,
               coalesce(sum(seconds), 0) AS seconds, coalesce(max(seconds), 0) AS longest FROM noted
        """
    return lake.sql(query, {"loop": loop.job_id}).row(0, named=True)


def curves(lake: Reads, loop: Loop) -> pl.DataFrame:
    """The rounds in order, at most `POINTS`: neighbouring ones, up to `last`, are put together by their mean.

    first_update is the first of their updates; NULL if there is none.
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
               avg(tokens) AS tokens,
               avg(seconds) AS seconds, avg(entropy) AS entropy, avg(kl) AS kl, avg(stale) AS stale,
               max(parity) AS parity, max(tokens_so_far) AS tokens_so_far
        FROM rounds, span GROUP BY ALL ORDER BY round
        """
    return lake.sql(query, loop.params)


def evaluations(lake: Reads, loop: Loop) -> pl.DataFrame:
    """Evaluations that are complete, by version, at most about `POINTS`: success with its 95 % interval over tasks.

    Columns version, tokens (collected before it), success, low, high, score (the mean), episodes (scored attempts) and
    unscored. success, score and the interval are NULL where nothing is scored.
    """
    config = loop.evaluation
    if config is None:
        return pl.DataFrame(schema=_EVALUATIONS | {"tokens": pl.Float64})
    run = evaluation_run(loop.run)
    judged, params = outcomes.judged(lake, str(config.get("score", ENV_RETURN)), run)
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
            FROM {judged} WHERE run_id = $run AND policy_version IS NOT NULL
                AND collection_round IN (SELECT number FROM thinned)
            GROUP BY policy_version, task_id
        )
        SELECT version, scored, hits, count(*) AS tasks, sum(attempts)::BIGINT AS attempts, sum(total) AS total
        FROM tasks GROUP BY ALL ORDER BY version
        """
    found = lake.sql(query, params | {"run": run, "threshold": float(config.get("threshold", 1.0))})
    rows = [_evaluation(version, part) for (version,), part in found.group_by("version", maintain_order=True)]
    spent = lake.sql(
        f"WITH {_NOTED} SELECT 0 AS version, 0.0 AS tokens UNION ALL "
        "SELECT round + 1, sum(tokens) OVER (ORDER BY round) FROM noted",
        {"loop": loop.job_id},
    )
    frame = pl.DataFrame(rows, schema=_EVALUATIONS, orient="row")
    return frame.join(spent.cast({"version": pl.Int64}), on="version", how="left", maintain_order="left")


def doing(lake: Reads, loop: Loop) -> list[Doing]:
    """What the run does now, or did when it was killed; empty between two rounds, while weights are synced."""
    current = int(sums(lake, loop)["rounds"])
    evaluations_of = evaluation_run(loop.run)
    query = """
        SELECT kind, run_id, status, json_extract(parameters, '$.plan.round')::BIGINT AS number,
               json_extract(parameters, '$.plan.tasks')::BIGINT
               * if(json_extract_string(parameters, '$.limits.keep') = 'first',
                    json_extract(parameters, '$.plan.group_size')::BIGINT,
                    json_extract(parameters, '$.plan.siblings')::BIGINT) AS planned
        FROM job_runs
        WHERE (kind = 'collect' AND run_id IN ($run, $evaluations))
           OR (kind IN ('score', 'reward', 'credit')
               -- Where rollouts are carried over, the round's are named one by one.
               AND starts_with(coalesce(json_extract_string(parameters, '$.only'),
                                        json_extract_string(parameters, '$.where')) || ' ', $of_round || ' '))
        QUALIFY row_number() OVER (PARTITION BY kind, run_id ORDER BY number DESC NULLS LAST, started_at DESC) = 1
        """
    asked = {"run": loop.run, "evaluations": evaluations_of, "of_round": of_round(loop.run, current)}
    jobs = {(row["kind"], row["run_id"]): row for row in lake.sql(query, asked).iter_rows(named=True)}
    found = []
    for run, what in ((evaluations_of, "evaluating"), (loop.run, "collecting")):
        job = jobs.get(("collect", run))
        if job is not None and job["status"] == "started":
            played = "SELECT count(*) FROM episodes WHERE run_id = ? AND collection_round = ?"
            done = int(lake.sql(played, [run, job["number"]]).item())
            found.append(Doing(what, job["number"], done, job["planned"]))
    collected = jobs.get(("collect", loop.run))
    is_collected = collected is not None and (
        collected["number"] > current or (collected["number"] == current and collected["status"] == "succeeded")
    )
    if is_collected and not any(part.what == "evaluating" for part in found):
        open_kinds = {kind for (kind, _), job in jobs.items() if job["status"] == "started" and kind != "collect"}
        what = "computing advantages" if "credit" in open_kinds else "scoring" if open_kinds else "training"
        found.insert(0, Doing(what, current))
    return found


def last_sign(lake: Reads, loop: Loop) -> datetime:
    """When the run last wrote a row."""
    query = """
        SELECT max("at") FROM (
            SELECT max("at") AS "at" FROM jobs WHERE run_id IN ($run, $evaluations) OR job_id IN ($loop, $train)
            UNION ALL SELECT max("at") FROM metrics WHERE job_id IN ($loop, $train)
            UNION ALL SELECT max("at") FROM checkpoints WHERE job_id = $train
        )
        """
    found: datetime = lake.sql(query, loop.params | {"evaluations": evaluation_run(loop.run)}).item()
    return found


_EVALUATIONS = {
    "version": pl.Int64,
    "success": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "score": pl.Float64,
    "episodes": pl.Int64,
    "unscored": pl.Int64,
}


def _evaluation(version: object, tasks: pl.DataFrame) -> tuple[object, ...]:
    """A row of `evaluations`, of the numbers of tasks with so many attempts scored and successful."""
    scored, attempts = int((tasks["scored"] * tasks["tasks"]).sum()), int(tasks["attempts"].sum())
    if not scored:
        return version, None, None, None, None, 0, attempts
    known = tasks.filter(pl.col("scored") > 0)
    success = float((known["hits"] * known["tasks"]).sum()) / scored
    wins_P, trials_P = (
        np.repeat(known[name].to_numpy().astype(np.float64), known["tasks"].to_numpy()) for name in ("hits", "scored")
    )
    low, high = success_interval(wins_P, trials_P)
    return version, success, low, high, float(tasks["total"].sum()) / scored, scored, attempts - scored


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
