"""Success rates of runs or policies, with intervals and paired comparisons.

An attempt succeeds if its score reaches a threshold. Success is a share of attempts; pass@k, pass^k and the mean score
are means over tasks. Intervals treat the tasks as a sample. Two names are compared task by task on the tasks that both
attempted (`lake.statistics`).

An attempt is an episode that was started from the task. An episode that came out of another one (a sub-agent, a fork, a
continuation) is not an attempt. The score is the return that the environment reported, or a scorer's value. An unknown
score stays NULL and is counted separately.

pass@k: at least one of k attempts succeeds. Unbiased from n >= k attempts (Chen et al. 2021, arXiv 2107.03374):

    pass@k = 1 - C(n - c, k) / C(n, k)

pass^k: all of k attempts succeed (tau-bench: Yao et al. 2024, arXiv 2406.12045):

    pass^k = C(c, k) / C(n, k)

Both are averaged over the tasks with at least k attempts.
"""

from collections.abc import Sequence
from math import comb

import numpy as np
import polars as pl

from lake.errors import DataRefusedError, UsageError
from lake.judgements.credit import find_score
from lake.judgements.scores import ENV_RETURN, is_success, read_episode_scores
from lake.read.snapshot import Snapshot
from lake.statistics import Comparison, compare_paired, share_interval, spread_of_mean, success_interval
from trainer.data.selection import select_episodes

BY = ("run_id", "policy_version", "policy")
"""Valid columns to group rollouts by."""
_LABELS = {
    "run_id": "run_id",
    "policy": "coalesce(policy, '-')",
    "policy_version": "coalesce(policy, '-') || '@' || coalesce(policy_version::VARCHAR, '-')",
}
_EPISODES = """
SELECT
    episode_id,
    {label} AS name,
    coalesce(environment, '') || '/' || task_id AS task,
    env_return AS score,
    coalesce(relation IN ('subagent', 'fork', 'continuation'), false) AS nested
FROM episodes
ORDER BY name, task, rollout_index, attempt, episode_id
"""


def read_attempts(snapshot: Snapshot, *, by: str, score: str | None = None, where: str | None = None) -> pl.DataFrame:
    """Read attempts with their scores.

    Args:
        by: run_id, policy_version (policy and version, as NAME@VERSION) or policy.
        score: env_return, or a scorer as NAME (its current version) or NAME@VERSION; None uses the current credit's
            score, or env_return without credit (`lake.judgements.credit.find_score`).

    Returns:
        One row per episode: episode_id, name (its group by `by`), task (environment/task_id), score (float64, NULL if
        unknown), nested (it came out of another episode).

    Raises:
        UsageError: an invalid predicate, or a scorer that scored no episode.
        DataRefusedError: no episode matches.
    """
    selection = select_episodes(snapshot, where)
    rows = snapshot.sql(_EPISODES.replace("{label}", _LABELS[by]))
    rows = rows.join(selection, on="episode_id", how="semi", maintain_order="left")
    score = find_score(snapshot).name if score is None else score
    if score == ENV_RETURN:
        return rows
    return rows.drop("score").join(
        read_episode_scores(snapshot, score), on="episode_id", how="left", maintain_order="left"
    )


def compute_pass_at_k(attempts: int, successes: int, k: int) -> float | None:
    """Return the probability that one of k attempts succeeds; None for fewer than k attempts."""
    return None if attempts < k else 1.0 - comb(attempts - successes, k) / comb(attempts, k)


def compute_pass_all_k(attempts: int, successes: int, k: int) -> float | None:
    """Return the probability that all of k attempts succeed; None for fewer than k attempts."""
    return None if attempts < k else comb(successes, k) / comb(attempts, k)


ROWS = pl.Schema(
    {
        "name": pl.String(),
        "measure": pl.String(),
        "value": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "tasks": pl.Int64(),
        "attempts": pl.Int64(),
        "unscored": pl.Int64(),
    }
)
"""One row per name and measure: value with its 95 % interval, the number of tasks and scored attempts behind it, and of
attempts without a score, which no other column counts."""


def compute_success(attempts: pl.DataFrame, *, threshold: float = 1.0, ks: Sequence[int] = (1,)) -> pl.DataFrame:
    """Return success, mean score, pass@k and pass^k of every name: rows of `ROWS`, without nested episodes.

    A score of at least `threshold` is a success. value is NULL where no attempt has a score.
    """
    rows: list[tuple[object, ...]] = []
    for (name,), part in attempts.filter(~pl.col("nested")).group_by("name", maintain_order=True):
        tasks = summarise_tasks(part, threshold)
        unscored = part["score"].null_count()
        scored = int(tasks["attempts"].sum())
        for measure, value, interval, task_count in summarise_measures(tasks, ks):
            low, high = (None, None) if interval is None else interval
            rows.append((name, measure, value, low, high, task_count, scored, unscored))
    return pl.DataFrame(rows, schema=ROWS, orient="row")


def summarise_tasks(attempts: pl.DataFrame, threshold: float) -> pl.DataFrame:
    """Return task, attempts, successes and score (the mean) over scored attempts, sorted by task."""
    return (
        attempts.filter(pl.col("score").is_not_null())
        .group_by("task")
        .agg(
            attempts=pl.len().cast(pl.Int64),
            successes=is_success(pl.col("score"), threshold).sum().cast(pl.Int64),
            score=pl.col("score").mean(),
        )
        .sort("task")
    )


def compute_measure(tasks: pl.DataFrame, measure: str) -> list[float | None]:
    """Return `score`, `pass@K` or `pass^K` of each task; None where the task has too few attempts."""
    if measure == "score":
        return tasks["score"].to_list()
    function = compute_pass_at_k if measure.startswith("pass@") else compute_pass_all_k
    k = int(measure[5:])
    return [function(n, c, k) for n, c in tasks.select("attempts", "successes").iter_rows()]


def list_measures(ks: Sequence[int]) -> list[str]:
    """Return the names of the measures by task, without pass^1, which equals pass@1."""
    return ["score", *(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks if k > 1)]


MeasureSummary = tuple[str, float | None, tuple[float, float] | None, int]
"""(measure, value, 95 % interval, number of tasks)."""


def summarise_measures(tasks: pl.DataFrame, ks: Sequence[int]) -> list[MeasureSummary]:
    """Summarise each measure over tasks."""
    if not tasks.height:
        return [(measure, None, None, 0) for measure in ("success", *list_measures(ks))]
    trials_P, wins_P = (tasks[name].to_numpy().astype(np.float64) for name in ("attempts", "successes"))
    attempts, share = int(trials_P.sum()), float(wins_P.sum() / trials_P.sum())
    summaries: list[MeasureSummary] = [("success", share, success_interval(wins_P, trials_P), tasks.height)]
    for measure in list_measures(ks):
        known_P = np.array([value for value in compute_measure(tasks, measure) if value is not None], np.float64)
        if not len(known_P):
            summaries.append((measure, None, None, 0))
            continue
        interval, spread = None, spread_of_mean(known_P)
        if spread is not None:
            bounded = measure != "score"
            interval = share_interval(spread, len(known_P), attempts) if bounded else spread.interval()
        summaries.append((measure, float(known_P.mean()), interval, len(known_P)))
    return summaries


def compare_names(
    attempts: pl.DataFrame, *, name: str, baseline: str, threshold: float = 1.0, ks: Sequence[int] = (1,), seed: int = 0
) -> pl.DataFrame:
    """Compare two names, measure by measure, on the tasks that both attempted.

    Returns measure, value (of `name`), against (of `baseline`), difference, its 95 % interval low and high, p
    (two-sided permutation test), test (exact or sampled), tasks (shared ones where both have the measure).

    Raises:
        UsageError: a name without attempts.
        DataRefusedError: no shared task with scores.
    """
    plain = attempts.filter(~pl.col("nested"))
    names = plain["name"].unique().sort().to_list()
    for compared_name in (name, baseline):
        if compared_name not in names:
            raise UsageError(f"there is no {compared_name!r} to compare; valid: {', '.join(map(str, names))}")
    name_tasks, baseline_tasks = (
        summarise_tasks(plain.filter(pl.col("name") == compared_name), threshold) for compared_name in (name, baseline)
    )
    shared = name_tasks.select("task").join(baseline_tasks.select("task"), on="task", how="inner")
    if shared.is_empty():
        counts = f"{name_tasks.height} and {baseline_tasks.height} tasks"
        raise DataRefusedError(f"{name!r} and {baseline!r} have no task with scores in common ({counts})")
    name_tasks, baseline_tasks = (
        tasks.join(shared, on="task", how="semi").sort("task") for tasks in (name_tasks, baseline_tasks)
    )
    rows = []
    for measure in list_measures(ks):
        pairs = [
            pair
            for pair in zip(compute_measure(name_tasks, measure), compute_measure(baseline_tasks, measure), strict=True)
            if None not in pair
        ]
        comparison = compare_paired(np.array(pairs, np.float64).reshape(-1, 2), seed=seed)
        rows.append({"measure": measure} | comparison._asdict())
    types = {"measure": pl.String(), "test": pl.String(), "tasks": pl.Int64()}
    columns = ("measure", *Comparison._fields)
    return pl.DataFrame(rows, schema={name: types.get(name, pl.Float64()) for name in columns})
