"""What a query gives back: Arrow as Polars and people can use it, and DuckDB's errors as one helpful line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, date
from typing import TYPE_CHECKING

import duckdb

from lake.errors import QueryError
from lake.read.text_table import Rows, cell

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

ZONED = "TIMESTAMP WITH TIME ZONE"
_NUMBERS = {"FLOAT", "DOUBLE"} | {
    f"{sign}{size}" for sign in ("", "U") for size in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
}
_PLAIN = _NUMBERS | {ZONED, "BOOLEAN", "VARCHAR", "DATE", "BLOB"}
"""Types whose values are Python's own."""
_FIRST_DAY = date.min.toordinal() - date(1970, 1, 1).toordinal()
_LAST_DAY = date.max.toordinal() - date(1970, 1, 1).toordinal()
_NAMES = "`trajlake tables --columns` lists tables, views and columns"
_ID = re.compile(r"Could not convert string '([^']*)' to INT(64|128)")
_ARROW = re.compile(r"\n\nLINE (?P<line>\d{1,6}): (?P<shown>.*)\n(?P<under> *)\^")
_BLAMED = re.compile(r'(?:Referenced (?:column|table)|with name) "?([^" ]+)"? (?:not found|does not exist)')
_CUT = "..."
_NEAR = re.compile(r'syntax error at or near "([^"]*)"')


def rows(relation: duckdb.DuckDBPyRelation) -> Rows | None:
    """A result without the help of Arrow and Polars, which take longer to load than most queries take.

    None if a column is of a type that Python lacks, or a time is outside of its calendar. The connection's zone is UTC.
    """
    names, types = distinct_names(relation.columns), [str(kind) for kind in relation.types]
    if not _PLAIN.issuperset(types):
        return None
    zoned = [place for place, kind in enumerate(types) if kind == ZONED]
    if zoned:
        # DuckDB hands zoned times to Python through a package that nothing else here needs.
        columns = (f"#{place + 1}{'::TIMESTAMP' if place in zoned else ''}" for place in range(len(types)))
        relation = relation.project(", ".join(columns))
    found = relation.fetchall()
    for place in (place for place, kind in enumerate(types) if kind in {ZONED, "DATE"}):
        # Python's first and last day stand for infinity too.
        values = [row[place] for row in found if row[place] is not None]
        if any(not isinstance(value, date) or value.year in {1, 9999} for value in values):
            return None
    if zoned:
        found = [
            tuple(v and v.replace(tzinfo=UTC) if place in zoned else v for place, v in enumerate(row)) for row in found
        ]
    return Rows(names, found, [kind in _NUMBERS for kind in types])


def one_line(error: BaseException) -> str:
    """The first paragraph of an error's text, on one line; whoever wrote the query cannot steer a terminal with it."""
    return cell(str(error).partition("\n\n")[0])


def query_error(error: Exception, query: str) -> QueryError:
    """What DuckDB says of a query, with a hint where one helps."""
    text = one_line(error)
    hint = ""
    if isinstance(error, (duckdb.CatalogException, duckdb.BinderException)):
        hint = _NAMES
    elif (near := _NEAR.search(text)) and re.search(rf'(?i)(?<![\w."])at\s*{re.escape(near[1])}', query):
        hint = 'AT is a word of SQL: write the column "at" in double quotes, or table.at'
    elif (found := _ID.search(text)) and found[1]:
        hint = f"an id is a number here: compare with id('{found[1]}')"
    told = QueryError(f"{text} ({hint})" if hint else text)
    told.place = _place(str(error), query)
    return told


def _place(said: str, query: str) -> tuple[int, int] | None:
    """Where DuckDB's arrow points to in the query, or where the only mention is of the name that it does not know.

    Of a long line DuckDB shows a part; of names it says no place when a query is only planned.
    """
    found = _ARROW.search(said)
    lines = query.split("\n")
    if found is None and (blamed := _BLAMED.search(said)):
        mentions = list(re.finditer(rf"(?<!\w){re.escape(blamed[1])}(?!\w)", query, re.IGNORECASE))
        if len(mentions) == 1:
            before = query[: mentions[0].start()]
            return before.count("\n") + 1, len(before) - before.rfind("\n")
    if found is None or not 1 <= int(found["line"]) <= len(lines):
        return None
    line = int(found["line"])
    shown, under = found["shown"], len(found["under"]) - len(f"LINE {line}: ")
    left_out = len(_CUT) if shown.startswith(_CUT) else 0
    at = lines[line - 1].find(shown[left_out:].removesuffix(_CUT))
    return None if at < 0 or under < left_out else (line, at + under - left_out + 1)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A result's schema, columns of one name numbered, intervals as durations. Raises QueryError: nested intervals."""
    import pyarrow as pa

    for field in schema:
        if "interval" in str(field.type) and not pa.types.is_interval(field.type):
            msg = f"column {field.name} holds INTERVALs inside {field.type}; cast it, for example to VARCHAR"
            raise QueryError(msg)
    names = distinct_names(schema.names)
    return pa.schema(
        pa.field(name, pa.duration("us") if pa.types.is_interval(field.type) else field.type)
        for name, field in zip(names, schema, strict=True)
    )


def plain_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch under its `plain_schema`. Raises QueryError: an interval with months, which have no fixed length."""
    import pyarrow as pa

    arrays = [_duration(column) if pa.types.is_interval(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def frame(table: pa.Table) -> pl.DataFrame:
    """A result as Polars has it, sums of integers as int64 if they fit. Raises QueryError: a type Polars has not."""
    import polars as pl
    import pyarrow as pa

    schema = plain_schema(table.schema)
    if schema != table.schema:
        table = pa.Table.from_batches([plain_batch(batch, schema) for batch in table.to_batches()], schema)
    try:
        found = pl.from_arrow(table)
    except pl.exceptions.PolarsError as error:
        types = ", ".join(f"{field.name} {field.type}" for field in table.schema)
        msg = f"a column has a type that cannot be returned ({types}); cast it, for example to VARCHAR"
        raise QueryError(msg) from error
    assert isinstance(found, pl.DataFrame)
    for name, dtype in found.schema.items():
        if isinstance(dtype, pl.Date | pl.Datetime):
            _require_calendar(found[name])
        if isinstance(dtype, pl.Decimal) and dtype.scale == 0:
            narrow = found[name].cast(pl.Int64, strict=False)
            if narrow.null_count() == found[name].null_count():
                found = found.with_columns(narrow)
    return found


def _require_calendar(times: pl.Series) -> None:
    """DuckDB knows infinity and the year 290000; Python's calendar has the years 1 to 9999."""
    import polars as pl

    unit = times.dtype.time_unit if isinstance(times.dtype, pl.Datetime) else "day"
    if unit == "ns":  # 64 bits of them end in 2262
        return
    per_day = {"day": 1, "ms": 86_400 * 10**3, "us": 86_400 * 10**6}[unit]
    inside = times.to_physical().is_between(_FIRST_DAY * per_day, (_LAST_DAY + 1) * per_day - 1)
    if not inside.all():
        msg = f"column {times.name} holds times outside of the years 1 to 9999; cast it, for example to VARCHAR"
        raise QueryError(msg)


def distinct_names(names: Iterable[str]) -> list[str]:
    """Names with repeats numbered: a, a_1, a_2."""
    names = list(names)
    distinct: dict[str, None] = {}
    for name in names:
        number, new = 0, name
        while new in distinct or (number and new in names):
            number += 1
            new = f"{name}_{number}"
        distinct[new] = None
    return list(distinct)


def _duration(intervals: pa.Array) -> pa.Array:
    """Days of 24 hours and microseconds; DuckDB keeps months apart."""
    import pyarrow as pa

    values = intervals.to_pylist()
    if any(value is not None and value.months for value in values):
        raise QueryError("an INTERVAL with months has no fixed length; cast it to VARCHAR, or subtract two times")
    micros = [None if v is None else v.days * 86_400_000_000 + v.nanoseconds // 1000 for v in values]
    return pa.array(micros, pa.duration("us"))
