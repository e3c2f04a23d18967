"""Lineage: jobs with their parameters and counts, and the input that was rejected."""

import polars as pl

from viewer.queries import EXCERPT, Params, Reads, Row, Sort, Window, count, only_row, order_by, themselves

DOCUMENT = 100_000
"""Characters of a document that a page shows."""


JOB_ORDERS = themselves("kind", "status", "run_id", "started_at", "seconds", "rows_in", "rows_out", "rows_dropped")
"""Columns that may order jobs."""
REJECT_ORDERS = themselves("reason", "source_uri", "position", "source_format", "run_id", "at")
"""Columns that may order rejects."""


def jobs_page(
    lake: Reads, kind: str | None, status: str | None, window: Window, sort: Sort | None = None
) -> pl.DataFrame:
    """A page of the jobs, newest first if nothing else is asked for."""
    where, params = _conditions(kind=kind, status=status)
    query = f"""
        SELECT job_id, kind, status, run_id, parameters, started_at, seconds, rows_in, rows_out, rows_dropped,
               left(error, {EXCERPT}) AS error
        FROM job_runs WHERE {where}
        ORDER BY {order_by(sort, JOB_ORDERS, "started_at DESC, job_id")} LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | window.params())


def jobs_total(lake: Reads, kind: str | None, status: str | None) -> int:
    """Number of jobs of a filter."""
    where, params = _conditions(kind=kind, status=status)
    return count(lake, f"SELECT count(*) FROM job_runs WHERE {where}", params or None)


def job_kinds(lake: Reads) -> list[str]:
    """Kinds of the jobs there are."""
    return lake.sql("SELECT DISTINCT kind FROM job_runs ORDER BY kind LIMIT 100")["kind"].to_list()


def job(lake: Reads, job_id: int) -> Row | None:
    """A job with its documents (cut), or None if there is no such job."""
    query = f"""
        SELECT r.* REPLACE (left(r.parameters, {DOCUMENT}) AS parameters, left(r.counts, {DOCUMENT}) AS counts,
                            left(r.error, {DOCUMENT}) AS error, left(r.input_snapshot, {DOCUMENT}) AS input_snapshot),
               s.code_hash, s.package_version
        FROM job_runs AS r JOIN jobs AS s ON s.job_id = r.job_id AND s.event = 'started' WHERE r.job_id = ?
        """
    return only_row(lake.sql(query, [job_id]))


def taken_back(lake: Reads, episode_id: int) -> Row | None:
    """Why readers no longer see an episode: kind, at, reason, superseded_by, job_id; None if they never did, or do."""
    query = (
        'SELECT kind, "at", left(reason, 1000) AS reason, superseded_by, job_id FROM retractions WHERE episode_id = ?'
    )
    return only_row(lake.sql(f'{query} ORDER BY "at" DESC LIMIT 1', [episode_id]))


def rejects_page(
    lake: Reads, reason: str | None, run: str | None, window: Window, sort: Sort | None = None
) -> pl.DataFrame:
    """A page of the rejects, newest first if nothing else is asked for."""
    where, params = _conditions(reason=reason, run_id=run)
    query = f"""
        SELECT reject_id, "at", run_id, source_uri, source_format, position, reason, left(message, {EXCERPT}) AS message
        FROM rejects WHERE {where}
        ORDER BY {order_by(sort, REJECT_ORDERS, '"at" DESC, source_uri, position, reject_id')}
        LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | window.params())


def rejects_total(lake: Reads, reason: str | None, run: str | None) -> int:
    """Number of rejects of a filter."""
    where, params = _conditions(reason=reason, run_id=run)
    return count(lake, f"SELECT count(*) FROM rejects WHERE {where}", params or None)


def reject_reasons(lake: Reads) -> dict[str, int]:
    """Number of rejects by reason."""
    return dict(lake.sql("SELECT reason, count(*) FROM rejects GROUP BY reason ORDER BY reason").iter_rows())


def reject(lake: Reads, reject_id: int) -> Row | None:
    """A reject with its text (cut) and raw_length, or None if there is no such reject."""
    query = f"""
        SELECT * EXCLUDE (raw), left(raw, {DOCUMENT}) AS raw, length(raw) AS raw_length FROM rejects WHERE reject_id = ?
        """
    return only_row(lake.sql(query, [reject_id]))


def _conditions(**equal: str | None) -> tuple[str, Params]:
    """The WHERE clause of columns that must equal a value (None: any), and its parameters."""
    params: Params = {name: value for name, value in equal.items() if value is not None}
    return " AND ".join(f"{name} = ${name}" for name in params) or "true", params
