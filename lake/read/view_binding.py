"""Binding the names of tables and views in a DuckDB connection, for each query to as little data as it may need.

A table becomes a view over the files that the query's conditions leave (`lake.read.query_pruning`). A session with a
`ColumnCache` may bind it to cached columns instead, or to a copy of the rows of a few groups (`GroupCache`). Columns
that the query does not read may be NULL, since DuckDB takes longer to bind all columns of a wide table than to answer a
small question.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb

from lake.read import query_pruning, query_views
from lake.read.parquet import DataFile, collect_rows, scan_files
from lake.read.query_pruning import Condition, EpisodeOrigin, ReadPlan
from lake.storage.objects import Objects
from lake.tables import JOBS, TABLES
from lake.tables.columns import Table

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from lake.read.column_cache import ColumnCache

Params = Sequence[Any] | Mapping[str, Any] | None
ORIGIN = ("write_id", "run_id", "group_id")
"""Columns of `episodes` that locate an episode's rows."""
GROUP_TABLES = ("episodes", "advantages", "credit_groups")
"""Narrow tables with a group_id, whose rows of a few groups are copied."""
_MOST_IDLE = 2
"""Largest number of idle connections."""
_MOST_GROUPS = 16
_MOST_ROWS = 20_000
_MOST_TABLES = 12
_MOST_KEYS = 1_000_000
"""Largest number of episodes whose keys are kept in memory (40 bytes each); with more, a query looks them up."""
_MOST_CONDITIONS = 200
"""Largest number of conditions whose episode origins are cached."""


class Binding(NamedTuple):
    """What a table's view reads."""

    paths: list[str] | None
    """Files; None for rows in memory."""
    where: str = ""
    """Condition on the rows, or the name of a table in memory."""
    hide: tuple[int, ...] = ()
    """Sets of hidden episodes that are left out."""
    columns: frozenset[str] | None = None
    """Columns with values; None means all."""


# ---------------------------------------------------------------- idle connections


@dataclass(slots=True)
class IdleConnection:
    """A connection of a closed session with the views it defines; a new connection costs more than a query."""

    connection: duckdb.DuckDBPyConnection
    tables: dict[str, Binding]
    """Views of tables."""
    views: set[str]
    """Shipped views."""
    bytes: int
    """Bytes of all files that were ever bound."""


_idle: dict[tuple[Any, ...], IdleConnection] = {}
_idle_lock = threading.Lock()


def take_connection(key: tuple[Any, ...]) -> IdleConnection | None:
    """Remove and return the idle connection of a key; its caller alone may use it."""
    with _idle_lock:
        return _idle.pop(key, None)


def keep_connection(key: tuple[Any, ...], idle: IdleConnection) -> None:
    """Store an idle connection and close surplus ones. The first part of the key is the process id."""
    with _idle_lock:
        surplus = [_idle.pop(key)] if key in _idle else []
        _idle[key] = idle
        while len(_idle) > _MOST_IDLE:
            surplus.append(_idle.pop(next(iter(_idle))))
    for surplus_idle in surplus:
        surplus_idle.connection.close()


@atexit.register
def _close_idle() -> None:
    while _idle:
        key, idle = _idle.popitem()
        if key[0] == os.getpid():
            idle.connection.close()


# ---------------------------------------------------------------- rows in memory


class GroupCache:
    """Tables of a connection, in the schema `hidden`, each with the rows of a few groups.

    A page about a group or an episode asks a dozen questions about the same few rows. Each spends most of its time on
    binding a view over files and reading a row group. A query on a small table takes a tenth of that time.
    """

    def __init__(self, connection: Callable[[], duckdb.DuckDBPyConnection]) -> None:
        self._connection = connection
        self._names: OrderedDict[tuple[str, frozenset[int]], str | None] = OrderedDict()
        self._number = 0

    def find_table(
        self, table: str, groups: frozenset[int], rows_sql: Callable[[], AbstractContextManager[str]]
    ) -> str | None:
        """Return the name of the table with the rows of these groups; None for too many groups or rows.

        Args:
            rows_sql: context manager of a SELECT of the rows of `table` that includes all rows of these groups.
        """
        if not 0 < len(groups) <= _MOST_GROUPS:
            return None
        key = (table, groups)
        if key not in self._names:
            self._number += 1
            name = f"hidden.few_{self._number}"
            condition = f"group_id IN ({', '.join(map(str, sorted(groups)))})"
            run = self._connection().execute
            with rows_sql() as rows:
                run(f"CREATE TABLE {name} AS SELECT * FROM ({rows}) WHERE {condition} LIMIT {_MOST_ROWS + 1}")
            has_too_many = run(f"SELECT count(*) FROM {name}").fetchall() == [(_MOST_ROWS + 1,)]
            if has_too_many:
                self._drop(name)
            self._names[key] = None if has_too_many else name
            while len(self._names) > _MOST_TABLES:
                self._drop(self._names.popitem(last=False)[1])
        self._names.move_to_end(key)
        return self._names[key]

    def release(self, connection: duckdb.DuckDBPyConnection | None) -> None:
        """Forget all tables, and drop them from a connection that stays open."""
        for name in self._names.values():
            if connection is not None and name is not None:
                connection.execute(f"DROP TABLE {name}")
        self._names.clear()

    def _drop(self, name: str | None) -> None:
        if name is not None:
            self._connection().execute(f"DROP TABLE {name}")


@lru_cache(maxsize=2)
def read_episode_keys(paths: tuple[str, ...], objects: Objects) -> pl.DataFrame:
    """Return episode_id and `ORIGIN` of all rows of files of `episodes`, cached because files never change."""
    if not paths:
        return TABLES["episodes"].polars().to_frame().select("episode_id", *ORIGIN)
    return collect_rows(scan_files(paths, TABLES["episodes"], objects.polars_options).select("episode_id", *ORIGIN))


class RegisteredColumns:
    """Cached columns that are registered with one connection.

    Args:
        cache: the columns; None registers nothing.
        files: table name -> files with visible rows.
        connection: the connection.
        query_view: the rows of a view over selected files of the one table that it reads.
    """

    def __init__(
        self,
        cache: ColumnCache | None,
        files: Callable[[str], Sequence[DataFile]],
        connection: Callable[[], duckdb.DuckDBPyConnection],
        query_view: Callable[[str, Table, Sequence[DataFile]], pa.Table],
    ) -> None:
        self._cache = cache
        self._files = files
        self._connection = connection
        self._query_view = query_view
        self._names: dict[str, list[str]] = {}

    def columns(self, table: str) -> frozenset[str]:
        """Return the columns of a table that may be in memory."""
        return frozenset() if self._cache is None else self._cache.columns(table)

    def table(self, name: str, columns: Set[str]) -> list[str]:
        """Return the registered names of a table's blocks; empty if they lack any of the columns."""
        if self._cache is None or not columns & set(TABLES[name].names) <= self._cache.columns(name):
            return []
        if name not in self._names:
            self._register(name, self._cache.rows(name, self._files(name)))
        return self._names[name]

    def view(self, name: str) -> list[str]:
        """Return the registered names of the blocks of a view with a row per episode; empty if it is not cached."""
        if self._cache is None or (table := self._cache.summed(name)) is None:
            return []
        if name not in self._names:
            query_view = partial(self._query_view, name, TABLES[table])
            self._register(name, self._cache.sums(name, self._files(table), query_view))
        return self._names[name]

    def filter_rows(self, name: str, column: str, values: Collection[Any]) -> list[pa.Table]:
        """Return the rows of a fully cached table whose column has one of the values, by block.

        Polars finds them in a fraction of the time that DuckDB takes, and a third of Arrow's.
        """
        import polars as pl
        import pyarrow as pa

        assert self._cache is not None
        blocks = []
        for block in self._cache.rows(name, self._files(name)):
            words = block[column].combine_chunks()
            words = words.dictionary_decode() if pa.types.is_dictionary(words.type) else words
            is_wanted = pl.Series(words).is_in(pl.Series(pa.array(list(values), words.type)).implode())
            blocks.append(block.filter(is_wanted.to_arrow()))
        return blocks

    @contextmanager
    def register_briefly(self, blocks: Sequence[pa.Table]) -> Iterator[list[str]]:
        """Register rows while the context is open, and return their names."""
        names = [f"found_{number}" for number in range(len(blocks))]
        for name, block in zip(names, blocks, strict=True):
            self._connection().register(name, block)
        try:
            yield names
        finally:
            for name in names:
                self._connection().unregister(name)

    def release(self, connection: duckdb.DuckDBPyConnection | None) -> None:
        """Forget all blocks, and unregister them from a connection that stays open."""
        if connection is not None:
            for name in (name for names in self._names.values() for name in names):
                connection.unregister(name)
        self._names = {}

    def _register(self, name: str, blocks: Sequence[pa.Table]) -> None:
        self._names[name] = [f"held_{name}_{number}" for number in range(len(blocks))]
        for block_name, block in zip(self._names[name], blocks, strict=True):
            self._connection().register(block_name, block)


# ---------------------------------------------------------------- tables and views


class BoundViews:
    """The tables and views of a lake in one connection.

    Args:
        connection: the connection.
        files: table name -> files with visible rows.
        objects: location of the lake.
        hidden: number of a set (`DataFile.hidden_set`) -> episodes that readers do not see, int64; None if none.
        define: runs a statement that defines a view.
        sizes: path -> bytes; entries are added for files before they are read.
        by_clock: the files are of several lakes, whose jobs are ordered by time (`query_views.table_sql`).
        cache: columns in memory; queries that read only these open no files.
    """

    def __init__(
        self,
        connection: Callable[[], duckdb.DuckDBPyConnection],
        files: Callable[[str], Sequence[DataFile]],
        objects: Objects,
        hidden: Callable[[int], pl.Series | None],
        define: Callable[[str], None],
        sizes: dict[str, int],
        *,
        by_clock: bool,
        cache: ColumnCache | None,
    ) -> None:
        self._connection = connection
        self._files = files
        self._objects = objects
        self._hidden = hidden
        self._define = define
        self._sizes = sizes
        self._by_clock = by_clock
        self._has_cache = cache is not None
        self._memory = RegisteredColumns(cache, files, connection, self._query_view)
        self._groups = GroupCache(connection)
        self._origins: dict[Condition, list[EpisodeOrigin]] = {}
        self._hides: dict[int, bool] = {}
        self._inherited: set[str] = set()
        self.tables: dict[str, Binding] = {}
        """Bindings of tables, and of views that are read from memory."""
        self.views: set[str] = set()
        """Shipped views that are defined by their own SQL."""
        self.bytes = 0
        """Bytes of all files that were ever bound."""

    def adopt(self, idle: IdleConnection) -> None:
        """Continue with the connection of a closed session."""
        self.tables, self.views, self.bytes = idle.tables, idle.views, idle.bytes
        self._inherited = set(idle.tables)

    def release(self, connection: duckdb.DuckDBPyConnection | None) -> IdleConnection | None:
        """Remove this session's data from a connection and return it for the next session; None if it is closed."""
        idle = None
        if connection is not None:
            connection.execute(f"DROP TABLE IF EXISTS {query_views.hidden_table(0)}")
            for name in [name for name, binding in self.tables.items() if binding.paths is None]:
                connection.execute(f"DROP VIEW {query_views.quote_name(name)}")
                del self.tables[name]
            idle = IdleConnection(connection, self.tables, self.views, self.bytes)
        self._groups.release(connection)
        self._memory.release(connection)
        self.tables, self.views, self.bytes, self._hides, self._origins = {}, set(), 0, {}, {}
        return idle

    def bind(self, query: str, params: Params, *, may_cache: bool) -> None:
        """Bind every table and view that a query mentions, each to the data that the query may need.

        Args:
            may_cache: tables may be bound to rows in memory.
        """
        names = query_views.find_mentioned(query)
        may_cache = may_cache and self._has_cache
        plan = ReadPlan({}, {})
        # Planning takes milliseconds. Without a cache it pays only for conditions on large tables.
        if may_cache or (
            query_pruning.CONDITIONS.search(query) is not None
            and any(query_pruning.is_much(self._files(name)) for name in names if name in TABLES)
        ):
            plan = query_pruning.get_planner().plan(query, params)
        self._bind(names, plan, may_cache=may_cache)

    def bind_all(self) -> bool:
        """Bind all tables and views over all files; False if all of them were bound before."""
        names = frozenset(TABLES) | frozenset(query_views.read_views())
        if len(self.tables) + len(self.views) == len(names):
            return False
        self._bind(names, ReadPlan({}, {}), may_cache=False)
        return True

    def _bind(self, names: frozenset[str], plan: ReadPlan, *, may_cache: bool) -> None:
        for name in self._inherited - names:  # a name that SQL makes up must not find another snapshot's rows
            self._connection().execute(f"DROP VIEW {query_views.quote_name(name)}")
            del self.tables[name]
        self._inherited = set()
        for name, table in TABLES.items():
            if name not in names:
                continue
            cached = self._bind_cached(table, plan) if may_cache else None
            binding, body = cached or self._bind_files(table, plan, may_omit=may_cache)
            if self.tables.get(name) != binding:
                self._define(f"CREATE OR REPLACE VIEW {query_views.quote_name(name)} AS {body}")
                self.tables[name] = binding
        for name, text in query_views.read_views().items():
            if name in names:
                self._bind_view(name, text, self._memory.view(name) if may_cache else [])

    def _bind_cached(self, table: Table, plan: ReadPlan) -> tuple[Binding, str] | None:
        """Return a table's binding to memory and its SQL; None if the query needs other columns or too many groups."""
        if table.name not in plan.columns:
            return None
        names = self._memory.table(table.name, plan.columns[table.name])
        # `episodes` has documents that are not copied, so only its cached columns serve.
        if table.name in GROUP_TABLES and (names or table.name != "episodes"):
            groups = query_pruning.find_groups(table, plan.scans[table.name], self._find_origins)
            rows_sql = partial(self._group_rows_sql, table, groups, is_cached=bool(names))
            group_table = self._groups.find_table(table.name, groups, rows_sql)
            if group_table is not None:
                columns = self._memory.columns(table.name) if names else frozenset(table.names)
                return Binding(None, group_table), query_views.cached_table_sql(table, [group_table], columns)
        if not names:
            return None
        hide = self._find_hiding(table, self._files(table.name))
        columns = self._memory.columns(table.name)
        return Binding(None, hide=hide), query_views.cached_table_sql(table, names, columns, hide=bool(hide))

    @contextmanager
    def _group_rows_sql(self, table: Table, groups: frozenset[int], *, is_cached: bool) -> Iterator[str]:
        """Yield a SELECT of visible rows that includes all rows of some groups."""
        if is_cached:
            hide = self._find_hiding(table, self._files(table.name))
            columns = ", ".join(map(query_views.quote_name, sorted(self._memory.columns(table.name))))
            blocks = self._memory.filter_rows(table.name, "group_id", groups)
            with self._memory.register_briefly(blocks) as names:
                yield query_views.cached_rows_sql(names, columns, hide=bool(hide))
            return
        scan = (Condition("group_id", frozenset(groups)),)
        files, _ = self._choose_files(table, [scan])
        self._announce(files)
        hide = self._find_hiding(table, files)
        yield query_views.table_sql(table, files, hide=hide, complete=self._find_complete(table, files))

    def _bind_files(self, table: Table, plan: ReadPlan, *, may_omit: bool) -> tuple[Binding, str]:
        """Return a table's binding to files and its SQL.

        Args:
            may_omit: columns that the query does not read may be NULL.
        """
        by_clock = self._by_clock and table.name == JOBS.name
        # The order of jobs of several lakes depends on all rows.
        files, where = self._choose_files(table, () if by_clock else plan.scans.get(table.name, ()))
        hide = self._find_hiding(table, files)
        paths, complete, columns = self._announce(files), self._find_complete(table, files), None
        if may_omit and not by_clock and table.name in plan.columns and len(complete) < len(files):
            columns = frozenset(plan.columns[table.name])
        binding = Binding(paths, where, hide, columns)
        if self.tables.get(table.name) != binding:
            self.bytes += sum(file.bytes for file in files)
        return binding, query_views.table_sql(
            table, files, hide=hide, where=where, by_clock=by_clock, columns=columns, complete=complete
        )

    def _choose_files(self, table: Table, scans: Sequence[query_pruning.Scan]) -> tuple[list[DataFile], str]:
        return query_pruning.choose_files(
            table,
            self._files(table.name),
            scans,
            self._find_origins,
            lambda: frozenset(file.write_id for file in self._files("episodes") if file.write_id is not None),
        )

    def _bind_view(self, name: str, text: str, blocks: Sequence[str]) -> None:
        """Bind a view to its blocks in memory, or else to its own SQL."""
        if name in (self.tables if blocks else self.views):
            return
        if name in self.tables or name in self.views:
            self._connection().execute(f"DROP VIEW {query_views.quote_name(name)}")
            self.tables.pop(name, None)
            self.views.discard(name)
        if not blocks:
            self._define(text)
            self.views.add(name)
            return
        hide = self._hides_any(0)
        text = query_views.cached_rows_sql(blocks, hide=hide)
        self._define(f"CREATE VIEW {query_views.quote_name(name)} AS {text}")
        self.tables[name] = Binding(None, hide=(0,) if hide else ())

    def _query_view(self, view: str, table: Table, files: Sequence[DataFile]) -> pa.Table:
        """Return the rows of a shipped view over selected files of the one table that it reads."""
        self._announce(files)
        query = query_views.view_over_files_sql(view, table, files, self._find_complete(table, files))
        return self._connection().sql(query).to_arrow_table()

    def _announce(self, files: Sequence[DataFile]) -> list[str]:
        """Tell a bucket's file system the sizes of files, and return their paths."""
        self._sizes.update((file.path, file.bytes) for file in files)
        return [file.path for file in files]

    def _find_complete(self, table: Table, files: Sequence[DataFile]) -> frozenset[str]:
        """Return the paths of files that have all columns; none in a bucket, where each footer takes a request."""
        if self._objects.folder is None:
            return frozenset()
        return query_views.find_complete(self._connection(), table, files)

    def _find_hiding(self, table: Table, files: Sequence[DataFile]) -> tuple[int, ...]:
        """Return the numbers of the sets of hidden episodes that apply to the files."""
        numbers = {file.hidden_set for file in files} if table.hides_retracted else set()
        return tuple(sorted(number for number in numbers if self._hides_any(number)))

    def _hides_any(self, hidden_set: int) -> bool:
        """Return whether a set hides any episode; if so, create its table in the connection."""
        if hidden_set not in self._hides:
            hidden = self._hidden(hidden_set)
            self._hides[hidden_set] = hidden is not None and not hidden.is_empty()
            if hidden is not None and self._hides[hidden_set]:
                connection = self._connection()
                connection.register("hidden_episodes", hidden.to_frame("episode_id").to_arrow())
                connection.execute(f"CREATE TABLE {query_views.hidden_table(hidden_set)} AS FROM hidden_episodes")
                connection.unregister("hidden_episodes")
        return self._hides[hidden_set]

    def _find_origins(self, condition: Condition) -> list[EpisodeOrigin]:
        """Return the origins of the episodes that meet a condition on `episode_id` or `group_id`."""
        if condition not in self._origins:
            if len(self._origins) > _MOST_CONDITIONS:
                self._origins.clear()
            self._origins[condition] = self._read_origins(condition)
        return self._origins[condition]

    def _read_origins(self, condition: Condition) -> list[EpisodeOrigin]:
        import polars as pl

        values = condition.values or frozenset()
        if self._memory.table("episodes", {*ORIGIN, condition.column}):
            blocks = self._memory.filter_rows("episodes", condition.column, values)
            rows = {tuple(row[name] for name in ORIGIN) for block in blocks for row in block.select(ORIGIN).to_pylist()}
            return [EpisodeOrigin(*row) for row in rows]
        files = self._files("episodes")
        if sum(file.rows for file in files) <= _MOST_KEYS:
            keys_E = read_episode_keys(tuple(file.path for file in files), self._objects)
            origins = keys_E.filter(pl.col(condition.column).is_in(list(values))).select(ORIGIN).unique()
            return [EpisodeOrigin(*row) for row in origins.iter_rows()]
        files = [file for file in files if not query_pruning.excludes_file(file, (condition,))]
        if not files:
            return []
        source = query_views.read_parquet_sql(TABLES["episodes"], self._announce(files))
        ids = ", ".join(str(value) for value in sorted(values, key=str))
        query = f"SELECT DISTINCT {', '.join(ORIGIN)} FROM {source} WHERE {condition.column} IN ({ids})"
        return [EpisodeOrigin(*row) for row in self._connection().execute(query).fetchall()]
