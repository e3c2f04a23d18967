"""Looking after a lake: the commits of its tables, and the doctor's checks."""

from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from lake import ids
from lake.columns import Visibility
from lake.errors import TrajlakeError, UsageError
from lake.lake import Lake
from lake.rivals import find_rivals
from lake.snapshot import Snapshot
from lake.tables import TABLES

_COMMIT_SCHEMA: dict[str, pl.DataType] = {
    "table": pl.String(),
    "version": pl.Int64(),
    "at": pl.Datetime("ms", "UTC"),
    "operation": pl.String(),
    "rows_added": pl.Int64(),
    "files_added": pl.Int64(),
}
_CHECKS = {
    "steps have no gaps": (
        "SELECT id_text(e.episode_id) || ' has ' || coalesce(s.n, 0) || ' of ' || e.num_steps || ' steps' AS what"
        " FROM episodes e LEFT JOIN (SELECT episode_id, count(*) AS n, max(step_index) AS last FROM steps GROUP BY 1) s"
        " USING (episode_id) WHERE s.n IS DISTINCT FROM e.num_steps OR s.last <> e.num_steps - 1"
    ),
    "every step has an episode": (
        "SELECT id_text(episode_id) || ' has steps but no episode' AS what"
        " FROM (SELECT DISTINCT episode_id FROM steps) ANTI JOIN episodes USING (episode_id)"
    ),
    "jobs end once": (
        "SELECT id_text(job_id) || ' has ' || count(*) || ' terminal rows' AS what"
        " FROM jobs WHERE event <> 'started' GROUP BY job_id HAVING count(*) > 1"
    ),
}


def commits(lake: Lake, table: str | None, limit: int) -> pl.DataFrame:
    """Commits of one table or of all, newest first: table, version, at, operation, rows_added, files_added.

    Raises:
        UsageError: no such table.
    """
    if table is not None and table not in TABLES:
        msg = f"there is no table `{table}`; the tables are {', '.join(TABLES)}"
        raise UsageError(msg)
    rows = []
    for name in [table] if table else TABLES:
        for entry in lake.history(name, limit):
            metrics = entry.get("operationMetrics") or {}
            rows.append(
                {
                    "table": name,
                    "version": entry.get("version"),
                    "at": datetime.fromtimestamp(entry["timestamp"] / 1000, UTC),
                    "operation": entry.get("operation"),
                    "rows_added": _number(metrics.get("num_added_rows")),
                    "files_added": _number(metrics.get("num_added_files")),
                }
            )
    frame = pl.DataFrame(rows, schema=_COMMIT_SCHEMA)
    return frame.sort("at", descending=True, maintain_order=True)


def examine(lake: Lake) -> pl.DataFrame:
    """The doctor's findings: check, verdict (fine | note | wrong), detail."""
    snapshot = lake.snapshot()
    findings = [_installation(), _files(snapshot)]
    if findings[-1][1] == "wrong":
        return _findings(findings)
    for check, query in _CHECKS.items():
        findings.append(_from_query(snapshot, check, query))
    for name, table in TABLES.items():
        key = ", ".join(table.key)
        query = f"SELECT count(*) || ' rows of one key' AS what FROM {name} GROUP BY {key} HAVING count(*) > 1"
        if name not in ("batches", "metrics"):  # resumed attempts repeat keys; their views choose
            findings.append(_from_query(snapshot, f"keys of {name} are unique", query))
    findings += [_dead(snapshot), _unfinished(snapshot), _space(snapshot)]
    return _findings(findings)


def _findings(findings: list[tuple[str, str, str]]) -> pl.DataFrame:
    return pl.DataFrame(findings, schema=["check", "verdict", "detail"], orient="row")


def _installation() -> tuple[str, str, str]:
    rivals = find_rivals()
    return ("the four packages are ours", "wrong" if rivals else "fine", "; ".join(rivals))


def _files(snapshot: Snapshot) -> tuple[str, str, str]:
    damaged: list[str] = []
    # What counts of the other tables is said by those that are always visible: without them there is no look further.
    for name in sorted(TABLES, key=lambda name: TABLES[name].visibility is Visibility.ACCEPTED):
        if damaged and TABLES[name].visibility is Visibility.ACCEPTED:
            break
        if snapshot.versions[name] == -1:
            damaged.append(f"the table {name} is missing")
        for file in snapshot.files(name):
            try:
                # Decoded, not just opened: a flipped byte shows nowhere else.
                found = pl.read_parquet(file.path).height
            except (OSError, pl.exceptions.PolarsError) as error:
                damaged.append(f"{Path(file.path).name} of {name}: {str(error).splitlines()[0]}")
                continue
            if found != file.rows:
                damaged.append(f"{Path(file.path).name} of {name} has {found} rows, the log says {file.rows}")
    advice = "; restore the files from a backup, or ingest their source again into a new lake" if damaged else ""
    return ("every file is there and readable", "wrong" if damaged else "fine", "; ".join(damaged[:5]) + advice)


def _from_query(snapshot: Snapshot, check: str, query: str) -> tuple[str, str, str]:
    try:
        found = snapshot.sql(query)["what"].to_list()
    except TrajlakeError as error:
        return (check, "wrong", str(error))
    more = f" (+{len(found) - 3} more)" if len(found) > 3 else ""
    return (check, "wrong" if found else "fine", "; ".join(found[:3]) + more)


def _dead(snapshot: Snapshot) -> tuple[str, str, str]:
    dead = snapshot.dead_write_ids
    names = ", ".join(ids.to_text(write_id) for write_id in sorted(dead)[:3])
    detail = f"{len(dead)} write attempts never became visible (killed or racing writers): {names}" if dead else ""
    return ("dead writes", "note" if dead else "fine", detail)


def _unfinished(snapshot: Snapshot) -> tuple[str, str, str]:
    open_jobs = snapshot.sql("SELECT kind, count(*) AS n FROM job_runs WHERE status = 'started' GROUP BY 1 ORDER BY 1")
    detail = ", ".join(f"{n} {kind}" for kind, n in open_jobs.iter_rows())
    return ("unfinished jobs", "note" if detail else "fine", f"{detail}: running, or killed" if detail else "")


def _space(snapshot: Snapshot) -> tuple[str, str, str]:
    sizes = {name: snapshot.size(name) for name in TABLES}
    parts = [f"{name} {n_bytes / 1e6:.1f} MB in {files} files" for name, (files, _, n_bytes) in sizes.items() if files]
    return ("disk use", "fine", ", ".join(parts))


def _number(value: object) -> int | None:
    return None if value is None else int(str(value))
