"""Lineage: jobs with their parameters and counts, and the input that was rejected."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from lake.documents import json_object
from lake.judgements import credit as judgement
from lake.judgements.credit import Credit
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


def settings(document: str | None) -> dict[str, str]:
    """A job's parameters, one for each value: `config.gamma` of nested ones, lists as JSON; {} of what is no object."""
    flat: dict[str, str] = {}
    todo: list[tuple[str, Any]] = [("", json_object(document))]
    while todo:
        path, value = todo.pop()
        if isinstance(value, Mapping) and value:
            todo += [(f"{path}.{name}" if path else str(name), inner) for name, inner in value.items()]
        elif path:
            is_word = isinstance(value, str) and not _is_json(value)
            flat[path] = str(value) if is_word else json.dumps(value, ensure_ascii=False)
    return flat


def _is_json(text: str) -> bool:
    """Whether a text would look like a number, a list, ... without quotes."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def jobs_beside(lake: Reads, one: int, other: int) -> pl.DataFrame:
    """The parameters of two jobs, as `beside` has them."""
    query = "SELECT job_id, parameters FROM job_runs WHERE job_id IN (?, ?)"
    found = dict(lake.sql(query, [one, other]).iter_rows())
    return beside(found.get(one), found.get(other))


def beside(one: str | None, other: str | None) -> pl.DataFrame:
    """Parameters of two jobs side by side, those that differ first: setting, a, b, differs; NULL where a job has none.

    Args:
        one: the first job's parameters, as JSON.
        other: the second's.
    """
    a, b = settings(one), settings(other)
    rows = [(name, a.get(name), b.get(name), a.get(name) != b.get(name)) for name in a.keys() | b.keys()]
    schema = {"setting": pl.String, "a": pl.String, "b": pl.String, "differs": pl.Boolean}
    return pl.DataFrame(rows, schema, orient="row").sort(["differs", "setting"], descending=[True, False])


def jobs_of_runs(lake: Reads, one: str, other: str) -> pl.DataFrame:
    """The newest job of each kind that both runs have: kind, a, b (ids), a_parameters, b_parameters; by kind."""
    newest = """
        SELECT kind, job_id, parameters FROM job_runs WHERE run_id = ${0}
        QUALIFY row_number() OVER (PARTITION BY kind ORDER BY started_at DESC, job_id) = 1
        """
    query = f"""
        SELECT kind, a.job_id AS a, b.job_id AS b, a.parameters AS a_parameters, b.parameters AS b_parameters
        FROM ({newest.format("one")}) AS a JOIN ({newest.format("other")}) AS b USING (kind) ORDER BY kind
        """
    return lake.sql(query, {"one": one, "other": other})


def settings_between(lake: Reads, one: str, other: str) -> list[str]:
    """Names of the parameters that the newest jobs of two runs, kind by kind, were told differently."""
    names: dict[str, None] = {}
    for row in jobs_of_runs(lake, one, other).iter_rows(named=True):
        names |= dict.fromkeys(beside(row["a_parameters"], row["b_parameters"]).filter("differs")["setting"])
    return list(names)


def like_it(lake: Reads, job_id: int, beside: int | None = None, limit: int = 200) -> pl.DataFrame:
    """Other jobs of a job's kind, the newest first: job_id, kind, run_id, parameters (cut), started_at.

    `beside` is among them however old it is, if it is one.
    """
    query = f"""
        SELECT job_id, kind, run_id, left(parameters, {DOCUMENT}) AS parameters, started_at FROM job_runs
        WHERE kind = (SELECT any_value(kind) FROM job_runs WHERE job_id = $job) AND job_id <> $job
        ORDER BY job_id IS NOT DISTINCT FROM $beside DESC, started_at DESC, job_id LIMIT $limit
        """
    return lake.sql(query, {"job": job_id, "beside": beside, "limit": limit}).sort(
        "started_at", descending=True, nulls_last=True, maintain_order=True
    )


def taken_back(lake: Reads, episode_ids: Sequence[int]) -> list[Row]:
    """Why episodes were taken back, the last time of each, newest first: episode_id, kind, at, reason, superseded_by.

    None of those that never were.
    """
    query = """
        SELECT episode_id, kind, "at", left(reason, 1000) AS reason, superseded_by FROM current_retractions
        WHERE episode_id IN (SELECT unnest($episodes::BIGINT[]))
        QUALIFY row_number() OVER (PARTITION BY episode_id ORDER BY "at" DESC) = 1
        ORDER BY "at" DESC, episode_id
        """
    return lake.sql(query, {"episodes": list(episode_ids)}).to_dicts()


def group_taken_back(lake: Reads, group_id: int) -> list[Row]:
    """As `taken_back`, of the episodes that a group was collected with."""
    return taken_back(lake, lake.members(group_id))


def changed_groups(lake: Reads, credit: Credit) -> pl.DataFrame:
    """The groups that make a credit older than the data, by name: run_id, task_id, collection_round, lost, joined, ...

    As `lake.judgements.credit.changed_groups` has them; of a grouping, the names are those of any of its episodes.
    """
    found = judgement.changed_groups(lake, credit)
    query = """
        SELECT group_id, any_value(run_id) AS run_id, any_value(task_id) AS task_id,
               any_value(collection_round) AS collection_round
        FROM (SELECT group_id, run_id, task_id, collection_round FROM episodes
              UNION ALL SELECT g.group_id, e.run_id, e.task_id, e.collection_round
              FROM groupings AS g JOIN episodes AS e USING (episode_id))
        WHERE group_id IN (SELECT unnest($groups::BIGINT[])) GROUP BY group_id
        """
    named = lake.sql(query, {"groups": found["group_id"].to_list()})
    return found.join(named, on="group_id", how="left", maintain_order="left")


def taken_back_since(lake: Reads, credit: Credit, limit: int = 20) -> pl.DataFrame:
    """Why episodes were taken back since a credit was computed: kind, reason (cut), episodes; most episodes first."""
    query = f"""
        SELECT kind, left(reason, {EXCERPT}) AS reason, count(DISTINCT episode_id) AS episodes FROM retractions
        WHERE "at" > (SELECT max(ended_at) FROM job_runs WHERE series_id = $series AND status = 'succeeded')
        GROUP BY ALL ORDER BY episodes DESC, kind, reason LIMIT $limit
        """
    return lake.sql(query, {"series": credit.series_id, "limit": limit})


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
