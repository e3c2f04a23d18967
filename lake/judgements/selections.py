"""Which selection or grouping is meant: the newest job of a name, and what it kept or how it grouped.

A selection is named by a select job's id, by the beginning of one, or by its own name, which means its newest job.
Episodes that the job dropped, or never saw, are not trained on. Single steps that it dropped carry no loss; their
tokens stay in their sequence as context.
"""

from dataclasses import dataclass

import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.read.text_table import counted

_JOBS = """
SELECT job_id, selection FROM (SELECT DISTINCT job_id, selection FROM selections) JOIN job_runs USING (job_id)
ORDER BY ended_order(sequence, ended_at, job_id) DESC
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a select job left."""

    job_id: int
    name: str
    """Of the selection."""
    episodes: pl.DataFrame
    """episode_id: the episodes it kept."""
    dropped_steps: pl.DataFrame
    """episode_id, step_index: single steps it dropped out of them."""

    def describe(self) -> str:
        """For messages: the name, the job and what is left."""
        steps = f", without {self.dropped_steps.height} of their steps" if self.dropped_steps.height else ""
        return f"{self.name} (select job {ids.to_text(self.job_id)}): {counted(self.episodes.height, 'episode')}{steps}"


def selection_job(snapshot: Snapshot, name: str) -> int | None:
    """The newest succeeded job that wrote a selection of that name; None if none did."""
    found = snapshot.sql(_JOBS).filter(selection=name)
    return None if found.is_empty() else int(found["job_id"][0])


def read_kept(snapshot: Snapshot, wanted: str) -> Kept:
    """What a selection kept.

    Args:
        wanted: a select job's id, the beginning of one, or the name of a selection.

    Raises:
        UsageError: no such selection, or several jobs begin like that.
    """
    jobs = snapshot.sql(_JOBS)
    texts = pl.Series([ids.to_text(job) for job in jobs["job_id"]], dtype=pl.String)
    named = jobs.filter(pl.col("selection") == wanted).head(1)
    found = named if named.height else jobs.filter(texts.str.starts_with(wanted.strip().lower()))
    if not wanted.strip() or found.height != 1:
        fault = "begins several select jobs" if wanted.strip() and found.height else "names no select job"
        newest = ", ".join(f"{name} ({ids.to_text(job)})" for job, name in jobs.head(5).rows())
        msg = f"--selection {wanted!r} {fault}; the newest: {newest or 'none, make one with `trajlake select`'}"
        raise UsageError(msg)
    job_id, name = found.row(0)
    rows = snapshot.scan("selections").filter(pl.col("job_id") == job_id)
    whole = pl.col("step_index").is_null()
    episodes = collected(rows.filter(whole & pl.col("kept")).select("episode_id"))
    steps = rows.filter(~whole & ~pl.col("kept")).select("episode_id", "step_index")
    return Kept(job_id, name, episodes, collected(steps.join(episodes.lazy(), on="episode_id", how="semi")))


GROUPINGS = """
WITH named AS (SELECT DISTINCT grouping, split_part(grouping, '/', 1) AS name, job_id FROM groupings),

newest AS (
    SELECT name, arg_max(job_id, ended_order(sequence, ended_at, job_id)) AS job_id
    FROM named JOIN job_runs USING (job_id) GROUP BY name
)

SELECT name, grouping, job_id FROM named JOIN newest USING (name, job_id) ORDER BY grouping
"""
"""name, grouping (the name, or a draw of it: `half/0`) and job_id of the groupings under their newest definition: the
draws of an older one of the same name are gone."""


def grouping_job(snapshot: Snapshot, name: str) -> int | None:
    """The newest succeeded job that wrote a grouping's name, or any draw of it; None if none did."""
    found = snapshot.sql(GROUPINGS).filter(pl.col("name") == name.partition("/")[0])
    return None if found.is_empty() else int(found["job_id"][0])


def read_grouping(snapshot: Snapshot, name: str) -> pl.DataFrame:
    """Members of a grouping under its newest definition: episode_id, group_id, collected_group_id, a row per episode.

    Args:
        name: a definition's name; with several draws that of one draw, for example `half/0`.

    Raises:
        UsageError: no such grouping.
    """
    known = snapshot.sql(GROUPINGS)
    job = known.filter(pl.col("grouping") == name)["job_id"].to_list()
    if not job:
        there = f"there are {', '.join(known['grouping'])}" if known.height else "there is none yet"
        raise UsageError(f"no grouping {name!r}; {there}. Make one with `trajlake group`")
    mine = snapshot.scan("groupings").filter((pl.col("job_id") == job[0]) & (pl.col("grouping") == name))
    return collected(mine.select("episode_id", "group_id", "collected_group_id"))
