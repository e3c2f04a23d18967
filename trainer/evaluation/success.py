"""Success of runs or policies: how often, with which certainty, and against one another.

An attempt succeeds if its score reaches a threshold. Success is a share of attempts; pass@k, pass^k and the mean score
are means over tasks. Intervals are those of a sample of tasks. Two names are compared on the tasks that both attempted,
task by task (`lake.statistics`).

An attempt is an episode that was started from the task. What came out of another episode (a sub-agent, a fork, a
continuation) is none. The score is the return that the environment reported, or a scorer's value; one that is not known
stays NULL, and is counted apart.

pass@k: at least one of k attempts succeeds. Unbiased from n >= k attempts (Chen et al. 2021, arXiv 2107.03374):

    pass@k = 1 - C(n - c, k) / C(n, k)

pass^k: all of k attempts succeed (tau-bench: Yao et al. 2024, arXiv 2406.12045):

    pass^k = C(c, k) / C(n, k)

Both are averaged over tasks. With fewer than k attempts a task says nothing.
"""

from collections.abc import Sequence
from math import comb

import numpy as np
import polars as pl

from lake.errors import DataRefusedError, UsageError
from lake.judgements.scores import ENV_RETURN, episode_scores, find_score, is_success
from lake.read.snapshot import Snapshot
from lake.statistics.intervals import share_interval, spread_of_mean, success_interval
from lake.statistics.paired import Comparison, compare_paired
from trainer.data.select.selection import select_episodes

BY = ("run_id", "policy_version", "policy")
"""What rollouts are put together by."""
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
WHERE $run IS NULL OR run_id = $run
ORDER BY name, task, rollout_index, attempt, episode_id
"""


def read_attempts(
    snapshot: Snapshot, *, by: str, score: str | None = None, where: str | None = None, run_id: str | None = None
) -> pl.DataFrame:
    """Attempts with their scores.

    Args:
        by: run_id, policy_version (policy and version, as NAME@VERSION) or policy.
        score: env_return, or a scorer as NAME (its current version) or NAME@VERSION; None takes the current credit's,
            or env_return without credit (`lake.judgements.scores.find_score`).
        run_id: only this run's episodes; None takes all runs.

    Returns:
        One row per episode: episode_id, name (what it is put together by), task (environment/task_id), score (float64,
        NULL if not known), nested (it came out of another episode).

    Raises:
        UsageError: a wrong predicate, a scorer that scored no episode, or a run without episodes.
        DataRefusedError: no episode.
    """
    chosen = select_episodes(snapshot, where)
    rows = snapshot.sql(_EPISODES.replace("{label}", _LABELS[by]), {"run": run_id})
    if run_id is not None and rows.is_empty():
        runs = snapshot.sql("SELECT DISTINCT run_id FROM episodes ORDER BY run_id LIMIT 20")["run_id"].to_list()
        raise UsageError(f"--run {run_id!r} has no episodes; runs with episodes: {', '.join(runs)}")
    rows = rows.join(chosen, on="episode_id", how="semi", maintain_order="left")
    if run_id is not None and rows.is_empty():
        raise DataRefusedError(f"no episode of the run {run_id!r} satisfies --where {where!r}")
    score = find_score(snapshot).name if score is None else score
    if score == ENV_RETURN:
        return rows
    return rows.drop("score").join(episode_scores(snapshot, score), on="episode_id", how="left", maintain_order="left")


def pass_at_k(attempts: int, successes: int, k: int) -> float | None:
    """Probability that one of k attempts succeeds; None for fewer than k attempts."""
    return None if attempts < k else 1.0 - comb(attempts - successes, k) / comb(attempts, k)


def pass_all_k(attempts: int, successes: int, k: int) -> float | None:
    """Probability that all of k attempts succeed; None for fewer than k attempts."""
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
"""One row per name and measure: value and its 95 % interval, the tasks and scored attempts behind it, and attempts
without a score, which are in none of the figures."""


def success_rows(attempts: pl.DataFrame, *, threshold: float = 1.0, ks: Sequence[int] = (1,)) -> pl.DataFrame:
    """Success, mean score, pass@k and pass^k of every name: rows of `ROWS`, by name. Nested episodes are left out.

    A score from `threshold` on is a success. value is NULL where nothing is known.
    """
    rows: list[tuple[object, ...]] = []
    for (name,), part in attempts.filter(~pl.col("nested")).group_by("name", maintain_order=True):
        tasks = per_task(part, threshold)
        unscored = part["score"].null_count()
        done = int(tasks["attempts"].sum())
        for measure, value, interval, used in _measures(tasks, ks):
            low, high = (None, None) if interval is None else interval
            rows.append((name, measure, value, low, high, used, done, unscored))
    return pl.DataFrame(rows, schema=ROWS, orient="row")


def per_task(attempts: pl.DataFrame, threshold: float) -> pl.DataFrame:
    """task, attempts, successes, score (the mean): scored attempts of each task, sorted by task."""
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


def measure_of(tasks: pl.DataFrame, measure: str) -> list[float | None]:
    """A measure of each task: `score`, `pass@K` or `pass^K`; None where the task has too few attempts."""
    if measure == "score":
        return tasks["score"].to_list()
    function = pass_at_k if measure.startswith("pass@") else pass_all_k
    k = int(measure[5:])
    return [function(n, c, k) for n, c in tasks.select("attempts", "successes").iter_rows()]


def measures(ks: Sequence[int]) -> list[str]:
    """Names of the measures by task: pass^1 is pass@1."""
    return ["score", *(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks if k > 1)]


Measured = tuple[str, float | None, tuple[float, float] | None, int]


def _measures(tasks: pl.DataFrame, ks: Sequence[int]) -> list[Measured]:
    """(measure, value, interval, tasks used)."""
    if not tasks.height:
        return [(measure, None, None, 0) for measure in ("success", *measures(ks))]
    trials_P, wins_P = (tasks[name].to_numpy().astype(np.float64) for name in ("attempts", "successes"))
    attempts, share = int(trials_P.sum()), float(wins_P.sum() / trials_P.sum())
    found: list[Measured] = [("success", share, success_interval(wins_P, trials_P), tasks.height)]
    for measure in measures(ks):
        known_P = np.array([value for value in measure_of(tasks, measure) if value is not None], np.float64)
        if not len(known_P):
            found.append((measure, None, None, 0))
            continue
        interval, spread = None, spread_of_mean(known_P)
        if spread is not None:
            bounded = measure != "score"
            interval = share_interval(spread, len(known_P), attempts) if bounded else spread.interval()
        found.append((measure, float(known_P.mean()), interval, len(known_P)))
    return found


def against_rows(
    attempts: pl.DataFrame,
    *,
    one: str,
    other: str,
    threshold: float = 1.0,
    ks: Sequence[int] = (1,),
    seed: int = 0,
) -> pl.DataFrame:
    """Two names, measure by measure, on the tasks that both attempted.

    Returns measure, value (of `one`), against (of `other`), difference, its 95 % interval low and high, p (two-sided
    permutation test), test (exact or sampled), tasks (shared ones that the measure is known for in both).

    Raises:
        UsageError: a name that is not there.
        DataRefusedError: no shared task with scores.
    """
    plain = attempts.filter(~pl.col("nested"))
    names = plain["name"].unique().sort().to_list()
    for name in (one, other):
        if name not in names:
            raise UsageError(f"there is no {name!r} to compare; valid: {', '.join(map(str, names))}")
    left, right = (per_task(plain.filter(pl.col("name") == name), threshold) for name in (one, other))
    shared = left.select("task").join(right.select("task"), on="task", how="inner")
    if shared.is_empty():
        msg = f"{one!r} and {other!r} have no task with scores in common ({left.height} and {right.height} tasks)"
        raise DataRefusedError(msg)
    left, right = (part.join(shared, on="task", how="semi").sort("task") for part in (left, right))
    rows = []
    for measure in measures(ks):
        pairs = [
            (a, b)
            for a, b in zip(measure_of(left, measure), measure_of(right, measure), strict=True)
            if a is not None and b is not None
        ]
        found = compare_paired(np.array(pairs, np.float64).reshape(-1, 2), seed=seed)
        rows.append({"measure": measure} | found._asdict())
    types = {"measure": pl.String(), "test": pl.String(), "tasks": pl.Int64()}
    columns = ("measure", *Comparison._fields)
    return pl.DataFrame(rows, schema={name: types.get(name, pl.Float64()) for name in columns})
