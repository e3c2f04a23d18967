"""SQL predicates over `episodes`, as people pass them with --where, in a configuration, or in a mixture.

A predicate is one expression. DuckDB's own parser says so before anything runs, of the text in brackets and of the text
alone: text that closes the bracket it stands in (`true) UNION SELECT ...`, `a) OR (b`) would otherwise add rows of its
own making to a job's input, or loosen a condition that stands beside it.
"""

from collections.abc import Sequence
from typing import Any

import duckdb
import msgspec
import polars as pl

from lake.errors import DataRefusedError, QueryError, UsageError
from lake.read.snapshot import Reads

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
"""What a parsed SELECT of one expression has beside it: nothing."""


def check_predicate(where: str, place: str = "--where") -> None:
    """Refuse text that is not one SQL expression. Raises UsageError: empty, no SQL, or more than an expression."""
    if not where.strip():
        raise UsageError(f"{place} is empty; give a SQL predicate over `episodes`, or leave it out to take all")
    with duckdb.connect() as parser:
        try:
            is_one = parsed_expression(parser, where) is not None
        except ValueError as error:
            raise UsageError(f"{place} {where!r} is no predicate over `episodes`: {error}") from error
    if not is_one:
        raise UsageError(f"{place} {where!r} is more than one SQL expression; write one predicate over `episodes`")


def parsed_expression(parser: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any] | None:
    """The tree of a text that is one SQL expression, alone and in brackets; None if it is more than that.

    Raises:
        ValueError: no SQL; the parser's message.
    """
    spelled = [f"SELECT (\n{text}\n)", f"SELECT\n{text}\n"]
    found = parser.execute("SELECT json_serialize_sql(unnest(?))", [spelled]).fetchall()
    parsed, unbracketed = (msgspec.json.decode(answer, type=dict[str, Any]) for (answer,) in found)
    if parsed["error"]:
        raise ValueError(" ".join(str(parsed["error_message"]).split()))
    nodes = [statement["node"] for statement in parsed["statements"]]
    alone = len(nodes) == 1 and all(nodes[0].get(name) == value for name, value in _BARE.items())
    parts: list[dict[str, Any]] = nodes[0]["select_list"] if alone and nodes[0]["from_table"]["type"] == "EMPTY" else []
    # A list in brackets, an empty one too, is a row of values.
    if unbracketed["error"] or len(parts) != 1 or parts[0].get("function_name") == "row":
        return None
    return parts[0]


def bracketed(where: str | None, place: str = "--where") -> str:
    """A checked predicate as it stands in a WHERE clause, `true` for None. Raises UsageError: it is none."""
    if where is None:
        return "true"
    check_predicate(where, place)
    # Lines of its own: the predicate may end in a comment.
    return f"(\n{where}\n)"


def select_where(
    lake: Reads,
    columns: Sequence[str],
    where: str | None,
    place: str = "--where",
    *,
    groups: pl.Series | None = None,
    empty: bool = False,
) -> pl.DataFrame:
    """Columns of `episodes` (or SQL expressions over them) where a predicate holds, sorted by episode_id.

    Args:
        lake: where to read.
        columns: names, or expressions.
        where: the predicate; None takes all.
        place: what the predicate is called in messages.
        groups: only episodes that were collected in these; what others hold is not kept while it is read.
        empty: whether it may be that there is none.

    Raises:
        UsageError: a predicate that is none.
        DataRefusedError: no episode is selected.
    """
    inside = bracketed(where, place)
    try:
        among = "" if groups is None else "AND group_id IN (SELECT unnest($groups))"
        query = f"SELECT {', '.join(columns)} FROM episodes WHERE {inside} {among} ORDER BY episode_id"
        found = lake.sql(query, None if groups is None else {"groups": groups.to_list()})
    except QueryError as error:
        if where is None:
            raise
        raise UsageError(f"{place} {where!r} is no predicate over `episodes`: {error}") from error
    if found.is_empty() and not empty:
        chosen = f"no episode satisfies {place} {where!r}"
        if where is None:
            hidden = lake.sql("SELECT count(DISTINCT episode_id) AS n FROM current_retractions")["n"][0]
            chosen = f"all episodes of the lake are retracted ({hidden})" if hidden else "the lake holds no episodes"
        msg = f"{chosen}; `trajlake sql 'SELECT run_id, count(*) FROM episodes GROUP BY 1'` tells what is there"
        raise DataRefusedError(msg)
    return found
