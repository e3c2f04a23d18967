"""The episodes of a credit job: which ones, in which group, with which scores.

Where scores come from is one choice per job: the return the environment reported, or the values of a scorer or reward,
which has a row in `scores` under its name. An episode without a value has NULL, never 0. Siblings are compared under
one version of a scorer: the one that is named (`NAME@VERSION`), else the one its newest job ran.
"""

from dataclasses import dataclass

import polars as pl

from lake.errors import UsageError
from lake.snapshot import Snapshot
from pipelines.credit.columns import COMPONENT
from pipelines.predicates import select_where

ENV_RETURN = "env_return"
ENV_REWARD = "env_reward"
REWARD_JOB = "reward_job"
"""The job whose step scores are the episode's rewards, where rewards come from a scorer."""
_COLUMNS = ("episode_id", "group_id", "run_id", "status", "write_id", "num_steps", "env_return")
_OF_VERSION = """
WITH mine AS (
    SELECT s.episode_id, s.job_id, s.scorer_version, s.value, coalesce(r.sequence, -1) AS sequence, r.ended_at
    FROM scores AS s JOIN job_runs AS r USING (job_id)
    WHERE s.scorer = $scorer AND (s.step_index IS NULL) = $of_episodes
    AND ($version IS NULL OR s.scorer_version = $version)
),

newest AS (SELECT arg_max(scorer_version, (sequence, ended_at, job_id)) AS version FROM mine)
"""
_VALUES = f"""{_OF_VERSION}
SELECT episode_id, value FROM mine WHERE scorer_version = (SELECT version FROM newest)
QUALIFY row_number() OVER (PARTITION BY episode_id ORDER BY sequence DESC, ended_at DESC, job_id DESC) = 1
"""
_JOBS = f"""{_OF_VERSION}
SELECT episode_id, arg_max(job_id, (sequence, ended_at, job_id)) AS {REWARD_JOB}
FROM mine WHERE scorer_version = (SELECT version FROM newest) GROUP BY episode_id
"""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a credit job takes its episodes and their scores from."""

    where: str | None = None
    """SQL predicate over `episodes`; None takes all."""
    score: str = ENV_RETURN
    """Episode score: `env_return`, or the name of a scorer or reward, with @VERSION or without."""
    rewards: str = ENV_REWARD
    """Step rewards: `env_reward` (as recorded), or the name of a scorer or reward of steps, @VERSION or not."""
    grouping: str | None = None
    """Name of a definition in `groupings`; None takes the groups as collected."""


def select_episodes(snapshot: Snapshot, sources: Sources, components: tuple[str, ...] = ()) -> pl.DataFrame:
    """Episodes of a credit job.

    Args:
        snapshot: where to read.
        sources: which episodes, and whose scores.
        components: scorers or rewards an estimator weighs one by one.

    Returns:
        One row per episode, sorted by (group_id, episode_id): episode_id, group_id (the one the job uses),
        collected_group_id, run_id, status, write_id, num_steps, episode_score, a float64 column `score_<name>` per
        component, and `reward_job` where step rewards come from a scorer.

    Raises:
        UsageError: a predicate that is no predicate, a scorer that scored nothing, an unknown grouping.
        DataRefusedError: no episode is selected.
    """
    episodes = select_where(snapshot, _COLUMNS, sources.where).with_columns(collected_group_id="group_id")
    if sources.grouping is not None:
        episodes = _regrouped(snapshot, episodes, sources.grouping)
    if sources.score == ENV_RETURN:
        episodes = episodes.rename({"env_return": "episode_score"})
    else:
        scores = newest_scores(snapshot, sources.score).rename({"value": "episode_score"})
        episodes = episodes.drop("env_return").join(scores, on="episode_id", how="left")
    for name in components:
        scores = newest_scores(snapshot, name).rename({"value": COMPONENT + name})
        episodes = episodes.join(scores, on="episode_id", how="left")
    if sources.rewards != ENV_REWARD:
        jobs = snapshot.sql(_JOBS, _named(sources.rewards, of_episodes=False))
        if jobs.is_empty():
            raise UsageError(_unknown(snapshot, sources.rewards, ENV_REWARD, "steps"))
        episodes = episodes.join(jobs, on="episode_id", how="left")
    return episodes.sort("group_id", "episode_id")


def newest_scores(snapshot: Snapshot, scorer: str) -> pl.DataFrame:
    """episode_id and value: what a scorer or reward says of whole episodes.

    Args:
        snapshot: where to read.
        scorer: its name, which stands for its newest version, or NAME@VERSION.

    Raises:
        UsageError: it scored no episode.
    """
    values = snapshot.sql(_VALUES, _named(scorer, of_episodes=True))
    if values.is_empty():
        raise UsageError(_unknown(snapshot, scorer, ENV_RETURN, "episodes"))
    return values


def records_step_rewards(snapshot: Snapshot, sources: Sources) -> bool:
    """Whether any step of the selected episodes has a reward.

    Raises:
        As `select_episodes`.
    """
    if sources.rewards != ENV_REWARD:
        return True
    episodes = select_where(snapshot, ("episode_id",), sources.where)
    steps = snapshot.scan("steps").filter(pl.col("reward").is_not_null()).select("episode_id")
    return steps.join(episodes.lazy(), on="episode_id", how="semi").head(1).collect().height > 0


def _regrouped(snapshot: Snapshot, episodes: pl.DataFrame, grouping: str) -> pl.DataFrame:
    """The episodes of a grouping, in its groups."""
    from lake.errors import DataRefusedError
    from pipelines.groupings import read_grouping

    groups = read_grouping(snapshot, grouping).select("episode_id", "group_id")
    found = episodes.drop("group_id").join(groups, on="episode_id")
    if found.is_empty():
        msg = f"no selected episode is in the grouping {grouping!r}; leave --where out, or run `trajlake group` again"
        raise DataRefusedError(msg)
    return found


def _named(scorer: str, *, of_episodes: bool) -> dict[str, str | bool | None]:
    """Parameters of the queries, from NAME or NAME@VERSION."""
    name, _, version = scorer.partition("@")
    return {"scorer": name, "version": version or None, "of_episodes": of_episodes}


def _unknown(snapshot: Snapshot, scorer: str, recorded: str, level: str) -> str:
    """What to say of a scorer without a value at the level that is asked for."""
    condition = "step_index IS NULL" if level == "episodes" else "step_index IS NOT NULL"
    query = f"SELECT DISTINCT scorer, scorer_version FROM scores WHERE {condition} ORDER BY ALL"
    known = snapshot.sql(query)
    versions = known.filter(scorer=scorer.partition("@")[0])["scorer_version"].to_list()
    valid = (
        [recorded, *known["scorer"].to_list()]
        if not versions
        else [f"{scorer.partition('@')[0]}@{v}" for v in versions]
    )
    return f"no scores of {scorer!r} for {level}; valid: {', '.join(dict.fromkeys(valid))}"
