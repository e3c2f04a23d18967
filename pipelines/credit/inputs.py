"""The episodes of a credit job: which ones, in which group, with which scores.

Where scores come from is one choice per job: the return the environment reported, or the values of a scorer or reward,
which has a row in `scores` under its name. An episode without a value has NULL, never 0. Siblings are compared under
one version of a scorer: the one that is named (`NAME@VERSION`), else the one that ran last. Without a version the
rows are those of the view `current_scores`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from lake.errors import UsageError
from lake.reading import collected
from lake.snapshot import Snapshot
from pipelines.credit.columns import COMPONENT
from pipelines.predicates import select_where

ENV_RETURN = "env_return"
ENV_REWARD = "env_reward"
REWARD_JOB = "reward_job"
"""The job whose step scores are the episode's rewards, where rewards come from a scorer."""
_COLUMNS = ("episode_id", "group_id", "run_id", "status", "write_id", "num_steps", "env_return")
_VERSION = """
SELECT any_value(scorer_version) AS version FROM scorer_versions
WHERE scorer = $scorer AND CASE WHEN $version IS NULL THEN is_current ELSE scorer_version = $version END
"""
_JOBS = f"""
SELECT s.episode_id, arg_max(s.job_id, (coalesce(r.sequence, -1), r.ended_at, s.job_id)) AS {REWARD_JOB},
    count(s.step_index) AS steps
FROM scores AS s JOIN job_runs AS r USING (job_id)
WHERE s.scorer = $scorer AND s.scorer_version = $version
GROUP BY s.episode_id
"""
_VALUES = f"""
SELECT s.episode_id, s.value FROM scores AS s JOIN ({_JOBS}) AS newest
    ON newest.episode_id = s.episode_id AND newest.{REWARD_JOB} = s.job_id
WHERE s.scorer = $scorer AND s.scorer_version = $version AND s.step_index IS NULL
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
    if ENV_RETURN in components:
        episodes = episodes.with_columns(pl.col("env_return").alias(COMPONENT + ENV_RETURN))
    if sources.score == ENV_RETURN:
        episodes = episodes.rename({"env_return": "episode_score"})
    else:
        scores = newest_scores(snapshot, sources.score).rename({"value": "episode_score"})
        episodes = episodes.drop("env_return").join(scores, on="episode_id", how="left")
    for name in components:
        if name == ENV_RETURN:
            continue
        scores = newest_scores(snapshot, name).rename({"value": COMPONENT + name})
        episodes = episodes.join(scores, on="episode_id", how="left")
    if sources.rewards != ENV_REWARD:
        episodes = episodes.join(_newest_jobs(snapshot, sources.rewards), on="episode_id", how="left")
    return episodes.sort("group_id", "episode_id")


def newest_scores(snapshot: Snapshot, scorer: str) -> pl.DataFrame:
    """episode_id and value: what a scorer or reward says of whole episodes.

    Args:
        snapshot: where to read.
        scorer: its name, which stands for its current version, or NAME@VERSION.

    Raises:
        UsageError: it scored no episode.
    """
    values = snapshot.sql(_VALUES, _resolved(snapshot, scorer))
    if values.is_empty():
        raise UsageError(_unknown(snapshot, scorer, ENV_RETURN, "episodes"))
    return values


def scorer_versions(snapshot: Snapshot, sources: Sources, components: tuple[str, ...] = ()) -> dict[str, str]:
    """Which version of each scorer or reward a job takes: name as it was given -> version. Unknown ones are left out.

    Args:
        snapshot: where to read.
        sources: whose scores and rewards.
        components: scorers or rewards an estimator weighs one by one.
    """
    named = dict.fromkeys((sources.score, sources.rewards, *components))
    versions = {name: _resolved(snapshot, name)["version"] for name in named if name not in (ENV_RETURN, ENV_REWARD)}
    return {name: version for name, version in versions.items() if version is not None}


def namesakes(snapshot: Snapshot, sources: Sources) -> Iterator[str]:
    """A line if `env_return` is a scorer's name, too: what the environment recorded is taken; how to take the other.

    Args:
        snapshot: where to read.
        sources: whose scores were asked for.
    """
    version = _resolved(snapshot, ENV_RETURN)["version"] if sources.score == ENV_RETURN else None
    if version is not None:
        yield (
            f"--score {ENV_RETURN} is what the environment recorded in `episodes`; `scores` holds a scorer of that "
            f"name as well: --score {ENV_RETURN}@{version} takes it"
        )


def records_step_rewards(snapshot: Snapshot, sources: Sources) -> bool:
    """Whether any step of the selected episodes has a reward.

    Raises:
        As `select_episodes`.
    """
    if sources.rewards != ENV_REWARD:
        return True
    episodes = select_where(snapshot, ("episode_id",), sources.where)
    steps = snapshot.scan("steps").filter(pl.col("reward").is_not_null()).select("episode_id")
    return not collected(steps.join(episodes.lazy(), on="episode_id", how="semi").head(1)).is_empty()


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


def _newest_jobs(snapshot: Snapshot, scorer: str) -> pl.DataFrame:
    """episode_id and `reward_job`: the job whose scores of an episode's steps count."""
    jobs = snapshot.sql(_JOBS, _resolved(snapshot, scorer))
    if not jobs["steps"].sum():
        raise UsageError(_unknown(snapshot, scorer, ENV_REWARD, "steps"))
    return jobs.drop("steps")


def _resolved(snapshot: Snapshot, scorer: str) -> dict[str, str | None]:
    """Parameters of the queries, from NAME or NAME@VERSION; the version is NULL if it scored nothing."""
    name, at, wanted = scorer.partition("@")
    version = snapshot.sql(_VERSION, {"scorer": name, "version": wanted if at else None}).item()
    return {"scorer": name, "version": version}


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
