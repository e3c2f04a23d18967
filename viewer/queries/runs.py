"""Runs: figures of a lake, and how the outcomes of a run develop.

A success is an outcome (`lake.judgements.outcomes`; `score` chooses it) of at least the reader's threshold. Rates and
means are over scored episodes and NULL without any. Intervals are those of `trajlake eval`
(`lake.statistics.success_interval`).
"""

from typing import Literal

import numpy as np
import polars as pl

from lake.judgements import outcomes
from lake.read.training import name_evaluation_run
from lake.statistics import success_interval
from viewer.queries import LakeReader, ListWindow, Row, Sort, build_sort_terms, count, order_by

Axis = Literal["collection_round", "policy_version"]

POINTS = 400
"""Largest number of points of a curve; a longer curve merges neighbouring rounds."""

# One row per group, which is dead if two or more siblings are scored and all scored the same.
_GROUPS = """
    SELECT run_id, group_id, min(collection_round) AS collection_round, min(policy_version) AS policy_version,
           count(outcome) >= 2 AS judged, count(outcome) >= 2 AND min(outcome) = max(outcome) AS dead
    FROM {episodes} GROUP BY run_id, group_id
    """


def read_overview(lake: LakeReader, score: str | None = None) -> Row:
    """Return figures of the lake: episodes, num_runs, tasks, scored, steps, groups, judged_groups, rejects, ...

    The count of runs is not called `runs`: SQL with that word binds the view.
    """
    relation, params = outcomes.build_relation(lake, score)
    query = f"""
        SELECT * FROM (
            SELECT count(*) AS episodes, count(DISTINCT run_id) AS num_runs, count(DISTINCT task_id) AS tasks,
                   count(outcome) AS scored, coalesce(sum(num_steps), 0)::BIGINT AS steps
            FROM {relation}
        ), (
            SELECT count(*) AS groups, count(*) FILTER (judged) AS judged_groups, count(*) FILTER (dead) AS dead_groups
            FROM ({_GROUPS.format(episodes=relation)})
        ), (SELECT count(*) AS rejects FROM rejects)
        """
    return lake.sql(query, params or None).row(0, named=True)


def list_names(lake: LakeReader, limit: int = 1000) -> list[str]:
    """Return the names of at most `limit` runs in alphabetical order."""
    query = "SELECT DISTINCT run_id FROM episodes ORDER BY run_id LIMIT ?"
    return lake.sql(query, [limit])["run_id"].to_list()


def count_runs(lake: LakeReader, tag: str | None = None) -> int:
    """Count the runs with episodes, those of a tag if there is one."""
    if tag is None:
        return count(lake, "SELECT count(DISTINCT run_id) FROM episodes")
    tagged = "SELECT run_id FROM run_labels WHERE list_contains(tags, $tag)"
    return count(lake, f"SELECT count(DISTINCT run_id) FROM episodes WHERE run_id IN ({tagged})", {"tag": tag})


def read_labels(lake: LakeReader) -> pl.DataFrame:
    """Return name (NULL without another than the id) and tags of the runs that people labelled: run_id, name, tags."""
    return lake.sql("SELECT run_id, name, tags FROM run_labels ORDER BY run_id")


def read_sizes(lake: LakeReader) -> dict[str | None, int]:
    """Return the bytes of the tables' files by run; None: of no run."""
    return lake.run_sizes()


def has_episodes(lake: LakeReader, run: str) -> bool:
    """Return whether a run has episodes."""
    return bool(lake.sql("SELECT EXISTS (SELECT 1 FROM episodes WHERE run_id = ?)", [run]).item())


_RUNS = """
    SELECT e.run_id, any_value(e.environment) AS environment, any_value(e.policy) AS policy,
           count(*) AS episodes, count(e.outcome) AS scored, count(DISTINCT e.task_id) AS tasks,
           any_value(g.groups) AS groups, avg((e.outcome >= $success_at)::INT) AS success,
           avg(e.outcome) AS mean_return, avg(e.num_steps) AS mean_steps, any_value(g.dead_share) AS dead_share,
           count(DISTINCT e.collection_round) AS rounds, any_value(f.name) AS name, any_value(f.note) AS note,
           any_value(f.tags) AS tags, any_value(f.last_at) AS last_at, any_value(f.estimator) AS estimator,
           any_value(f.loss) AS loss, any_value(f.learning_rate) AS learning_rate
    FROM {judged} AS e
    JOIN (
        SELECT run_id, count(*) AS groups, avg(dead::INT) FILTER (judged) AS dead_share FROM ({groups}) GROUP BY run_id
    ) AS g USING (run_id)
    LEFT JOIN run_facts AS f USING (run_id)
    """
ORDERS = build_sort_terms(
    *("run_id", "environment", "policy", "episodes", "tasks", "rounds"),
    *("success", "mean_return", "mean_steps", "dead_share", "name", "last_at", "estimator", "loss", "learning_rate"),
)
"""Columns that may order runs."""


def read_page(
    lake: LakeReader,
    success_at: float,
    window: ListWindow,
    score: str | None = None,
    sort: Sort | None = None,
    tag: str | None = None,
) -> pl.DataFrame:
    """Return a page of the runs, those of a tag if there is one, by default the last active first.

    Figures of episodes, and the columns of the view `run_facts` that people list: name, note, tags, last_at, ...
    """
    relation, params = outcomes.build_relation(lake, score)
    query = f"""
        {_RUNS.format(judged=relation, groups=_GROUPS.format(episodes=relation))}
        WHERE $tag IS NULL OR list_contains(f.tags, $tag)
        GROUP BY e.run_id ORDER BY {order_by(sort, ORDERS, "max(f.last_at) DESC NULLS LAST, e.run_id")}
        LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | {"success_at": success_at, "tag": tag} | window.params())


def read_run(lake: LakeReader, name: str, success_at: float, score: str | None = None) -> Row:
    """Return the row of one run, as in `read_page`."""
    relation, params = outcomes.build_relation(lake, score, name)
    mine = f"(SELECT * FROM {relation} WHERE run_id = $run)"
    query = f"{_RUNS.format(judged=mine, groups=_GROUPS.format(episodes=mine))} GROUP BY e.run_id"
    return lake.sql(query, params | {"success_at": success_at, "run": name}).row(0, named=True)


TRAINED = 50
"""Largest number of listed runs without episodes."""


def list_runs_without_episodes(lake: LakeReader, limit: int = TRAINED) -> pl.DataFrame:
    """Return the trained runs without episodes, the newest first: run_id, job_id, parameters, status, ...

    The job is the newest training job of the run. updates counts updates with a batch; total is the number of runs.
    """
    query = """
        SELECT *, count(*) OVER () AS total FROM (
        SELECT r.run_id, r.job_id, r.kind, r.parameters, r.status, r.started_at, coalesce(b.updates, 0) AS updates
        FROM job_runs AS r
        LEFT JOIN (
            SELECT job_id, count(DISTINCT optimizer_step) AS updates FROM trained_batches GROUP BY job_id
        ) AS b USING (job_id)
        WHERE r.kind = 'train' AND r.run_id IS NOT NULL AND r.run_id NOT IN (SELECT run_id FROM episodes)
        QUALIFY row_number() OVER (PARTITION BY r.run_id ORDER BY r.started_at DESC, r.job_id) = 1
        ) ORDER BY started_at DESC, job_id LIMIT ?
        """
    return lake.sql(query, [limit])


def find_trained_evaluation_tasks(lake: LakeReader, run: str) -> Row:
    """Count the tasks of a run's evaluation episodes, and those that training jobs consumed: evaluated, trained, ...

    Evaluation episodes are those of a split other than train, and those of the evaluations of a run (`RUN-eval`). A
    task is trained on if an episode of its environment and name is in a batch. tasks and trainers name a few of them.
    """
    query = """
        WITH evaluated AS (
            SELECT DISTINCT coalesce(environment, '') AS environment, task_id FROM episodes
            WHERE run_id IN ($run, $run || $suffix) AND (
                lower(split) NOT IN ('train', 'training') OR run_id IN (SELECT run_id || $suffix FROM job_runs)
            )
        ),
        trained AS (
            SELECT DISTINCT v.environment, v.task_id, coalesce(r.run_id, 'a job of no run') AS trainer,
                   true AS is_trained
            FROM evaluated AS v JOIN episodes AS e
            ON e.task_id = v.task_id AND coalesce(e.environment, '') = v.environment
            JOIN trained_batches AS b USING (episode_id) JOIN job_runs AS r ON r.job_id = b.job_id
        )
        SELECT count(DISTINCT (environment, task_id)) AS evaluated,
               count(DISTINCT (environment, task_id)) FILTER (is_trained) AS trained,
               list_sort(list_distinct(list(task_id) FILTER (is_trained)))[:5] AS tasks,
               list_sort(list_distinct(list(trainer) FILTER (is_trained)))[:5] AS trainers
        FROM evaluated LEFT JOIN trained USING (environment, task_id)
        """
    return lake.sql(query, {"run": run, "suffix": name_evaluation_run("")}).row(0, named=True)


def list_axes(lake: LakeReader, run: str) -> list[Axis]:
    """Return the axes along which a run has several values, the most useful first."""
    query = """
        SELECT count(DISTINCT collection_round) AS collection_round, count(DISTINCT policy_version) AS policy_version
        FROM episodes WHERE run_id = ?
        """
    counts = lake.sql(query, [run]).row(0, named=True)
    axes: list[Axis] = ["collection_round", "policy_version"]
    return [axis for axis in axes if counts[axis] > 1]


def read_curve(lake: LakeReader, run: str, axis: Axis, success_at: float, score: str | None = None) -> pl.DataFrame:
    """Return outcomes of a run along an axis, in order of x; x and last are the ends of at most `POINTS` points.

    low and high are the interval of success. sd_return is the sample deviation, NULL of one episode. mean_tokens are
    completion tokens of the episodes that record them.
    """
    relation, params = outcomes.build_relation(lake, score, run)
    query = f"""
        WITH span AS (
            SELECT min({axis}) AS first, greatest(1, ceil((max({axis}) - min({axis}) + 1) / {POINTS}))::BIGINT AS width
            FROM episodes WHERE run_id = $run
        ),
        points AS (
            SELECT first + ({axis} - first) // width * width AS x, count(*) AS episodes, count(outcome) AS scored,
                   avg((outcome >= $success_at)::INT) AS success, avg(outcome) AS mean_return,
                   stddev_samp(outcome) AS sd_return, avg(num_steps) AS mean_steps,
                   avg(completion_tokens) AS mean_tokens, avg((status = 'truncated')::INT) AS truncated_share,
                   avg((status = 'failed')::INT) AS failed_share
            FROM {relation}, span WHERE run_id = $run AND {axis} IS NOT NULL GROUP BY x
        ),
        groups AS (
            SELECT first + ({axis} - first) // width * width AS x, avg(dead::INT) FILTER (judged) AS dead_share
            FROM ({_GROUPS.format(episodes=relation)}), span WHERE run_id = $run AND {axis} IS NOT NULL GROUP BY x
        )
        SELECT x, x + width - 1 AS last, episodes, scored, success,
               mean_return, sd_return, mean_steps, mean_tokens, truncated_share, failed_share, dead_share
        FROM points LEFT JOIN groups USING (x), span ORDER BY x
        """
    points = lake.sql(query, params | {"run": run, "success_at": success_at})
    intervals = _read_intervals(lake, run, axis, success_at, score)
    columns = [*points.columns[:5], "low", "high", *points.columns[5:]]
    return points.join(intervals, on="x", how="left", maintain_order="left").select(columns)


def _read_intervals(lake: LakeReader, run: str, axis: Axis, success_at: float, score: str | None) -> pl.DataFrame:
    """Return x, low and high for the points of `read_curve` with a scored episode: intervals over tasks."""
    relation, params = outcomes.build_relation(lake, score, run)
    query = f"""
        WITH span AS (
            SELECT min({axis}) AS first, greatest(1, ceil((max({axis}) - min({axis}) + 1) / {POINTS}))::BIGINT AS width
            FROM episodes WHERE run_id = $run
        ),
        tasks AS (
            SELECT first + ({axis} - first) // width * width AS x, count(outcome) AS trials,
                   count(*) FILTER (outcome >= $success_at) AS wins
            FROM {relation}, span WHERE run_id = $run AND {axis} IS NOT NULL GROUP BY x, environment, task_id
        )
        SELECT x, trials, wins, count(*) AS tasks FROM tasks WHERE trials > 0 GROUP BY ALL ORDER BY ALL
        """
    alike = lake.sql(query, params | {"run": run, "success_at": success_at})
    rows = []
    for (x,), tasks in alike.group_by("x", maintain_order=True):
        tasks_P = tasks["tasks"].to_numpy()
        wins_P, trials_P = (
            np.repeat(tasks[name].to_numpy().astype(np.float64), tasks_P) for name in ("wins", "trials")
        )
        rows.append((x, *success_interval(wins_P, trials_P)))
    schema = {"x": alike.schema["x"], "low": pl.Float64(), "high": pl.Float64()}
    return pl.DataFrame(rows, schema=schema, orient="row")


_HARDEST = "success NULLS LAST, mean_return, TRY_CAST(task_id AS BIGINT) NULLS LAST, task_id"
TASK_ORDERS = build_sort_terms("episodes", "scored", "success", "mean_return") | {
    "task_id": ("TRY_CAST(task_id AS BIGINT)", "task_id")
}
"""Columns that may order tasks."""


def read_tasks(
    lake: LakeReader,
    run: str,
    success_at: float,
    window: ListWindow,
    score: str | None = None,
    sort: Sort | None = None,
) -> pl.DataFrame:
    """Return a page of a run's tasks, by default the least successful first.

    task_id, episodes, scored, success, mean_return.
    """
    relation, params = outcomes.build_relation(lake, score, run)
    query = f"""
        SELECT task_id, count(*) AS episodes, count(outcome) AS scored,
               avg((outcome >= $success_at)::INT) AS success, avg(outcome) AS mean_return
        FROM {relation} WHERE run_id = $run GROUP BY task_id
        ORDER BY {order_by(sort, TASK_ORDERS, _HARDEST)}
        LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | {"run": run, "success_at": success_at} | window.params())


def count_tasks_by_success(lake: LakeReader, run: str, success_at: float, score: str | None = None) -> pl.DataFrame:
    """Count a run's tasks by success (rounded to a twentieth; NULL: unscored), in order: success, tasks."""
    relation, params = outcomes.build_relation(lake, score, run)
    query = f"""
        SELECT round(success * 20) / 20 AS success, count(*) AS tasks FROM (
            SELECT task_id, avg((outcome >= $success_at)::INT) AS success
            FROM {relation} WHERE run_id = $run GROUP BY task_id
        ) GROUP BY ALL ORDER BY success NULLS FIRST
        """
    return lake.sql(query, params | {"run": run, "success_at": success_at})
