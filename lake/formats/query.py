"""Anything else: the rows of a SELECT that a person wrote over files of their own (`trajlake ingest --query FILE.sql`).

DuckDB runs it, with read_json, read_parquet, read_csv and all else it has; `lake.formats.shapes` says what the rows may
be. A query is code of the one who runs it, and reads what they may read: it is never recognised, only named.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lake.errors import FormatError, QueryError
from lake.formats.look import Look
from lake.formats.rows import Item, parquet_rows
from lake.formats.shapes import Shape, read_rows, shape_of
from lake.formats.source import Input
from lake.records import Reject

if TYPE_CHECKING:
    import duckdb

NAME = "query"
FRAME = "frame"
_ROWS = 4096


def recognise(_: Look) -> bool:
    """Never: a file of SQL is run only if a person says so."""
    return False


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a query's rows."""
    with _connection() as connection:
        yield from _read(connection, file)


def check(path: Path) -> None:
    """Raise what running the query of a file would, before anything is written: QueryError, UsageError, FormatError."""
    with _connection() as connection:
        shape_of(_columns(connection, _text(path)))


def read_frame(file: Input) -> Iterator[Item]:
    """Records and rejects of a frame that was written to a Parquet file."""
    import pyarrow.parquet as pq

    shape: Shape = file.memory.get("shape") or shape_of(pq.read_schema(file.path).names)

    def rows() -> Iterator[dict[str, Any]]:
        for item in parquet_rows(file):
            if isinstance(item, Reject):
                raise FormatError(item.message)
            yield item.value

    yield from read_rows(rows(), shape, file, FRAME)


def _read(connection: "duckdb.DuckDBPyConnection", file: Input) -> Iterator[Item]:
    import duckdb

    query = _text(file.path)
    shape = shape_of(_columns(connection, query))

    def rows() -> Iterator[dict[str, Any]]:
        try:
            reader: Any = connection.sql(query).to_arrow_reader(_ROWS)
            for batch in reader:
                yield from batch.to_pylist()
        except duckdb.Error as error:
            raise QueryError(f"{file.path.name}: {error}") from error

    yield from read_rows(rows(), shape, file, NAME)


def _columns(connection: "duckdb.DuckDBPyConnection", query: str) -> list[str]:
    import duckdb

    try:
        found: list[Any] = connection.execute(f"DESCRIBE {query}").fetchall()
    except duckdb.Error as error:
        raise QueryError(f"the query cannot be run: {error}") from error
    return [str(name) for name, *_ in found]


def _connection() -> "duckdb.DuckDBPyConnection":
    import duckdb

    # Rows in the order of the files: what is numbered is numbered the same again.
    return duckdb.connect(config={"preserve_insertion_order": True})


def _text(path: Path) -> str:
    try:
        text = path.read_text("utf-8").strip().rstrip(";")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: {error}; --query takes a file of SQL") from error
    if not text:
        raise FormatError(f"{path} is empty; --query takes a file with one SELECT")
    return text
