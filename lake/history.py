"""The commits of a lake, newest first, each with the job that made it."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.errors import UsageError
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

    Args:
        lake: whose.
        table: one table, or None for all.
        limit: commits a table.

    Returns:
        table, version, at, operation (append, compact, forget, ...), rows it wrote, files_removed, and the job that did
        it: job_id, kind, run_id. NULL where the commit does not say.

    Raises:
        UsageError: no such table.
    """
    if table is not None and table not in TABLES:
        msg = f"there is no table `{table}`; the tables are {', '.join(TABLES)}"
        raise UsageError(msg)
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
