"""The input of a credit job: which episodes, their scores, their steps, as one lazy frame.

Where the episode score comes from is one choice per job: the return the environment reported, or a scorer's newest
values. An episode without one has NULL, never 0.
"""

from dataclasses import dataclass

import polars as pl

from lake.errors import DataRefusedError, QueryError, UsageError
from lake.snapshot import Snapshot

ENV_RETURN = "env_return"
_STEP_COLUMNS = ("reward", "is_active", "is_action_valid")


@dataclass(frozen=True)
class CreditInput:
    """What a credit job reads."""

    episodes: pl.DataFrame
    """episode_id, group_id, run_id, status, write_id, episode_score; one row per selected episode."""
    steps: pl.LazyFrame
    """The estimator's input: one row per step."""


def select_episodes(snapshot: Snapshot, where: str | None, score: str) -> pl.DataFrame:
    """Episodes that a predicate selects, with their scores.

    Args:
        snapshot: where to read.
        where: a SQL predicate over `episodes`; None selects all.
        score: `env_return`, or the name of a scorer.

    Raises:
        UsageError: a predicate that is no predicate, or a scorer that scored nothing.
        DataRefusedError: no episode is selected.
    """
    query = f"SELECT episode_id, group_id, run_id, status, write_id, env_return FROM episodes WHERE ({where or 'true'})"
    try:
        episodes = snapshot.sql(query)
    except QueryError as error:
        msg = f"--where {where!r} is no predicate over `episodes`: {error}"
        raise UsageError(msg) from error
    if episodes.is_empty():
        chosen = "the lake holds no episodes" if where is None else f"no episode satisfies {where!r}"
        msg = f"{chosen}; `trajlake sql 'SELECT run_id, count(*) FROM episodes GROUP BY 1'` tells what is there"
        raise DataRefusedError(msg)
    if score == ENV_RETURN:
        return episodes.rename({"env_return": "episode_score"})
    values = _newest_scores(snapshot, score)
    return episodes.drop("env_return").join(values, on="episode_id", how="left")


def read_inputs(snapshot: Snapshot, episodes: pl.DataFrame, state_columns: tuple[str, ...]) -> CreditInput:
    """Steps of the selected episodes, joined with their scores.

    Args:
        snapshot: where to read.
        episodes: from `select_episodes`.
        state_columns: columns the anchor definition reads.
    """
    steps = snapshot.scan("steps").select("episode_id", "step_index", *state_columns, *_STEP_COLUMNS)
    facts = episodes.lazy().select("episode_id", "group_id", "status", "episode_score")
    return CreditInput(episodes, steps.join(facts, on="episode_id", how="inner"))


def records_step_rewards(snapshot: Snapshot, episodes: pl.DataFrame) -> bool:
    """Whether the environment gave any step of these episodes a reward."""
    steps = snapshot.scan("steps").filter(pl.col("reward").is_not_null()).select("episode_id")
    return steps.join(episodes.lazy(), on="episode_id", how="semi").head(1).collect().height > 0


def _newest_scores(snapshot: Snapshot, scorer: str) -> pl.DataFrame:
    """episode_id and episode_score: the whole-episode values of the scorer's newest job for each episode."""
    values = snapshot.sql(
        "SELECT episode_id, value AS episode_score FROM scores JOIN job_runs USING (job_id)"
        " WHERE scorer = ? AND step_index IS NULL"
        " QUALIFY row_number() OVER (PARTITION BY episode_id ORDER BY ended_at DESC, job_id) = 1",
        [scorer],
    )
    if values.is_empty():
        known = snapshot.sql("SELECT DISTINCT scorer FROM scores ORDER BY 1")["scorer"].to_list()
        msg = f"no scores of {scorer!r} for episodes; valid: {', '.join([ENV_RETURN, *known])}"
        raise UsageError(msg)
    return values
