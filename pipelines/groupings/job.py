"""The grouping job: a definition over a lake's episodes into `groupings`, with lineage, skipped if nothing changed."""

from dataclasses import dataclass

import polars as pl

from lake.errors import DataRefusedError
from lake.judgements import seeded_draws
from lake.judgements.predicates import select_where
from lake.judgements.selections import grouping_job
from lake.lake import Lake
from lake.read.snapshot import Snapshot
from pipelines.groupings import definition
from pipelines.groupings.definition import FIRST_CONTEXT, Grouping, regroup

KIND = "group"
_CODE = (definition, seeded_draws)
"""Modules whose source decides the groups."""
_KEYS = ("episode_id", "group_id", "run_id", "write_id")
_CONTEXTS = """
SELECT
    e.episode_id,
    md5(e.initial_messages) || md5(coalesce(e.tools, '')) || md5(s.context) || s.state_hash AS first_context
FROM episodes AS e
JOIN steps AS s ON s.episode_id = e.episode_id AND s.group_id = e.group_id AND s.run_id = e.run_id
WHERE s.step_index = 0 AND e.initial_messages IS NOT NULL
"""
"""Hashes of the initial messages, the tools, and what the first step adds."""


@dataclass(frozen=True, slots=True)
class GroupingReport:
    """What a grouping job did."""

    job_id: int
    series_id: int
    skipped: bool
    """The same episodes and definition already had a result, which is kept."""
    table: pl.DataFrame
    """One row per grouping: grouping, groups, episodes, smallest, largest (members of a group)."""
    notes: list[tuple[str, str, int]]
    """(step, what it left out or left alone, rows), in the order of the steps; rows count every draw."""


def run_grouping(lake: Lake, grouping: Grouping, *, where: str | None = None, force: bool = False) -> GroupingReport:
    """Form groups under another definition and write them to `groupings`, unless there is such a result already.

    Raises:
        DataRefusedError: no episode is selected, or the definition leaves none in a group.
        UsageError: `where`, a SQL predicate over `episodes`, is none.
    """
    snapshot = lake.snapshot()
    episodes = _episodes(snapshot, grouping, where)
    made = regroup(grouping, episodes)
    rows, notes = made.rows, made.notes
    if rows.is_empty():
        why = "; ".join(f"{kind}: {count} {words}" for kind, words, count in notes)
        msg = f"grouping {grouping.name!r} leaves none of {episodes.height} episodes in a group ({why}); loosen a step"
        raise DataRefusedError(msg)
    names = pl.DataFrame(
        {"draw": range(grouping.draws), "grouping": grouping.names}, schema_overrides={"draw": pl.Int32}
    )
    named = rows.join(names, on="draw", how="left").join(episodes.select("episode_id", "run_id"), on="episode_id")
    series = {"grouping": grouping.name, "steps": grouping.model_dump(mode="json")["steps"]}
    job = lake.job(
        kind=KIND,
        parameters=series | {"where": where},
        series=series,
        code=_CODE,
        fingerprint=snapshot.fingerprint(episodes),
        snapshot=snapshot,
    )
    report = GroupingReport(job.job_id, job.series_id, skipped=False, table=_sizes(named), notes=notes)
    found = None if force else lake.find_job(KIND, job.series_id, snapshot.fingerprint(episodes))
    # A job need not run again if it is of this definition and input, and the newest of its name, which readers take.
    if found is not None and found == grouping_job(lake.snapshot(), grouping.name):
        return GroupingReport(found, job.series_id, skipped=True, table=report.table, notes=notes)
    with job:
        job.write("groupings", named.drop("draw"))
        taken = named["episode_id"].n_unique()
        job.counts |= {
            "rows_in": episodes.height,
            "rows_out": named.height,
            "rows_dropped": episodes.height - taken,
            "notes": {f"{kind}: {words}": count for kind, words, count in notes},
        }
    return report


def _episodes(snapshot: Snapshot, grouping: Grouping, where: str | None) -> pl.DataFrame:
    columns = dict.fromkeys((*_KEYS, *(fact for fact in grouping.facts if fact != FIRST_CONTEXT)))
    episodes = select_where(snapshot, tuple(columns), where)
    if FIRST_CONTEXT not in grouping.facts:
        return episodes
    return episodes.join(snapshot.sql(_CONTEXTS), on="episode_id", how="left", maintain_order="left")


def _sizes(named: pl.DataFrame) -> pl.DataFrame:
    members = named.group_by("draw", "grouping", "group_id").agg(members=pl.len().cast(pl.Int64))
    return (
        members.group_by("draw", "grouping")
        .agg(
            groups=pl.len().cast(pl.Int64),
            episodes=pl.col("members").sum(),
            smallest=pl.col("members").min(),
            largest=pl.col("members").max(),
        )
        .sort("draw")
        .drop("draw")
    )
