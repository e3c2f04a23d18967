"""Groupings: which there are, the newest job of a name, and its members."""

import polars as pl

from lake.errors import UsageError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot

_NEWEST = """
WITH named AS (SELECT DISTINCT grouping, split_part(grouping, '/', 1) AS name, job_id FROM groupings),

newest AS (
    SELECT name, arg_max(job_id, ended_order(sequence, ended_at, job_id)) AS job_id
    FROM named JOIN job_runs USING (job_id) GROUP BY name
)

SELECT name, grouping, job_id FROM named JOIN newest USING (name, job_id) ORDER BY grouping
"""
"""Groupings under their newest definition: the draws of an older one of the same name are gone."""


def grouping_job(snapshot: Snapshot, name: str) -> int | None:
    """The newest succeeded job that wrote a grouping's name, or any draw of it; None if none did."""
    found = snapshot.sql(_NEWEST).filter(pl.col("name") == name.partition("/")[0])
    return None if found.is_empty() else int(found["job_id"][0])


def read_grouping(snapshot: Snapshot, name: str) -> pl.DataFrame:
    """Members of a grouping under its newest definition.

    Args:
        name: a definition's name; with several draws that of one draw, for example `half/0`.

    Returns:
        episode_id, group_id, collected_group_id: one row per episode, which is in one group.

    Raises:
        UsageError: no such grouping.
    """
    known = snapshot.sql(_NEWEST)
    job = known.filter(pl.col("grouping") == name)["job_id"].to_list()
    if not job:
        there = f"there are {', '.join(known['grouping'])}" if known.height else "there is none yet"
        raise UsageError(f"no grouping {name!r}; {there}. Make one with `trajlake group`")
    mine = snapshot.scan("groupings").filter((pl.col("job_id") == job[0]) & (pl.col("grouping") == name))
    return collected(mine.select("episode_id", "group_id", "collected_group_id"))
