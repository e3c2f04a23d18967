"""SQL over a snapshot: DuckDB views on the file lists, one statement at a time, reading only.

Reading the snapshot's file list is about twice as fast as any Delta-aware path of DuckDB, and it needs no extension.
The connection is in memory; it may open files inside the lake only, may not change its settings, and takes exactly one
SELECT. Only what a query mentions is bound, and only the files that its conditions leave (`lake.read.query_pruning`).
This keeps honest people from accidents; SQL from a stranger goes through `lake.locked.query`.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import duckdb

from lake.errors import LakeAccessError, QueryError, TrajlakeError
from lake.read import connections, query_results, query_views
from lake.read.bound import BoundViews, Params
from lake.read.text_table import Rows
from lake.read.visibility import DataFile
from lake.storage.objects import Objects

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from lake.read.kept import Kept

_MOST_READ_BY_IDLE = 64 << 20
"""Bytes of files that a session may have bound if its connection is kept: DuckDB goes on holding what it has read."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a query may use; None is no limit."""

    memory: str | None = None
    """DuckDB's memory, for example `2GB`."""
    seconds: float | None = None
    """Time for one query; a stream has as much again for being read."""
    threads: int | None = None
    """Threads of one query."""
    spill: bool = True
    """Let sorts and joins that outgrow the memory use a temporary folder."""


class Session:
    """A DuckDB connection in which the lake's tables, the shipped views and the macros answer.

    Queries may come from several threads; a stream has a connection of its own.

    Args:
        files: table name -> files with visible rows.
        objects: where the lake lies, the only place the connection may read.
        hidden: the episodes that readers do not see in the files of a place (`DataFile.place`), int64; None if none.
        only: the files that may be read, and nothing else of the lake; None allows all of the lake's folder.
        by_clock: the files are of several lakes, whose jobs are ordered by time (`query_views.table_sql`).
        kept: columns in memory that serve instead of files where they are all that a query reads.
    """

    def __init__(
        self,
        files: Callable[[str], Sequence[DataFile]],
        objects: Objects,
        hidden: Callable[[int], pl.Series | None],
        limits: Limits | None = None,
        only: Sequence[str] | None = None,
        *,
        by_clock: bool = False,
        kept: Kept | None = None,
    ) -> None:
        self._only = only
        self._is_kept = kept is not None
        self._objects = objects
        self._limits = limits or Limits()
        self._may_share = objects.folder is not None and only is None and self._limits == Limits() and not by_clock
        self._is_clean = True
        sizes: dict[str, int] = {}
        self._bucket = objects.filesystem(sizes)
        self._views = BoundViews(
            lambda: self._connection, files, objects, hidden, self._define, sizes, by_clock=by_clock, kept=kept
        )
        self._lock = threading.RLock()

    def query(self, query: str, params: Params = None) -> pl.DataFrame:
        """Rows of one SELECT.

        Raises:
            QueryError: not exactly one SELECT, SQL that DuckDB refuses, or a limit that was reached.
            LakeAccessError: a file of the lake is missing or damaged.
        """
        values = params or None

        def table(connection: duckdb.DuckDBPyConnection) -> pa.Table:
            if self._is_kept:
                return _rows_of_small(connection, query, values)
            return connection.sql(query, params=values).to_arrow_table()

        return query_results.frame(self._run(query, params, table))

    def shown(self, query: str, params: Params = None) -> pl.DataFrame | Rows:
        """As `query`, for somebody to look at: plain values where the columns' types allow it."""
        plain: Rows | None = self._run(
            query, params, lambda connection: query_results.rows(connection.sql(query, params=params or None))
        )
        return self.query(query, params) if plain is None else plain

    def stream(self, query: str, params: Params = None, rows: int = 65_536) -> pa.RecordBatchReader:
        """As `query`, rows as they come, in bounded memory; what goes wrong later is raised while reading."""
        import pyarrow as pa

        own = self._connection.cursor()
        self._may_share = False  # a reader may outlive the session

        def begin(connection: duckdb.DuckDBPyConnection) -> pa.RecordBatchReader:
            return connection.sql(query, params=params or None).to_arrow_reader(rows)

        reader = self._run(query, params, begin, own)
        schema = query_results.plain_schema(reader.schema)
        return pa.RecordBatchReader.from_batches(schema, self._batches(query, own, reader, schema))

    def close(self) -> None:
        """Close the connection, or leave it to the next session over the same folder."""
        if (connection := self.__dict__.pop("_connection", None)) is None:
            return
        stays = self._may_share and self._is_clean and self._views.bytes <= _MOST_READ_BY_IDLE
        left = self._views.leave(connection if stays else None)
        if left is None:
            connection.close()
        else:
            connections.keep(self._key(), left)

    def _key(self) -> tuple[Any, ...]:
        """What connections must have in common to stand in for each other; a child process takes none of its parent."""
        return (os.getpid(), self._objects.root, tempfile.gettempdir())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        if self._may_share:
            idle = connections.take(self._key())
            if idle is not None:
                self._views.take(idle)
                return idle.connection
        connection = duckdb.connect(":memory:")
        run = connection.execute
        settings = {
            "TimeZone": "UTC",
            "temp_directory": str(Path(tempfile.gettempdir(), "trajlake-sql")) if self._limits.spill else "",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "allow_community_extensions": "false",
            "python_enable_replacements": "false",
            "parquet_metadata_cache": "true",
            "memory_limit": self._limits.memory,
            "threads": self._limits.threads,
        }
        for name, value in settings.items():
            if value is not None:
                run(f"SET GLOBAL {name} = {query_views.quoted(str(value))}")
        run("CREATE SCHEMA hidden")
        for macro in query_views.macros():
            run(macro)
        if self._bucket is not None:
            connection.register_filesystem(self._bucket)
        if self._only is None:
            run(f"SET allowed_directories = [{', '.join(map(query_views.quoted, self._objects.roots))}]")
        else:
            run(f"SET allowed_paths = [{', '.join(map(query_views.quoted, self._only))}]")
        run("SET enable_external_access = false")
        run("SET lock_configuration = true")
        return connection

    def _run(
        self,
        query: str,
        params: Params,
        take: Callable[[duckdb.DuckDBPyConnection], Any],
        own: duckdb.DuckDBPyConnection | None = None,
    ) -> Any:
        """What `take` has of a connection in which one SELECT can be asked; of one of its own if that is read later."""
        with self._lock, self._translated(query):
            query.encode()  # of lone surrogates DuckDB says that arguments are of a wrong type
            # No EXPLAIN: with ANALYZE it runs its statement, and COPY could write into the lake.
            kinds = [statement.type for statement in duckdb.extract_statements(query)]
            if kinds != [duckdb.StatementType.SELECT]:
                named = ", ".join(kind.name for kind in kinds) or "nothing"
                raise QueryError(f"a lake is read with exactly one SELECT; this is {named}")
            connection = self._connection if own is None else own
            with self._deadline(connection):
                self._views.bind(query, params, may_hold=own is None)
                try:
                    return take(connection)
                except duckdb.CatalogException:
                    # A name that does not stand in the text, or one to be told of: both need everything there.
                    if not self._views.bind_all():
                        raise
                    return take(connection)

    def _define(self, statement: str) -> None:
        try:
            self._connection.execute(statement)
        except duckdb.InterruptException:
            raise
        except duckdb.Error as error:
            raise self._damaged(error) from error

    def _batches(
        self, query: str, connection: duckdb.DuckDBPyConnection, reader: pa.RecordBatchReader, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        with self._translated(query), self._deadline(connection):
            try:
                for batch in reader:
                    yield query_results.plain_batch(batch, schema)
            except OSError as error:
                # Arrow's stream interface carries an error's text and nothing else.
                kind = duckdb.InterruptException if "INTERRUPT" in str(error) else duckdb.Error
                raise kind(str(error)) from error

    @contextmanager
    def _deadline(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Interrupt what runs in a connection when its time is over."""
        if self._limits.seconds is None:
            yield
            return
        timer = threading.Timer(self._limits.seconds, connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _translated(self, query: str) -> Iterator[None]:
        """DuckDB's errors as the lake's."""
        if self._bucket is not None:
            self._bucket.failure = None
        was_clean, self._is_clean = self._is_clean, False
        try:
            yield
            self._is_clean = was_clean
        except duckdb.InterruptException as error:
            if self._limits.seconds is None:
                raise KeyboardInterrupt from error
            msg = f"stopped after {self._limits.seconds:g} s, the time a query has here; narrow it, or raise the limit"
            raise QueryError(msg) from error
        except duckdb.OutOfMemoryException as error:
            raise QueryError(f"{query_results.one_line(error)}; narrow the query, or raise the memory limit") from error
        except duckdb.Error as error:
            unreadable = isinstance(error, (duckdb.IOException, duckdb.InvalidInputException))
            if self._unread() or (unreadable and any(f"{root}/" in str(error) for root in self._objects.roots)):
                raise self._damaged(error) from error
            raise query_results.query_error(error, query) from error
        except UnicodeEncodeError as error:
            raise QueryError(f"character {error.start} of the query is no Unicode: write it in UTF-8") from error
        except RuntimeError as error:
            # DuckDB's way of passing Ctrl-C on.
            raise KeyboardInterrupt from error

    def _unread(self) -> TrajlakeError | None:
        """Why a bucket's file could not be read; DuckDB has only a traceback for that."""
        return None if self._bucket is None else self._bucket.failure

    def _damaged(self, error: Exception) -> TrajlakeError:
        if (failure := self._unread()) is not None:
            return failure
        text = self._objects.redacted(query_results.one_line(error))
        is_gone = "No such file" in text or "No files found" in text
        erased = "If a forget or a vacuum ran meanwhile, read again; else " if is_gone else ""
        return LakeAccessError(f"{self._objects.root}: {text}. {erased}`trajlake doctor` tells what is damaged")


_warned = threading.Lock()


def _rows_of_small(connection: duckdb.DuckDBPyConnection, query: str, params: Params) -> pa.Table:
    """As `sql(query).to_arrow_table()`, which binds a query twice; this copies its rows once more.

    DuckDB warns of the copy.
    """
    connection.execute(query, params)
    with _warned, warnings.catch_warnings():  # which is for one thread at a time
        warnings.simplefilter("ignore", UserWarning)
        reader: pa.RecordBatchReader = connection.to_arrow_reader()
    return reader.read_all()
