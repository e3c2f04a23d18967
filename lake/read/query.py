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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import duckdb

from lake.errors import LakeAccessError, QueryError, TrajlakeError
from lake.read import connections, query_pruning, query_results, query_views
from lake.read.in_memory import ORIGIN, InMemory, episode_keys
from lake.read.text_table import Rows
from lake.read.visibility import DataFile
from lake.storage.objects import Objects
from lake.tables import JOBS, TABLES
from lake.tables.columns import Table

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from lake.read.kept import Kept

_MOST_KEPT_KEYS = 1_000_000
"""Episodes above which their keys are not held in memory (40 bytes each) but looked up."""
Params = Sequence[Any] | Mapping[str, Any] | None
_WHOLE = query_pruning.Plan({}, {})
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
        self._memory = InMemory(kept, files, lambda: self._connection, self._over)
        self._may_hold = kept is not None
        self._files = files
        self._objects = objects
        self._hidden = hidden
        self._by_clock = by_clock
        self._limits = limits or Limits()
        self._bound: dict[str, connections.Bound] = {}
        self._hides: dict[int, bool] = {}
        self._inherited: set[str] = set()
        self._defined: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._bound_bytes = 0
        self._may_share = objects.folder is not None and only is None and self._limits == Limits() and not by_clock
        self._is_clean = True
        self._bucket = objects.filesystem(self._sizes)
        self._lock = threading.RLock()

    def query(self, query: str, params: Params = None) -> pl.DataFrame:
        """Rows of one SELECT.

        Raises:
            QueryError: not exactly one SELECT, SQL that DuckDB refuses, or a limit that was reached.
            LakeAccessError: a file of the lake is missing or damaged.
        """
        return query_results.frame(self._run(query, params, lambda relation: relation.to_arrow_table()))

    def shown(self, query: str, params: Params = None) -> pl.DataFrame | Rows:
        """As `query`, for somebody to look at: plain values where the columns' types allow it."""
        plain: Rows | None = self._run(query, params, query_results.rows)
        return self.query(query, params) if plain is None else plain

    def stream(self, query: str, params: Params = None, rows: int = 65_536) -> pa.RecordBatchReader:
        """As `query`, rows as they come, in bounded memory; what goes wrong later is raised while reading."""
        import pyarrow as pa

        own = self._connection.cursor()
        self._may_share = False  # a reader may outlive the session
        reader = self._run(query, params, lambda relation: relation.to_arrow_reader(rows), own)
        schema = query_results.plain_schema(reader.schema)
        return pa.RecordBatchReader.from_batches(schema, self._batches(query, own, reader, schema))

    def close(self) -> None:
        """Close the connection, or leave it to the next session over the same folder."""
        if (connection := self.__dict__.pop("_connection", None)) is None:
            return
        if self._may_share and self._is_clean and self._bound_bytes <= _MOST_READ_BY_IDLE:
            connection.execute(f"DROP TABLE IF EXISTS {query_views.hidden(0)}")
            self._memory.leave(connection)
            for name in [name for name, (files, *_) in self._bound.items() if files is None]:
                connection.execute(f"DROP VIEW {query_views.quoted_name(name)}")
                del self._bound[name]
            connections.keep(self._key(), connections.Idle(connection, self._bound, self._defined, self._bound_bytes))
        else:
            connection.close()
        self._memory.leave(None)
        self._bound, self._defined, self._bound_bytes, self._hides = {}, set(), 0, {}

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
                self._bound, self._defined, self._bound_bytes = idle.bound, idle.defined, idle.bytes
                self._inherited = set(idle.bound)
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
        take: Callable[[duckdb.DuckDBPyRelation], Any],
        own: duckdb.DuckDBPyConnection | None = None,
    ) -> Any:
        """What `take` makes of the result of one SELECT; in a connection of its own if it is read later."""
        with self._lock, self._translated(query):
            query.encode()  # of lone surrogates DuckDB says that arguments are of a wrong type
            # No EXPLAIN: with ANALYZE it runs its statement, and COPY could write into the lake.
            kinds = [statement.type for statement in duckdb.extract_statements(query)]
            if kinds != [duckdb.StatementType.SELECT]:
                named = ", ".join(kind.name for kind in kinds) or "nothing"
                raise QueryError(f"a lake is read with exactly one SELECT; this is {named}")
            connection = self._connection if own is None else own
            with self._deadline(connection):
                self._bind(query, params, may_hold=own is None)
                try:
                    return take(connection.sql(query, params=params or None))
                except duckdb.CatalogException:
                    # A name that does not stand in the text, or one to be told of: both need everything there.
                    if len(self._bound) + len(self._defined) == len(TABLES) + len(query_views.views()):
                        raise
                    self._bind_tables(frozenset(TABLES) | frozenset(query_views.views()), _WHOLE)
                    return take(connection.sql(query, params=params or None))

    def _bind(self, query: str, params: Params, *, may_hold: bool) -> None:
        """Make every table and view that a query mentions answer, each over the files that the query may need."""
        names = query_views.mentioned(query)
        plan = _WHOLE
        tables = [name for name in names if name in TABLES]
        # Planning a query that does not say which rows it wants is not worth its milliseconds.
        has_conditions = query_pruning.CONDITIONS.search(query) is not None
        may_hold = may_hold and self._may_hold
        if (may_hold or has_conditions) and any(query_pruning.much(self._files(name)) for name in tables):
            plan = query_pruning.planner().plan(query, params)
        self._bind_tables(names, plan, may_hold=may_hold)

    def _bind_tables(self, names: frozenset[str], plan: query_pruning.Plan, *, may_hold: bool = False) -> None:
        for name in self._inherited - names:  # a name that SQL makes up must not find another snapshot's rows
            self._connection.execute(f"DROP VIEW {query_views.quoted_name(name)}")
            del self._bound[name]
        self._inherited = set()

        def writes() -> frozenset[int]:
            # Those that are known to have written episodes: with files of their own.
            return frozenset(file.write_id for file in self._files("episodes") if file.write_id is not None)

        for name, table in TABLES.items():
            if name not in names:
                continue
            held = self._memory.table(name, plan.columns[name]) if may_hold and name in plan.columns else []
            by_clock = self._by_clock and name == JOBS.name
            wanted = () if by_clock else plan.scans.get(name, ())  # all rows of a lake make its order
            files = self._files(name)
            if not held:
                files, where = query_pruning.needed(table, files, wanted, self._origins, writes)
            places = {file.place for file in files} if table.hides_retracted else set()
            hide = tuple(sorted(place for place in places if self._hides_any(place)))
            if held:
                bound: connections.Bound = (None, "", hide)
                body = query_views.kept_sql(table, held, self._memory.columns(name), hide=bool(hide))
            else:
                bound = (self._paths(files), where, hide)
                body = query_views.table_sql(table, files, hide=hide, where=where, by_clock=by_clock)
            if self._bound.get(name) != bound:
                self._bound_bytes += 0 if held else sum(file.bytes for file in files)
                self._define(f"CREATE OR REPLACE VIEW {query_views.quoted_name(name)} AS {body}")
                self._bound[name] = bound
        for name, text in query_views.views().items():
            if name in names:
                self._bind_view(name, text, self._memory.view(name) if may_hold else [])

    def _bind_view(self, name: str, text: str, held: Sequence[str]) -> None:
        """Make a view answer: from memory, where that holds it, else as it was written."""
        if name in (self._bound if held else self._defined):
            return
        if name in self._bound or name in self._defined:
            self._connection.execute(f"DROP VIEW {query_views.quoted_name(name)}")
            self._bound.pop(name, None)
            self._defined.discard(name)
        if not held:
            self._define(text)
            self._defined.add(name)
            return
        hide = self._hides_any(0)
        text = query_views.held_sql(held, hide=hide)
        self._define(f"CREATE VIEW {query_views.quoted_name(name)} AS {text}")
        self._bound[name] = (None, "", (0,) if hide else ())

    def _over(self, view: str, table: Table, files: Sequence[DataFile]) -> pa.Table:
        """A shipped view over some files alone of the one table that it reads."""
        self._paths(files)
        return self._connection.sql(query_views.over_sql(view, table, files)).to_arrow_table()

    def _paths(self, files: Sequence[DataFile]) -> list[str]:
        """Paths of files, made known to a bucket's file system."""
        self._sizes.update((file.path, file.bytes) for file in files)
        return [file.path for file in files]

    def _define(self, statement: str) -> None:
        try:
            self._connection.execute(statement)
        except duckdb.InterruptException:
            raise
        except duckdb.Error as error:
            raise self._damaged(error) from error

    def _hides_any(self, place: int) -> bool:
        """Whether any episode is hidden in the files of a place; if so, a table in the connection holds them."""
        if place not in self._hides:
            hidden = self._hidden(place)
            self._hides[place] = hidden is not None and not hidden.is_empty()
            if hidden is not None and self._hides[place]:
                self._connection.register("hidden_episodes", hidden.to_frame("episode_id").to_arrow())
                self._connection.execute(f"CREATE TABLE {query_views.hidden(place)} AS FROM hidden_episodes")
                self._connection.unregister("hidden_episodes")
        return self._hides[place]

    def _origins(self, condition: query_pruning.Condition) -> list[query_pruning.Origin]:
        """Where the episodes are that meet a condition on `episode_id` or `group_id`."""
        import polars as pl

        files = self._files("episodes")
        values = ", ".join(str(value) for value in sorted(condition.values or (), key=str))
        if held := self._memory.table("episodes", {*ORIGIN, condition.column}):
            source = f"({' UNION ALL '.join(f'SELECT * FROM {name}' for name in held)})"
        elif sum(file.rows for file in files) <= _MOST_KEPT_KEYS:
            keys_E = episode_keys(tuple(file.path for file in files), self._objects)
            found = keys_E.filter(pl.col(condition.column).is_in(list(condition.values or ())))
            return [query_pruning.Origin(*row) for row in found.select(ORIGIN).unique().iter_rows()]
        else:
            files = [file for file in files if not query_pruning.excluded(file, (condition,))]
            if not files:
                return []
            source = query_views.parquet(TABLES["episodes"], self._paths(files))
        query = f"SELECT DISTINCT {', '.join(ORIGIN)} FROM {source} WHERE {condition.column} IN ({values})"
        return [query_pruning.Origin(*row) for row in self._connection.execute(query).fetchall()]

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
        erased = "If a forget or a vacuum ran meanwhile, read again; else " if "No such file" in text else ""
        return LakeAccessError(f"{self._objects.root}: {text}. {erased}`trajlake doctor` tells what is damaged")
