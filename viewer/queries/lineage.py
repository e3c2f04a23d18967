"""Lineage: jobs with parameters and counts, rejects, retractions, and differences between two states of a lake."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from lake.documents import parse_json_object
from lake.judgements import credit as judgement
from lake.judgements.credit import Credit
from lake.read.history import Difference, compare_snapshots
from lake.read.snapshot import Snapshot, SnapshotReader
from lake.read.text_table import count_noun
from lake.tables import TABLES
from viewer.queries import (
    EXCERPT,
    LakeReader,
    ListWindow,
    Params,
    Row,
    Sort,
    build_id_list,
    build_sort_terms,
    count,
    get_first_row,
    order_by,
)
from viewer.queries.compare import Side

DOCUMENT = 100_000
"""Largest number of characters of a document on a page."""


JOB_ORDERS = build_sort_terms(
    "kind", "status", "run_id", "started_at", "seconds", "rows_in", "rows_out", "rows_dropped"
)
"""Columns that may order jobs."""
REJECT_ORDERS = build_sort_terms("reason", "source_uri", "position", "source_format", "run_id", "at")
"""Columns that may order rejects."""


_FIRST_ROUND, _LAST_ROUND = (
    f"TRY_CAST(TRY(coalesce(parameters ->> '$.plan.round', counts ->> '$.{name}_round')) AS BIGINT)"
    for name in ("first", "last")
)
"""SQL of the rounds that a job names in its plan or its counts."""


def read_jobs(
    lake: LakeReader, kind: str | None, status: str | None, window: ListWindow, sort: Sort | None = None
) -> pl.DataFrame:
    """Return a page of the jobs, by default the newest first, with the rounds that each names itself.

    `read_job_rounds` also knows the rounds of what a job read, which takes a look at all groups.
    """
    where, params = _build_conditions(kind=kind, status=status)
    query = f"""
        SELECT job_id, kind, status, run_id, parameters, started_at, seconds, rows_in, rows_out, rows_dropped,
               {_FIRST_ROUND} AS first_round, {_LAST_ROUND} AS last_round,
               left(error, {EXCERPT}) AS error
        FROM job_runs WHERE {where}
        ORDER BY {order_by(sort, JOB_ORDERS, "started_at DESC, job_id")} LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | window.params())


_READS = dict.fromkeys(("scores", "credit_groups", "selections", "ratios"), "group_id") | {
    "groupings": "collected_group_id AS group_id"
}
"""Tables of jobs, with the column of the collected groups that they read."""


def read_job_rounds(lake: LakeReader, job_ids: Sequence[int]) -> pl.DataFrame:
    """Return the first and the last collection round of each job: job_id, first_round, last_round; unknown: no row.

    A job that collected names them in its plan or its counts. A run that one job collected has no other. Other jobs
    have the rounds of the groups that they read, or of the episodes that they trained on, of all runs together.
    """
    mine = f"job_id IN ({build_id_list(job_ids)})"
    reads = " UNION ".join(f"SELECT job_id, {group} FROM {table} WHERE {mine}" for table, group in _READS.items())
    query = f"""
        WITH wrote AS (
            SELECT job_id, run_id, {_FIRST_ROUND} AS first_round, {_LAST_ROUND} AS last_round,
                   count(*) OVER (PARTITION BY run_id) AS writers
            FROM job_runs WHERE kind IN ('collect', 'ingest', 'record') AND run_id IS NOT NULL
        ),
        rounds AS (
            SELECT job_id, unnest([first_round, last_round]) AS round FROM wrote WHERE {mine}
            UNION ALL SELECT DISTINCT job_id, collection_round FROM wrote JOIN episodes USING (run_id)
            WHERE {mine} AND writers = 1 AND first_round IS NULL
            UNION ALL SELECT job_id, collection_round FROM ({reads})
            JOIN (SELECT DISTINCT group_id, collection_round FROM episodes) USING (group_id)
            UNION ALL SELECT DISTINCT job_id, collection_round FROM trained_batches JOIN episodes USING (episode_id)
            WHERE {mine}
        )
        SELECT job_id, min(round) AS first_round, max(round) AS last_round FROM rounds
        WHERE round IS NOT NULL GROUP BY job_id
        """
    return lake.sql(query)


def count_jobs(lake: LakeReader, kind: str | None, status: str | None) -> int:
    """Count the jobs of a filter."""
    where, params = _build_conditions(kind=kind, status=status)
    return count(lake, f"SELECT count(*) FROM job_runs WHERE {where}", params or None)


def list_job_kinds(lake: LakeReader) -> list[str]:
    """Return the kinds of the lake's jobs."""
    return lake.sql("SELECT DISTINCT kind FROM job_runs ORDER BY kind LIMIT 100")["kind"].to_list()


def read_job(lake: LakeReader, job_id: int) -> Row | None:
    """Return a job with its documents (cut); None for an unknown job."""
    query = f"""
        SELECT r.* REPLACE (left(r.parameters, {DOCUMENT}) AS parameters, left(r.counts, {DOCUMENT}) AS counts,
                            left(r.error, {DOCUMENT}) AS error, left(r.input_snapshot, {DOCUMENT}) AS input_snapshot),
               s.code_hash, s.package_version
        FROM job_runs AS r JOIN jobs AS s ON s.job_id = r.job_id AND s.event = 'started' WHERE r.job_id = ?
        """
    return get_first_row(lake.sql(query, [job_id]))


def count_missing_scores(lake: LakeReader, job_id: int, limit: int = 50) -> pl.DataFrame:
    """Count the scores without a value of a job by reason: scorer, reason (the error, if any), scores; most first."""
    query = f"""
        SELECT scorer, left(coalesce(error, reason), {EXCERPT}) AS reason, count(*) AS scores
        FROM scores WHERE job_id = ? AND value IS NULL GROUP BY ALL ORDER BY scores DESC, scorer, reason LIMIT ?
        """
    return lake.sql(query, [job_id, limit])


def flatten_settings(document: str | None) -> dict[str, str]:
    """Flatten a job's parameters: `config.gamma` for nested ones, lists as JSON; {} unless an object."""
    flat: dict[str, str] = {}
    stack: list[tuple[str, Any]] = [("", parse_json_object(document))]
    while stack:
        path, value = stack.pop()
        if isinstance(value, Mapping) and value:
            stack += [(f"{path}.{name}" if path else str(name), inner) for name, inner in value.items()]
        elif path:
            is_word = isinstance(value, str) and not _is_json(value)
            flat[path] = str(value) if is_word else json.dumps(value, ensure_ascii=False)
    return flat


def _is_json(text: str) -> bool:
    """Return whether a text would read as a number, a list, ... without quotes."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def compare_jobs(lake: LakeReader, job_a: int, job_b: int) -> pl.DataFrame:
    """Compare the parameters of two jobs as in `compare_settings`."""
    query = "SELECT job_id, parameters FROM job_runs WHERE job_id IN (?, ?)"
    parameters = dict(lake.sql(query, [job_a, job_b]).iter_rows())
    return compare_settings(parameters.get(job_a), parameters.get(job_b))


def compare_settings(parameters_a: str | None, parameters_b: str | None) -> pl.DataFrame:
    """Compare parameters of two jobs, given as JSON, different ones first: setting, a, b, differs.

    A setting that a job lacks is NULL.
    """
    a, b = flatten_settings(parameters_a), flatten_settings(parameters_b)
    rows = [(name, a.get(name), b.get(name), a.get(name) != b.get(name)) for name in a.keys() | b.keys()]
    schema = {"setting": pl.String, "a": pl.String, "b": pl.String, "differs": pl.Boolean}
    return pl.DataFrame(rows, schema, orient="row").sort(["differs", "setting"], descending=[True, False])


def pair_newest_jobs(lake: LakeReader, side_a: Side, side_b: Side) -> pl.DataFrame:
    """Return the newest job of each kind that both sides have: kind, a, b (ids), a_parameters, b_parameters; by kind.

    A side has the jobs of its run and the job of its credit. A side that is a part of a run has those of its rounds.
    """
    a, b = (
        _read_newest_jobs(lake, side).rename({"job_id": name, "parameters": f"{name}_parameters"})
        for name, side in (("a", side_a), ("b", side_b))
    )
    return a.join(b, on="kind").select("kind", "a", "b", "a_parameters", "b_parameters").sort("kind")


def _read_newest_jobs(lake: LakeReader, side: Side) -> pl.DataFrame:
    credit = side.credit
    query = """
        SELECT kind, job_id, parameters FROM job_runs
        WHERE run_id = $run OR (kind = 'credit' AND series_id = $series AND coalesce(job_id = $job, true))
        ORDER BY started_at DESC, job_id
        """
    params = {"run": side.run, "series": credit and credit.series_id, "job": credit and credit.job_id}
    jobs = lake.sql(query, params)
    if side != Side(side.run):
        mine, params = side.episodes(lake)
        ends = f"SELECT min(collection_round), max(collection_round) FROM ({mine})"
        first, last = lake.sql(ends, params or None).row(0)
        rounds = read_job_rounds(lake, jobs["job_id"].to_list())
        jobs = jobs.join(rounds, on="job_id", how="left", maintain_order="left").filter(
            (pl.col("first_round") <= last) & (pl.col("last_round") >= first)
        )
    return jobs.unique("kind", keep="first", maintain_order=True).select("kind", "job_id", "parameters")


def list_differing_settings(lake: LakeReader, run_a: str, run_b: str) -> list[str]:
    """Return the names of the parameters that differ between the newest jobs of two runs, kind by kind."""
    names: dict[str, None] = {}
    for row in pair_newest_jobs(lake, Side(run_a), Side(run_b)).iter_rows(named=True):
        names |= dict.fromkeys(compare_run_settings(row, run_a, run_b)["setting"])
    return list(names)


_PLACES = ("run_id", "plan.round", "plan.epoch", "plan.offset")
"""Parameters that differ between any two jobs."""


def compare_run_settings(jobs: Row, run_a: str | None, run_b: str | None) -> pl.DataFrame:
    """Return the differing rows of `compare_settings` for a row of `pair_newest_jobs`, but for runs and `_PLACES`."""
    settings = compare_settings(jobs["a_parameters"], jobs["b_parameters"])
    is_name = pl.col("a").eq_missing(run_a) & pl.col("b").eq_missing(run_b)
    return settings.filter(pl.col("differs") & ~is_name & ~pl.col("setting").is_in(_PLACES))


def list_similar_jobs(lake: LakeReader, job_id: int, required_id: int | None = None, limit: int = 200) -> pl.DataFrame:
    """Return other jobs of a job's kind, the newest first: job_id, kind, run_id, parameters (cut), started_at.

    The limit never cuts the job `required_id`.
    """
    query = f"""
        SELECT job_id, kind, run_id, left(parameters, {DOCUMENT}) AS parameters, started_at FROM job_runs
        WHERE kind = (SELECT any_value(kind) FROM job_runs WHERE job_id = $job) AND job_id <> $job
        ORDER BY job_id IS NOT DISTINCT FROM $required DESC, started_at DESC, job_id LIMIT $limit
        """
    return lake.sql(query, {"job": job_id, "required": required_id, "limit": limit}).sort(
        "started_at", descending=True, nulls_last=True, maintain_order=True
    )


def read_retractions(lake: LakeReader, episode_ids: Sequence[int]) -> list[Row]:
    """Return the last retraction of each episode, newest first: episode_id, kind, at, reason, superseded_by.

    Episodes without a retraction are left out.
    """
    query = """
        SELECT episode_id, kind, written_at AS "at", left(reason, 1000) AS reason, superseded_by
        FROM current_retractions
        WHERE episode_id IN (SELECT unnest($episodes::BIGINT[]))
        QUALIFY row_number() OVER (PARTITION BY episode_id ORDER BY written_at DESC) = 1
        ORDER BY "at" DESC, episode_id
        """
    return lake.sql(query, {"episodes": list(episode_ids)}).to_dicts()


def read_group_retractions(lake: LakeReader, group_id: int) -> list[Row]:
    """Return `read_retractions` for the episodes that a group was collected with."""
    return read_retractions(lake, lake.members(group_id))


def read_changed_groups(lake: LakeReader, credit: Credit) -> pl.DataFrame:
    """Return the groups that make a credit older than the data: run_id, task_id, collection_round, lost, joined, ...

    Columns are those of `lake.judgements.credit.read_changed_groups`. Names of a grouping's group are those of any of
    its episodes.
    """
    groups = judgement.find_changed_groups(lake, credit)
    query = """
        SELECT group_id, any_value(run_id) AS run_id, any_value(task_id) AS task_id,
               any_value(collection_round) AS collection_round
        FROM (SELECT group_id, run_id, task_id, collection_round FROM episodes
              UNION ALL SELECT g.group_id, e.run_id, e.task_id, e.collection_round
              FROM groupings AS g JOIN episodes AS e USING (episode_id))
        WHERE group_id IN (SELECT unnest($groups::BIGINT[])) GROUP BY group_id
        """
    names = lake.sql(query, {"groups": groups["group_id"].to_list()})
    return groups.join(names, on="group_id", how="left", maintain_order="left")


def count_retractions_since(lake: LakeReader, credit: Credit, limit: int = 20) -> pl.DataFrame:
    """Count the episodes retracted since a credit was computed: kind, reason (cut), episodes; most first."""
    query = f"""
        SELECT kind, left(reason, {EXCERPT}) AS reason, count(DISTINCT episode_id) AS episodes FROM retractions
        WHERE "at" > (SELECT max(ended_at) FROM job_runs WHERE series_id = $series AND status = 'succeeded')
        GROUP BY ALL ORDER BY episodes DESC, kind, reason LIMIT $limit
        """
    return lake.sql(query, {"series": credit.series_id, "limit": limit})


def read_rejects(
    lake: LakeReader, reason: str | None, run: str | None, window: ListWindow, sort: Sort | None = None
) -> pl.DataFrame:
    """Return a page of the rejects, by default the newest first."""
    where, params = _build_conditions(reason=reason, run_id=run)
    query = f"""
        SELECT reject_id, "at", run_id, source_uri, source_format, position, reason, left(message, {EXCERPT}) AS message
        FROM rejects WHERE {where}
        ORDER BY {order_by(sort, REJECT_ORDERS, '"at" DESC, source_uri, position, reject_id')}
        LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | window.params())


def count_rejects(lake: LakeReader, reason: str | None, run: str | None) -> int:
    """Count the rejects of a filter."""
    where, params = _build_conditions(reason=reason, run_id=run)
    return count(lake, f"SELECT count(*) FROM rejects WHERE {where}", params or None)


def count_reject_reasons(lake: LakeReader) -> dict[str, int]:
    """Count the rejects by reason."""
    return dict(lake.sql("SELECT reason, count(*) FROM rejects GROUP BY reason ORDER BY reason").iter_rows())


def read_reject(lake: LakeReader, reject_id: int) -> Row | None:
    """Return a reject with its text (cut) and raw_length; None for an unknown reject."""
    query = f"""
        SELECT * EXCLUDE (raw), left(raw, {DOCUMENT}) AS raw, length(raw) AS raw_length FROM rejects WHERE reject_id = ?
        """
    return get_first_row(lake.sql(query, [reject_id]))


def _build_conditions(**equal: str | None) -> tuple[str, Params]:
    """Return the WHERE clause of columns that must equal a value (None: any), and its parameters."""
    params: Params = {name: value for name, value in equal.items() if value is not None}
    return " AND ".join(f"{name} = ${name}" for name in params) or "true", params


_NEWER = {
    "newer scores": ("scores",),
    "newer credit": ("advantages", "credit_groups"),
    "newer annotations": ("annotations",),
    "newer training": ("batches", "checkpoints", "metrics"),
}
"""Words for a change of tables that pages show."""


class CountedState(SnapshotReader, Protocol):
    """A state of a lake that counts the rows of its tables without reading them."""

    def rows(self, table: str) -> int:
        """Return the number of rows of a table, hidden ones included."""


@dataclass(frozen=True, slots=True)
class StateChanges:
    """Differences between two states of a lake."""

    episodes: Difference
    """As `trajlake diff` shows them."""
    tables: pl.DataFrame
    """Tables with a different number of rows: table, before, after."""
    series: pl.DataFrame
    """Scores that differ: scorer, series_id, new, gone, other (another value); most first.

    A score without a value counts as no score.
    """
    flips: pl.DataFrame
    """Advantages with a different sign: series_id, episodes, steps; most steps first."""


def compare_states(before: Snapshot, after: Snapshot) -> StateChanges:
    """Compare two states of one lake."""
    difference = compare_snapshots(before, after)
    rows = [(name, before.size(name)[1], after.size(name)[1]) for name in TABLES]
    counts = pl.DataFrame(rows, schema={"table": pl.String, "before": pl.Int64, "after": pl.Int64}, orient="row")
    was, now = pl.col("before").is_not_null(), pl.col("after").is_not_null()
    series = difference.scores.group_by("scorer", "series_id").agg(
        (now & ~was).sum().alias("new"), (was & ~now).sum().alias("gone"), (was & now).sum().alias("other")
    )
    flips = difference.flips.group_by("series_id").agg(
        pl.col("episode_id").n_unique().alias("episodes"), pl.len().alias("steps")
    )
    return StateChanges(
        difference,
        counts.filter(pl.col("before") != pl.col("after")),
        series.sort(pl.sum_horizontal("new", "gone", "other"), "scorer", "series_id", descending=[True, False, False]),
        flips.sort("steps", "series_id", descending=[True, False]),
    )


def describe_news(before: CountedState, after: CountedState) -> str | None:
    """Describe in a few words how a state differs from an earlier one: new episodes, or else all differences.

    Rows are only ever added, so their number shows a change. Episodes are compared only if their number, or that of
    retractions, differs.
    """

    def differ(*tables: str) -> bool:
        return any(before.rows(table) != after.rows(table) for table in tables)

    news = []
    if differ("episodes", "retractions"):
        old_ids, new_ids = (
            set(state.sql("SELECT episode_id FROM episodes")["episode_id"].to_list()) for state in (before, after)
        )
        if added := len(new_ids - old_ids):
            return count_noun(added, "new episode")
        if removed := len(old_ids - new_ids):
            news.append(f"{count_noun(removed, 'episode')} taken back")
    news += [words for words, tables in _NEWER.items() if differ(*tables)]
    return ", ".join(news) or None
