"""Attempts at tasks, with their scores: what success rates are counted from.

An attempt is an episode that was started from the task. What came out of another episode (a sub-agent, a fork, a
continuation) is none. The score is the return that the environment reported, or a scorer's value; one that is not known
stays NULL, and is counted apart.
"""

import polars as pl

from lake.judgements.scores import ENV_RETURN, episode_scores
from lake.snapshot import Snapshot
from trainer.data.selection import select_episodes

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
ORDER BY name, task, rollout_index, attempt, episode_id
"""


def read_attempts(snapshot: Snapshot, *, by: str, score: str = ENV_RETURN, where: str | None = None) -> pl.DataFrame:
    """Attempts with their scores.

    Args:
        snapshot: the data.
        by: run_id, policy_version (policy and version, as NAME@VERSION) or policy.
        score: env_return, or a scorer as NAME (its current version) or NAME@VERSION.
        where: SQL predicate over `episodes`; None takes all.

    Returns:
        One row per episode: episode_id, name (what it is put together by), task (environment/task_id), score (float64,
        NULL if not known), nested (it came out of another episode).

    Raises:
        UsageError: a wrong predicate, or a scorer that scored no episode.
        DataRefusedError: no episode.
    """
    chosen = select_episodes(snapshot, where)
    rows = snapshot.sql(_EPISODES.replace("{label}", _LABELS[by]))
    rows = rows.join(chosen, on="episode_id", how="semi", maintain_order="left")
    if score == ENV_RETURN:
        return rows
    return rows.drop("score").join(episode_scores(snapshot, score), on="episode_id", how="left", maintain_order="left")
