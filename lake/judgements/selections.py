"""Choosing episodes: stored selections and groupings, SQL predicates over `episodes`, and seeded draws.

A selection is named by the id of a select job, the beginning of one, or its own name, which means its newest job.
Episodes that the job dropped, or never saw, are not trained on. Single dropped steps carry no loss; their tokens stay
in the sequence as context.

A predicate is one SQL expression, as users write it with --where, in a configuration or in a mixture. DuckDB's parser
checks the text in brackets and the text alone before any query runs. Otherwise text that closes its bracket (`true)
UNION SELECT ...`, `a) OR (b`) could add rows to a job's input or weaken another condition.

A draw depends on a seed and the episode's id only, not on row order, other episodes, library versions or the machine:
the mixing function is `lake.ids.splitmix64`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import duckdb
import msgspec
import numpy as np
import polars as pl

from lake import ids
from lake.errors import DataRefusedError, QueryError, UsageError
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot, SnapshotReader
from lake.read.text_table import count_noun

_JOBS = """
SELECT job_id, selection FROM (SELECT DISTINCT job_id, selection FROM selections) JOIN job_runs USING (job_id)
ORDER BY ended_order(sequence, ended_at, job_id) DESC
"""


@dataclass(frozen=True, slots=True)
class SelectedEpisodes:
    """The result of a select job."""

    job_id: int
    name: str
    """Name of the selection."""
    episodes: pl.DataFrame
    """episode_id: the kept episodes."""
    dropped_steps: pl.DataFrame
    """episode_id, step_index: single dropped steps of kept episodes."""

    def describe(self) -> str:
        """Describe the selection for messages: name, job and size."""
        steps = f", without {self.dropped_steps.height} of their steps" if self.dropped_steps.height else ""
        return (
            f"{self.name} (select job {ids.to_text(self.job_id)}): {count_noun(self.episodes.height, 'episode')}{steps}"
        )


def find_selection_job(snapshot: Snapshot, name: str) -> int | None:
    """Return the newest succeeded job that wrote a selection of that name; None without one."""
    jobs = snapshot.sql(_JOBS).filter(selection=name)
    return None if jobs.is_empty() else int(jobs["job_id"][0])


def read_selection(snapshot: Snapshot, job_or_name: str) -> SelectedEpisodes:
    """Read the result of a selection.

    Args:
        job_or_name: a select job's id, the beginning of one, or the name of a selection.

    Raises:
        UsageError: no such selection, or several jobs match.
    """
    jobs = snapshot.sql(_JOBS)
    texts = pl.Series([ids.to_text(job) for job in jobs["job_id"]], dtype=pl.String)
    by_name = jobs.filter(pl.col("selection") == job_or_name).head(1)
    matches = by_name if by_name.height else jobs.filter(texts.str.starts_with(job_or_name.strip().lower()))
    if not job_or_name.strip() or matches.height != 1:
        fault = (
            "is the beginning of several select jobs"
            if job_or_name.strip() and matches.height
            else "names no select job"
        )
        newest = ", ".join(f"{name} ({ids.to_text(job)})" for job, name in jobs.head(5).rows())
        msg = f"selection {job_or_name!r} {fault}; the newest: {newest or 'none, make one with `trajlake select`'}"
        raise UsageError(msg)
    job_id, name = matches.row(0)
    rows = snapshot.scan("selections").filter(pl.col("job_id") == job_id)
    is_episode = pl.col("step_index").is_null()
    episodes = collect_rows(rows.filter(is_episode & pl.col("kept")).select("episode_id"))
    steps = rows.filter(~is_episode & ~pl.col("kept")).select("episode_id", "step_index")
    return SelectedEpisodes(
        job_id, name, episodes, collect_rows(steps.join(episodes.lazy(), on="episode_id", how="semi"))
    )


GROUPINGS = """
WITH named AS (SELECT DISTINCT grouping, split_part(grouping, '/', 1) AS name, job_id FROM groupings),

newest AS (
    SELECT name, arg_max(job_id, ended_order(sequence, ended_at, job_id)) AS job_id
    FROM named JOIN job_runs USING (job_id) GROUP BY name
)

SELECT name, grouping, job_id FROM named JOIN newest USING (name, job_id) ORDER BY grouping
"""
"""SQL: name, grouping (the name, or a draw of it: `half/0`) and job_id of all groupings in their newest definition.

Draws of an older definition of the same name are left out.
"""


def find_grouping_job(snapshot: Snapshot, name: str) -> int | None:
    """Return the newest succeeded job that wrote a grouping's name, or any draw of it; None without one."""
    jobs = snapshot.sql(GROUPINGS).filter(pl.col("name") == name.partition("/")[0])
    return None if jobs.is_empty() else int(jobs["job_id"][0])


def read_grouping(snapshot: Snapshot, name: str) -> pl.DataFrame:
    """Read a grouping in its newest definition: episode_id, group_id, collected_group_id, one row per episode.

    Args:
        name: name of the definition; with several draws the name of one draw, for example `half/0`.

    Raises:
        UsageError: no such grouping.
    """
    groupings = snapshot.sql(GROUPINGS)
    job = groupings.filter(pl.col("grouping") == name)["job_id"].to_list()
    if not job:
        valid = f"there are {', '.join(groupings['grouping'])}" if groupings.height else "there are no groupings yet"
        raise UsageError(f"no grouping {name!r}; {valid}. Make one with `trajlake group`")
    mine = snapshot.scan("groupings").filter((pl.col("job_id") == job[0]) & (pl.col("grouping") == name))
    return collect_rows(mine.select("episode_id", "group_id", "collected_group_id"))


_BARE: dict[str, Any] = {
    "type": "SELECT_NODE",
    "modifiers": [],
    "cte_map": {"map": []},
    "where_clause": None,
    "group_expressions": [],
    "group_sets": [],
    "aggregate_handling": "STANDARD_HANDLING",
    "having": None,
    "sample": None,
    "qualify": None,
}
"""Parts of a parsed SELECT that contains nothing but one expression."""


@lru_cache  # A parser is a DuckDB database, and a loop checks its predicate in each round.
def check_predicate(where: str, option: str = "--where") -> None:
    """Refuse text that is not one SQL expression. Raises UsageError: empty, invalid SQL, or more than an expression."""
    if not where.strip():
        raise UsageError(f"{option} is empty; give a SQL predicate over `episodes`, or leave it out to take all")
    with duckdb.connect() as parser:
        try:
            is_one = parse_expression(parser, where) is not None
        except ValueError as error:
            raise UsageError(f"{option} {where!r} is not a predicate over `episodes`: {error}") from error
    if not is_one:
        raise UsageError(f"{option} {where!r} is more than one SQL expression; write one predicate over `episodes`")


def parse_expression(parser: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any] | None:
    """Parse a text that is one SQL expression, alone and in brackets, to its tree; None if it is more than that.

    Raises ValueError: invalid SQL; has the parser's message.
    """
    texts = [f"SELECT (\n{text}\n)", f"SELECT\n{text}\n"]
    answers = parser.execute("SELECT json_serialize_sql(unnest(?))", [texts]).fetchall()
    bracketed_tree, plain_tree = (msgspec.json.decode(answer, type=dict[str, Any]) for (answer,) in answers)
    if bracketed_tree["error"]:
        raise ValueError(" ".join(str(bracketed_tree["error_message"]).split()))
    nodes = [statement["node"] for statement in bracketed_tree["statements"]]
    alone = len(nodes) == 1 and all(nodes[0].get(name) == value for name, value in _BARE.items())
    expressions: list[dict[str, Any]] = (
        nodes[0]["select_list"] if alone and nodes[0]["from_table"]["type"] == "EMPTY" else []
    )
    # A list in brackets, even an empty one, is a row of values.
    if plain_tree["error"] or len(expressions) != 1 or expressions[0].get("function_name") == "row":
        return None
    return expressions[0]


def bracket_predicate(where: str | None, option: str = "--where") -> str:
    """Check a predicate and return it in brackets, `true` for None. Raises UsageError: it is invalid."""
    if where is None:
        return "true"
    check_predicate(where, option)
    # Separate lines, since the predicate may end in a comment.
    return f"(\n{where}\n)"


def select_where(
    lake: SnapshotReader,
    columns: Sequence[str],
    where: str | None,
    option: str = "--where",
    *,
    groups: pl.Series | None = None,
    may_be_empty: bool = False,
) -> pl.DataFrame:
    """Select columns of `episodes` (or SQL expressions over them) where a predicate holds, sorted by episode_id.

    Args:
        lake: the lake or snapshot.
        columns: names, or expressions.
        where: the predicate; None selects all.
        option: name of the predicate in messages.
        groups: only episodes that were collected in these groups; the reader keeps no other rows in memory.
        may_be_empty: allow an empty selection.

    Raises:
        UsageError: an invalid predicate.
        DataRefusedError: no episode is selected.
    """
    inside = bracket_predicate(where, option)
    try:
        among = "" if groups is None else "AND group_id IN (SELECT unnest($groups))"
        query = f"SELECT {', '.join(columns)} FROM episodes WHERE {inside} {among} ORDER BY episode_id"
        rows = lake.sql(query, None if groups is None else {"groups": groups.to_list()})
    except QueryError as error:
        if where is None:
            raise
        raise UsageError(f"{option} {where!r} is not a predicate over `episodes`: {error}") from error
    if rows.is_empty() and not may_be_empty:
        reason = f"no episode satisfies {option} {where!r}"
        if where is None:
            hidden = lake.sql("SELECT count(DISTINCT episode_id) AS n FROM current_retractions")["n"][0]
            reason = f"all episodes of the lake are retracted ({hidden})" if hidden else "the lake holds no episodes"
        msg = f"{reason}; `trajlake sql 'SELECT run_id, count(*) FROM episodes GROUP BY 1'` lists the episodes"
        raise DataRefusedError(msg)
    return rows


def draw_lots(episode_ids: pl.Series, *seeds: str | int) -> pl.Series:
    """Draw a number per episode, uniform over uint64 [N], equal for equal ids and seeds everywhere.

    Args:
        episode_ids: int64 [N].
        seeds: purpose of the draw; other seeds draw independently.
    """
    mixed_N = ids.splitmix64(episode_ids.to_numpy().astype(np.uint64) + np.uint64(ids.key_hash("lot", *seeds)))
    return pl.Series("lot", ids.splitmix64(mixed_N), dtype=pl.UInt64)
