"""The commits of a lake, each with the job that made it, and what changed between two snapshots.

Advantages are compared within a series (one estimator, one set of parameters, one code): what changed is the data.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.read.snapshot import Snapshot
from lake.tables import TABLES

if TYPE_CHECKING:
    from lake.lake import Lake

_SCHEMA: dict[str, pl.DataType] = {
    "table": pl.String(),
    "version": pl.Int64(),
    "at": pl.Datetime("ms", "UTC"),
    "operation": pl.String(),
    "rows": pl.Int64(),
    "files_removed": pl.Int64(),
    "job_id": pl.Int64(),
    "kind": pl.String(),
    "run_id": pl.String(),
}


def commits(lake: "Lake", table: str | None, limit: int) -> pl.DataFrame:
    """Commits of one table or of all, newest first.

    Returns:
        table, version, at, operation (append, compact, forget, ...), rows it wrote, files_removed, and the job that did
        it: job_id, kind, run_id. NULL where the commit does not say.

    Raises:
        UsageError: no such table.
    """
    rows = []
    for name in [table] if table else TABLES:
        for entry in lake.history(name, limit):
            note = entry["note"]
            at = note.get("at")
            rows.append(
                {
                    "table": name,
                    "version": entry.get("version"),
                    "at": datetime.fromisoformat(at) if at else datetime.fromtimestamp(entry["timestamp"] / 1000, UTC),
                    "operation": note.get("operation") or str(entry.get("operation", "")).lower(),
                    "rows": note.get("rows"),
                    "files_removed": note.get("removed"),
                    "job_id": ids.from_text(note["job"]) if "job" in note else None,
                }
            )
    schema = {name: dtype for name, dtype in _SCHEMA.items() if name not in ("kind", "run_id")}
    found = pl.DataFrame(rows, schema=schema)
    jobs = lake.sql("SELECT job_id, kind, run_id FROM job_runs").cast({"job_id": pl.Int64})
    return found.join(jobs, on="job_id", how="left").sort("at", descending=True, maintain_order=True).select(*_SCHEMA)


@dataclass(frozen=True, slots=True)
class Difference:
    """Frames of what differs; empty where nothing does."""

    added: pl.DataFrame
    """Episodes only the second snapshot shows: episode_id, group_id, run_id, task_id, rollout_index, status."""
    removed: pl.DataFrame
    """Episodes only the first one shows (retracted or forgotten since), likewise."""
    scores: pl.DataFrame
    """Scores that are new, gone or other: series_id, scorer, episode_id, step_index, before, after, ..."""
    flips: pl.DataFrame
    """Advantages of both whose sign differs: series_id, episode_id, step_index, group_id, run_id, before, after."""

    def summary(self) -> pl.DataFrame:
        """One row a kind of change: change, rows."""
        return pl.DataFrame(
            {
                "change": ["episodes added", "episodes removed", "scores changed", "advantages whose sign flipped"],
                "rows": [len(self.added), len(self.removed), len(self.scores), len(self.flips)],
            }
        )


def difference(before: Snapshot, after: Snapshot) -> Difference:
    """Compare two snapshots of one lake."""
    columns = ["episode_id", "group_id", "run_id", "task_id", "rollout_index", "status"]
    old, new = (side.scan("episodes").select(columns) for side in (before, after))
    added = new.join(old, on="episode_id", how="anti").sort(columns[1:3] + columns[:1]).collect()
    removed = old.join(new, on="episode_id", how="anti").sort(columns[1:3] + columns[:1]).collect()
    keys = ["series_id", "scorer", "scorer_version", "episode_id", "step_index", "run_id"]
    was, now = (side.sql(f"SELECT {', '.join(keys)}, value FROM latest_scores") for side in (before, after))
    both = was.rename({"value": "before"}).join(
        now.rename({"value": "after"}), on=keys, how="full", coalesce=True, nulls_equal=True
    )
    scores = both.filter(pl.col("before").ne_missing(pl.col("after"))).sort(keys, nulls_last=True)
    keys = ["series_id", "episode_id", "step_index"]
    query = "SELECT series_id, episode_id, step_index, group_id, run_id, advantage FROM latest_advantages"
    was, now = (side.sql(query) for side in (before, after))
    both = was.select(*keys, before="advantage").join(now.rename({"advantage": "after"}), on=keys, how="inner")
    flips = both.filter(pl.col("before").sign() != pl.col("after").sign()).sort(keys)
    return Difference(added, removed, scores, flips)
