"""SQL over a snapshot: DuckDB views on the file lists, one statement at a time, reading only.

Reading the snapshot's file list is about twice as fast as any Delta-aware path of DuckDB, and it needs no extension.
The connection is in memory; once the views stand it may open files inside the lake's folder only, may not change its
settings, and takes exactly one SELECT.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from types import TracebackType
from typing import Any, Self

import duckdb
import polars as pl
import pyarrow as pa

from lake import ids
from lake.columns import Table, Visibility
from lake.errors import LakeAccessError, QueryError
from lake.tables import TABLES
from lake.visibility import DataFile


class Session:
    """A DuckDB connection with one view per table and the shipped views and macros.

    Args:
        files: table -> files with visible rows.
        root: folder of the lake, the only place the connection may read.
    """

    def __init__(self, files: Mapping[str, Sequence[DataFile]], root: str) -> None:
        self._connection = duckdb.connect(":memory:")
        run = self._connection.execute
        run("SET TimeZone = 'UTC'")
        try:
            for name, table in TABLES.items():
                run(_view(table, files.get(name, ())))
            for script in shipped_views():
                run(script)
        except duckdb.Error as error:
            msg = f"{root}: {_first_line(error)}. `trajlake doctor` tells what is damaged"
            raise LakeAccessError(msg) from error
        run(f"SET allowed_directories = [{_quoted(root)}]")
        run("SET enable_external_access = false")
        run("SET lock_configuration = true")

    def query(self, query: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> pl.DataFrame:
        """Rows of one SELECT.

        Raises:
            QueryError: not exactly one SELECT, or SQL that DuckDB refuses.
        """
        try:
            statements = duckdb.extract_statements(query)
            # No EXPLAIN: with ANALYZE it runs its statement, and COPY could write into the lake.
            if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
                kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
                msg = f"a lake is read with exactly one SELECT; this is {kinds}"
                raise QueryError(msg)
            arrow = self._connection.sql(query, params=params or None).to_arrow_table()
        except duckdb.Error as error:
            msg = f"{_first_line(error)} (`trajlake tables --columns` lists tables, views and columns)"
            raise QueryError(msg) from error
        except RuntimeError as error:
            # DuckDB's way of passing Ctrl-C on.
            raise KeyboardInterrupt from error
        return _frame(arrow)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _first_line(error: duckdb.Error) -> str:
    return " ".join(str(error).partition("\n\n")[0].split())


def _frame(arrow: pa.Table) -> pl.DataFrame:
    """A result as Polars has it: columns of one name are numbered, and sums of integers are int64 if they fit."""
    try:
        frame = pl.from_arrow(arrow.rename_columns(_distinct(arrow.column_names)))
    except pl.exceptions.PolarsError as error:
        types = ", ".join(f"{field.name} {field.type}" for field in arrow.schema)
        msg = f"a column has a type that cannot be returned ({types}); cast it, for example to VARCHAR"
        raise QueryError(msg) from error
    assert isinstance(frame, pl.DataFrame)
    for name, dtype in frame.schema.items():
        if isinstance(dtype, pl.Decimal) and dtype.scale == 0:
            narrow = frame[name].cast(pl.Int64, strict=False)
            if narrow.null_count() == frame[name].null_count():
                frame = frame.with_columns(narrow)
    return frame


def _distinct(names: Iterable[str]) -> list[str]:
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


def shipped_views() -> list[str]:
    """The SQL files of `lake/sql`, in name order: macros first, then views."""
    folder = resources.files("lake") / "sql"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [f.read_text(encoding="utf-8").replace("{alphabet}", ids.ALPHABET) for f in files]


def _view(table: Table, files: Sequence[DataFile]) -> str:
    if not files:
        columns = ", ".join(f"CAST(NULL AS {c.sql_type}) AS {_name(c.name)}" for c in table.columns)
        return f"CREATE VIEW {_name(table.name)} AS SELECT {columns} WHERE false"
    whole = [_quoted(file.path) for file in files if not file.dead]
    parts = [f"SELECT {_columns(table)} FROM read_parquet([{', '.join(whole)}], union_by_name = true)"] if whole else []
    for file in files:
        if file.dead:
            dead = ", ".join(map(str, sorted(file.dead)))
            parts.append(
                f"SELECT {_columns(table)} FROM read_parquet({_quoted(file.path)}) WHERE write_id NOT IN ({dead})"
            )
    body = " UNION ALL ".join(parts)
    if table.visibility is Visibility.SET:
        key = ", ".join(map(_name, table.key))
        body = f"SELECT * FROM ({body}) QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY write_id) = 1"
    return f"CREATE VIEW {_name(table.name)} AS {body}"


def _columns(table: Table) -> str:
    return ", ".join(_name(name) for name in table.names)


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
