"""The episodes of a credit job: which ones, in which group, with which scores.

Where scores come from is one choice per job: the return the environment reported, or the values of a scorer or reward,
which has a row in `scores` under its name. An episode without a value has NULL, never 0. Siblings are compared under
one version of a scorer (`lake.judgements.scores` says which). One that has no value for any chosen episode is told of:
that is seldom meant, as a function that failed on every row was the last to run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import polars as pl

from lake.errors import DataRefusedError
from lake.judgements.predicates import select_where
from lake.judgements.scores import ENV_RETURN, episode_scores, other_versions, reasons, step_score_jobs, version_of
from lake.judgements.selections import read_grouping
from lake.read.parquet import collected
from lake.read.show import one_line
from lake.read.snapshot import Snapshot
from lake.read.text_table import counted
from pipelines.credit.inputs.columns import COMPONENT

ENV_REWARD = "env_reward"
REWARD_JOB = "reward_job"
"""The job whose step scores are the episode's rewards, where rewards come from a scorer."""
SPARE = "spare"
"""How many siblings beyond the wanted ones were meant to run in the episode's round, those left out not counted."""
_COLUMNS = ("episode_id", "group_id", "run_id", "collection_round", "status", "write_id", "num_steps", "env_return")

SiblingChoice: TypeAlias = Literal["kept", "all"]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a credit job takes its episodes and their scores from."""

    where: str | None = None
    """SQL predicate over `episodes`: the others do not exist for the series. None takes all."""
    only: str | None = None
    """SQL predicate over `episodes`: of the groups, those that hold such an episode, whole; None takes all."""
    score: str = ENV_RETURN
    """Episode score: `env_return`, or the name of a scorer or reward, with @VERSION or without."""
    rewards: str = ENV_REWARD
    """Step rewards: `env_reward` (as recorded), or the name of a scorer or reward of steps, @VERSION or not."""
    grouping: str | None = None
    """Name of a definition in `groupings`; None takes the groups as collected."""
    siblings: SiblingChoice = "kept"
    """Of an oversampled group: those that its collection kept, or all that were played."""


def select_episodes(snapshot: Snapshot, sources: Sources, components: tuple[str, ...] = ()) -> pl.DataFrame:
    """Episodes of a credit job; `components` are scorers or rewards that an estimator weighs one by one.

    One row per episode, sorted by (group_id, episode_id): episode_id, group_id (the one the job uses),
    collected_group_id, run_id, status, write_id, num_steps, episode_score, a float64 column `score_<name>` per
    component, `reward_job` where step rewards come from a scorer, and `spare` where some round was oversampled.

    Raises:
        UsageError: a bad predicate, a scorer that scored nothing, an unknown grouping.
        DataRefusedError: no episode is selected.
    """
    wanted, collected_groups = None, None
    if sources.only is not None:
        wanted = select_where(snapshot, ("episode_id", "group_id"), sources.only, "only")
        # Groups of a grouping may hold siblings that were collected in others.
        collected_groups = wanted["group_id"].unique() if sources.grouping is None else None
    episodes = select_where(snapshot, _COLUMNS, sources.where, groups=collected_groups)
    episodes = _of_siblings(snapshot, sources, episodes).with_columns(collected_group_id="group_id")
    if sources.grouping is not None:
        groups = read_grouping(snapshot, sources.grouping).select("episode_id", "group_id")
        episodes = episodes.drop("group_id").join(groups, on="episode_id")
        if episodes.is_empty():
            msg = (
                f"no selected episode is in the grouping {sources.grouping!r}; leave --where out, or run "
                "`trajlake group` again"
            )
            raise DataRefusedError(msg)
    if wanted is not None:
        groups = episodes.join(wanted, on="episode_id", how="semi").select(pl.col("group_id").unique())
        episodes = episodes.join(groups, on="group_id", how="semi", maintain_order="left")
    if ENV_RETURN in components:
        episodes = episodes.with_columns(pl.col("env_return").alias(COMPONENT + ENV_RETURN))
    if sources.score == ENV_RETURN:
        episodes = episodes.rename({"env_return": "episode_score"})
    else:
        scores = episode_scores(snapshot, sources.score).rename({"score": "episode_score"})
        episodes = episodes.drop("env_return").join(scores, on="episode_id", how="left")
    for name in components:
        if name == ENV_RETURN:
            continue
        scores = episode_scores(snapshot, name).rename({"score": COMPONENT + name})
        episodes = episodes.join(scores, on="episode_id", how="left")
    if sources.rewards != ENV_REWARD:
        jobs = step_score_jobs(snapshot, sources.rewards).rename({"job_id": REWARD_JOB})
        episodes = episodes.join(jobs, on="episode_id", how="left")
    return episodes.sort("group_id", "episode_id")


def _of_siblings(snapshot: Snapshot, sources: Sources, episodes: pl.DataFrame) -> pl.DataFrame:
    """The episodes whose siblings count, and their `spare`. Raises DataRefusedError: none is left."""
    rounds = snapshot.sql("SELECT run_id, collection_round, spare FROM oversampled_rounds")
    if rounds.is_empty():
        return episodes.drop("collection_round")
    keys = ["run_id", "collection_round"]
    episodes = episodes.join(rounds, on=keys, how="left", maintain_order="left").drop(keys[1])
    if sources.siblings == "all":
        return episodes
    left_out = snapshot.sql("SELECT episode_id FROM left_out_siblings")["episode_id"]
    is_left_out = pl.col("episode_id").is_in(left_out.implode())
    of_group = is_left_out.sum().cast(pl.Int64).over("group_id")
    kept = episodes.with_columns((pl.col(SPARE) - of_group).clip(lower_bound=0)).filter(~is_left_out)
    if kept.is_empty():
        raise DataRefusedError(
            f"the collection kept none of {counted(episodes.height, 'chosen episode')}: see the view "
            "`left_out_siblings`; --siblings all compares them"
        )
    return kept


def scorer_versions(snapshot: Snapshot, sources: Sources, components: tuple[str, ...] = ()) -> dict[str, str]:
    """The version of each scorer or reward a job takes, by its name as it was given; unknown ones are left out."""
    named = dict.fromkeys((sources.score, sources.rewards, *components))
    versions = {name: version_of(snapshot, name) for name in named if name not in (ENV_RETURN, ENV_REWARD)}
    return {name: version for name, version in versions.items() if version is not None}


def namesakes(snapshot: Snapshot, sources: Sources) -> Iterator[str]:
    """A line if `env_return` is a scorer's name, too: what the environment recorded is taken; how to take the other."""
    version = version_of(snapshot, ENV_RETURN) if sources.score == ENV_RETURN else None
    if version is not None:
        yield (
            f"--score {ENV_RETURN} is what the environment recorded in `episodes`; `scores` holds a scorer of that "
            f"name as well: --score {ENV_RETURN}@{version} takes it"
        )


def other_scores(snapshot: Snapshot, episodes: pl.DataFrame) -> Iterator[str]:
    """A line if scorers have values for `select_episodes` that have no score: which, those of most episodes first."""
    query = "SELECT scorer, episode_id FROM current_scores WHERE step_index IS NULL AND value IS NOT NULL"
    without = episodes.filter(pl.col("episode_score").is_null())
    there = snapshot.sql(query).join(without, on="episode_id", how="semi").group_by("scorer").len()
    if there.height:
        names = there.sort("len", "scorer", descending=[True, False])["scorer"]
        options = " or ".join(f"--score {name}" for name in names)
        yield f"There are recorded scores for episodes without one: {options}"


def records_step_rewards(snapshot: Snapshot, sources: Sources) -> bool:
    """Whether any step of the selected episodes has a reward; raises as `select_episodes`."""
    if sources.rewards != ENV_REWARD:
        return True
    episodes = select_where(snapshot, ("episode_id",), sources.where)
    steps = snapshot.scan("steps").filter(pl.col("reward").is_not_null()).select("episode_id")
    return not collected(steps.join(episodes.lazy(), on="episode_id", how="semi").head(1)).is_empty()


def unvalued(
    snapshot: Snapshot,
    sources: Sources,
    episodes: pl.DataFrame,
    versions: Mapping[str, str],
    components: tuple[str, ...],
) -> Iterator[str]:
    """A line for each scorer or reward without a value for any of the `select_episodes`."""
    without_values = [name for name in components if _is_empty(episodes[COMPONENT + name])]
    if sources.score != ENV_RETURN and _is_empty(episodes["episode_score"]):
        without_values.append(sources.score)
    if sources.rewards != ENV_REWARD and not _any_step(snapshot, sources, episodes):
        without_values.append(sources.rewards)
    for name in dict.fromkeys(name for name in without_values if name in versions):
        yield _line(snapshot, name.partition("@")[0], versions[name], episodes)


def _is_empty(values: pl.Series) -> bool:
    return values.null_count() == len(values)


def _any_step(snapshot: Snapshot, sources: Sources, episodes: pl.DataFrame) -> bool:
    rows = snapshot.scan("scores").filter(
        pl.col("scorer") == sources.rewards.partition("@")[0],
        pl.col("step_index").is_not_null(),
        pl.col("value").is_not_null(),
    )
    chosen = episodes.lazy().select("episode_id", job_id=REWARD_JOB)
    found = rows.select("episode_id", "job_id").join(chosen, on=["episode_id", "job_id"], how="semi")
    return not collected(found.head(1)).is_empty()


def _line(snapshot: Snapshot, scorer: str, version: str, episodes: pl.DataFrame) -> str:
    scored = reasons(snapshot, scorer, version).join(episodes.select("episode_id"), on="episode_id", how="semi")
    causes = scored.drop_nulls("why")["why"].value_counts(sort=True).sort("count", "why", descending=[True, False])
    message = f"{scorer}@{version} has no value for any of the {episodes.height} chosen episodes"
    if scored.is_empty():
        message += ", which it has not scored"
    elif causes.height:
        why, count = causes.row(0)
        message += f", most often ({count}) because: {one_line(why)}"
    others = ", ".join(f"{scorer}@{other}" for other in other_versions(snapshot, scorer, version))
    return f"{message}. {f'Other versions: {others}' if others else 'There is no other version'}"
