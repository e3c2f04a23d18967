"""A scorer that says nothing of any chosen episode: which version was taken, why it says nothing, and which others are.

Its advantages are NULL, which is right and seldom meant: a function that failed on every row was the last to run.
"""

from collections.abc import Iterator, Mapping

import polars as pl

from lake.judgements.scores import ENV_RETURN, other_versions, reasons
from lake.reading import collected
from lake.show import one_line
from lake.snapshot import Snapshot
from pipelines.credit.columns import COMPONENT
from pipelines.credit.inputs import ENV_REWARD, REWARD_JOB, Sources


def unvalued(
    snapshot: Snapshot,
    sources: Sources,
    episodes: pl.DataFrame,
    versions: Mapping[str, str],
    components: tuple[str, ...],
) -> Iterator[str]:
    """A line for each scorer or reward without a value.

    Args:
        snapshot: where to read.
        sources: whose scores and rewards were taken.
        episodes: as `select_episodes` found them.
        versions: of `scorer_versions`.
        components: scorers or rewards an estimator weighs one by one.
    """
    silent = [name for name in components if _is_empty(episodes[COMPONENT + name])]
    if sources.score != ENV_RETURN and _is_empty(episodes["episode_score"]):
        silent.append(sources.score)
    if sources.rewards != ENV_REWARD and not _any_step(snapshot, sources, episodes):
        silent.append(sources.rewards)
    for name in dict.fromkeys(name for name in silent if name in versions):
        yield _line(snapshot, name.partition("@")[0], versions[name], episodes)


def _is_empty(values: pl.Series) -> bool:
    return values.null_count() == len(values)


def _any_step(snapshot: Snapshot, sources: Sources, episodes: pl.DataFrame) -> bool:
    """Whether a step of theirs has a reward."""
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
    counted = scored.drop_nulls("why")["why"].value_counts(sort=True).sort("count", "why", descending=[True, False])
    told = f"{scorer}@{version} has no value for any of the {episodes.height} chosen episodes"
    if scored.is_empty():
        told += ", which it has not scored"
    elif counted.height:
        why, count = counted.row(0)
        told += f", most often ({count}) because: {one_line(why)}"
    others = ", ".join(f"{scorer}@{other}" for other in other_versions(snapshot, scorer, version))
    return f"{told}. {f'Other versions: {others}' if others else 'There is no other version'}"
