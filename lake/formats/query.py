"""Anything else: the rows of a SELECT that a person wrote over files of their own (`trajlake ingest --query FILE.sql`).

DuckDB runs it, with read_json, read_parquet, read_csv and all else it has; `lake.formats.shapes` says what the rows may
be. Relative paths in it are relative to the working directory. A query is code of the one who runs it, and reads what
they may read: it is never recognised, only named.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lake.errors import FormatError, QueryError, UsageError
from lake.formats.base.arrow import rows_of
from lake.formats.base.format import Format
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, parquet_rows
from lake.formats.base.source import Input, Meter
from lake.formats.shapes import Shape, read_rows, shape_of, unknown_columns
from lake.records import Reject

if TYPE_CHECKING:
    import duckdb

NAME = "query"
FRAME = "frame"
_ROWS = 4096
_decode = msgspec.json.Decoder().decode
_PLAIN = frozenset(
    ("BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "FLOAT")
) | {"DOUBLE", "VARCHAR", "UUID", "DATE", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE"}
"""Types whose values come as they are. All others come as JSON: a content that is now a text and now a list of parts is
a value of type JSON inside a list of structs, and Arrow would show its text with the quotes around it."""


def recognise(_: Look) -> bool:
    """Never: a file of SQL is run only if a person says so."""
    return False


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a query's rows."""
    with _connection() as connection:
        relation = _relation(connection, file.path)
        shape = shape_of(relation.columns)
        # Rows that are grouped first are counted when their episodes come.
        meter = file.meter if shape == "episodes" else Meter()
        yield from read_rows(_rows(relation, file.path, meter), shape, file, NAME)


def check(path: Path) -> str:
    """What there is to know of the columns of a file's query, before anything is written; see `unknown_columns`.

    Raises:
        QueryError, UsageError, FormatError: what running it would.
    """
    with _connection() as connection:
        columns = _relation(connection, path).columns
    return unknown_columns(columns, shape_of(columns))


def read_frame(file: Input) -> Iterator[Item]:
    """Records and rejects of a frame that was written to a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        shape: Shape = file.memory.get("shape") or shape_of(pq.read_schema(file.path).names)
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{file.path} is no Parquet file: {error}") from error

    def rows() -> Iterator[dict[str, Any]]:
        for item in parquet_rows(file):
            if isinstance(item, Reject):
                raise FormatError(f"the frame cannot be read: {item.message}")
            yield item.value

    yield from read_rows(rows(), shape, file, FRAME)


def _relation(connection: "duckdb.DuckDBPyConnection", path: Path) -> "duckdb.DuckDBPyRelation":
    """The query of a file, bound and not yet run."""
    import duckdb

    try:
        query = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: {error}; --query takes a file of SQL") from error
    try:
        found = [statement.type for statement in connection.extract_statements(query)]
        if found == [duckdb.StatementType.MULTI]:
            raise UsageError(f"{path} holds several statements in one; of a PIVOT, name the values: ON column IN ('a')")
        if found != [duckdb.StatementType.SELECT]:
            what = "no SELECT" if len(found) == 1 else f"{len(found)} statements"
            raise UsageError(f"{path} holds {what}; --query takes a file with one SELECT")
        query = _without_end(query)
        if _writes(connection, query):
            raise UsageError(f"{path} holds no SELECT alone: its WITH writes; --query takes a file with one SELECT")
        relation = connection.sql(query)
    except duckdb.Error as error:
        where = "; relative paths start in the working directory" if isinstance(error, duckdb.IOException) else ""
        raise QueryError(f"{path} cannot be run: {error}{where}") from error
    twice = {name for name in relation.columns if relation.columns.count(name) > 1}
    if twice:
        raise UsageError(f"{path} gives the column `{min(twice)}` twice; name each of them with AS")
    return relation


def _writes(connection: "duckdb.DuckDBPyConnection", query: str) -> bool:
    """Whether a statement that counts as a SELECT has a WITH that writes, which would be run to bind it.

    DuckDB explains such a one without running it, and binds it nowhere but at the top.
    """
    import duckdb

    try:
        connection.sql(f"FROM ({query}\n)")
    except (duckdb.BinderException, duckdb.CatalogException):
        try:
            connection.execute(f"EXPLAIN {query}")
        except duckdb.Error:
            return False  # binding tells
        return True
    return False


def _without_end(query: str) -> str:
    """A statement without its semicolon and the comments behind it: it is going to be part of another one."""
    import duckdb

    text = query.encode()
    ends = [start for start, _ in duckdb.tokenize(query) if text[start : start + 1] == b";"]
    return text[: ends[0]].decode() if ends else query


def _rows(relation: "duckdb.DuckDBPyRelation", path: Path, meter: Meter) -> Iterator[dict[str, Any]]:
    """The rows of a query as plain values; its order is kept."""
    import duckdb
    import pyarrow as pa

    columns = {name: '"' + name.replace('"', '""') + '"' for name in relation.columns}
    packed = [name for name, kind in zip(columns, relation.types, strict=True) if str(kind) not in _PLAIN]
    shown = {name: f"CAST(to_json({columns[name]}) AS VARCHAR) AS {columns[name]}" for name in packed}
    try:
        reader: Any = relation.project(", ".join((columns | shown).values())).to_arrow_reader(_ROWS)
        for batch in reader:
            for row, _ in rows_of(batch):
                meter.done += sum(len(cell) for cell in row.values() if isinstance(cell, str))
                for name in packed:
                    row[name] = row[name] and _unpacked(row[name])
                yield row
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise QueryError(f"{path}: {error}") from error


def _unpacked(text: str) -> Any:
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return json.loads(text)  # it knows NaN and infinities, which the record's check then refuses


def _connection() -> "duckdb.DuckDBPyConnection":
    import duckdb

    # What has no number of its own is numbered as it comes: the rows come in the same order each time, and a name is
    # never a variable of ours.
    return duckdb.connect(config={"threads": 1, "preserve_insertion_order": True, "python_enable_replacements": False})


FORMAT = Format(NAME, "rows of a SELECT (--query)", recognise, read)


FRAMES = Format(FRAME, "rows of a frame (lake.ingest_frame)", recognise, read_frame)
