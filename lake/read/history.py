"""The commits of a lake with their jobs, and the differences between two snapshots.

Advantages are compared within a series (one estimator, one set of parameters, one code), so only changed data makes a
difference.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import polars as pl

from lake import ids
from lake.read.snapshot import Snapshot
from lake.tables import TABLES

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


class CommitLog(Protocol):
    """A lake as `list_commits` reads it; `lake.lake.Lake` is one."""

    def history(self, name: str, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the commits of a table, newest first."""

    def sql(self, query: str) -> pl.DataFrame:
        """Return the rows of one SELECT."""


def list_commits(lake: CommitLog, table: str | None, limit: int) -> pl.DataFrame:
    """List the commits of one table or of all tables, newest first.

    Returns:
        table, version, at, operation (append, compact, forget, ...), rows (written), files_removed, and the job of the
        commit: job_id, kind, run_id. NULL if the commit does not record it.

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
    commits = pl.DataFrame(rows, schema=schema)
    jobs = lake.sql("SELECT job_id, kind, run_id FROM job_runs").cast({"job_id": pl.Int64})
    commits = commits.join(jobs, on="job_id", how="left")
    return commits.sort("at", descending=True, maintain_order=True).select(*_SCHEMA)


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of two snapshots, as frames; a frame without rows means no difference."""

    added: pl.DataFrame
    """Episodes that only the second snapshot shows: episode_id, group_id, run_id, task_id, rollout_index, status."""
    removed: pl.DataFrame
    """Episodes that only the first snapshot shows (retracted or forgotten since), with the same columns."""
    scores: pl.DataFrame
    """Scores that were added, removed or changed: series_id, scorer, episode_id, step_index, before, after, ..."""
    flips: pl.DataFrame
    """Advantages whose sign differs: series_id, episode_id, step_index, group_id, run_id, before, after."""

    def summary(self) -> pl.DataFrame:
        """Count the rows of each kind of change: change, rows."""
        return pl.DataFrame(
            {
                "change": ["episodes added", "episodes removed", "scores changed", "advantages whose sign flipped"],
                "rows": [len(self.added), len(self.removed), len(self.scores), len(self.flips)],
            }
        )


def compare_snapshots(before: Snapshot, after: Snapshot) -> Difference:
    """Compare two snapshots of one lake."""
    columns = ["episode_id", "group_id", "run_id", "task_id", "rollout_index", "status"]
    old, new = (side.scan("episodes").select(columns) for side in (before, after))
    added = new.join(old, on="episode_id", how="anti").sort(columns[1:3] + columns[:1]).collect()
    removed = old.join(new, on="episode_id", how="anti").sort(columns[1:3] + columns[:1]).collect()
    keys = ["series_id", "scorer", "scorer_version", "episode_id", "step_index", "run_id"]
    was, now = (side.sql(f"SELECT {', '.join(keys)}, value FROM latest_scores") for side in (before, after))
    pairs = was.rename({"value": "before"}).join(
        now.rename({"value": "after"}), on=keys, how="full", coalesce=True, nulls_equal=True
    )
    scores = pairs.filter(pl.col("before").ne_missing(pl.col("after"))).sort(keys, nulls_last=True)
    keys = ["series_id", "episode_id", "step_index"]
    query = "SELECT series_id, episode_id, step_index, group_id, run_id, advantage FROM latest_advantages"
    was, now = (side.sql(query) for side in (before, after))
    pairs = was.select(*keys, before="advantage").join(now.rename({"advantage": "after"}), on=keys, how="inner")
    flips = pairs.filter(pl.col("before").sign() != pl.col("after").sign()).sort(keys)
    return Difference(added, removed, scores, flips)
