"""What the names of tables and views stand for in a connection: for each query no more than it may need.

A table is a view over the files that the query's conditions leave (`lake.read.query_pruning`). For those who ask many
questions, who hold narrow columns in memory (`lake.read.kept`), it is one over these, or over a copy of the rows of a
few groups (`lake.read.few_groups`), or one in which columns that the query does not read are NULL: to name the columns
of a wide table takes DuckDB longer than to answer a small question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import duckdb

from lake.read import footers, query_pruning, query_views
from lake.read.connections import Bound, Idle
from lake.read.few_groups import TABLES as OF_FEW_GROUPS
from lake.read.few_groups import FewGroups
from lake.read.in_memory import ORIGIN, InMemory, episode_keys
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
_MOST_FOUND = 200
"""Conditions of which it is remembered where their episodes are."""
_WHOLE = query_pruning.Plan({}, {})
Params = Sequence[Any] | Mapping[str, Any] | None


class BoundViews:
    """The tables and views of a lake in one connection.

    Args:
        connection: the connection.
        files: table name -> files with visible rows.
        objects: where the lake lies.
        hidden: the episodes that readers do not see in the files of a place (`DataFile.place`), int64; None if none.
        define: runs a statement that defines something.
        sizes: path -> bytes, which is told of files before they are read.
        by_clock: the files are of several lakes, whose jobs are ordered by time (`query_views.table_sql`).
        kept: columns in memory that serve instead of files where they are all that a query reads.
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
        kept: Kept | None,
    ) -> None:
        self._connection = connection
        self._files = files
        self._objects = objects
        self._hidden = hidden
        self._define = define
        self._sizes = sizes
        self._by_clock = by_clock
        self._is_kept = kept is not None
        self._memory = InMemory(kept, files, connection, self._over)
        self._few = FewGroups(connection)
        self._found: dict[query_pruning.Condition, list[query_pruning.Origin]] = {}
        self._hides: dict[int, bool] = {}
        self._inherited: set[str] = set()
        self.tables: dict[str, Bound] = {}
        """What a table, or a view that is held, stands for."""
        self.views: set[str] = set()
        """The shipped views that are there as they were written."""
        self.bytes = 0
        """Of files that were ever bound."""

    def take(self, idle: Idle) -> None:
        """Go on with a connection that another session has left."""
        self.tables, self.views, self.bytes = idle.bound, idle.defined, idle.bytes
        self._inherited = set(idle.bound)

    def leave(self, connection: duckdb.DuckDBPyConnection | None) -> Idle | None:
        """What another session can go on with, without what only this one knows; None: the connection is closed."""
        left = None if connection is None else self._left(connection)
        self._few.leave(connection)
        self._memory.leave(connection)
        self.tables, self.views, self.bytes, self._hides, self._found = {}, set(), 0, {}, {}
        return left

    def _left(self, connection: duckdb.DuckDBPyConnection) -> Idle:
        connection.execute(f"DROP TABLE IF EXISTS {query_views.hidden(0)}")
        for name in [name for name, (files, *_) in self.tables.items() if files is None]:
            connection.execute(f"DROP VIEW {query_views.quoted_name(name)}")
            del self.tables[name]
        return Idle(connection, self.tables, self.views, self.bytes)

    def bind(self, query: str, params: Params, *, may_hold: bool) -> None:
        """Make every table and view that a query mentions answer, each over what the query may need.

        Args:
            may_hold: what this session holds may stand for a table.
        """
        names = query_views.mentioned(query)
        may_hold = may_hold and self._is_kept
        plan = _WHOLE
        if may_hold or self._is_worth_a_plan(query, names):
            plan = query_pruning.planner().plan(query, params)
        self._bind(names, plan, may_hold=may_hold)

    def bind_all(self) -> bool:
        """Make all tables and views answer, over all files; False if all of them did before."""
        everything = frozenset(TABLES) | frozenset(query_views.views())
        if len(self.tables) + len(self.views) == len(everything):
            return False
        self._bind(everything, _WHOLE, may_hold=False)
        return True

    def _is_worth_a_plan(self, query: str, names: frozenset[str]) -> bool:
        """Whether a query says which rows it wants, of tables so large that this is worth a plan's milliseconds."""
        if query_pruning.CONDITIONS.search(query) is None:
            return False
        return any(query_pruning.much(self._files(name)) for name in names if name in TABLES)

    def _bind(self, names: frozenset[str], plan: query_pruning.Plan, *, may_hold: bool) -> None:
        for name in self._inherited - names:  # a name that SQL makes up must not find another snapshot's rows
            self._connection().execute(f"DROP VIEW {query_views.quoted_name(name)}")
            del self.tables[name]
        self._inherited = set()
        for name, table in TABLES.items():
            if name not in names:
                continue
            bound, body = (self._held(table, plan) if may_hold else None) or self._read(table, plan, may_hold=may_hold)
            if self.tables.get(name) != bound:
                self._define(f"CREATE OR REPLACE VIEW {query_views.quoted_name(name)} AS {body}")
                self.tables[name] = bound
        for name, text in query_views.views().items():
            if name in names:
                self._bind_view(name, text, self._memory.view(name) if may_hold else [])

    def _held(self, table: Table, plan: query_pruning.Plan) -> tuple[Bound, str] | None:
        """What stands for a table and its SQL, if all that a query reads of it is held, or is of a few groups."""
        if table.name not in plan.columns:
            return None
        held = self._memory.table(table.name, plan.columns[table.name])
        # Of `episodes` no documents are copied: only what is held.
        if table.name in OF_FEW_GROUPS and (held or table.name != "episodes"):
            groups = query_pruning.groups_of(table, plan.scans[table.name], self._origins)
            few = self._few.named(table.name, groups, lambda: self._of_groups(table, groups, is_held=bool(held)))
            if few is not None:
                columns = self._memory.columns(table.name) if held else frozenset(table.names)
                return (None, few, (), None), query_views.kept_sql(table, [few], columns)
        if not held:
            return None
        hide = self._hiding(table, self._files(table.name))
        body = query_views.kept_sql(table, held, self._memory.columns(table.name), hide=bool(hide))
        return (None, "", hide, None), body

    @contextmanager
    def _of_groups(self, table: Table, groups: frozenset[int], *, is_held: bool) -> Iterator[str]:
        """SQL of the visible rows of some groups, perhaps beside others."""
        if is_held:
            hide = self._hiding(table, self._files(table.name))
            columns = ", ".join(map(query_views.quoted_name, sorted(self._memory.columns(table.name))))
            with self._memory.registered(self._memory.found(table.name, "group_id", groups)) as names:
                yield query_views.held_sql(names, columns, hide=bool(hide))
            return
        scan = (query_pruning.Condition("group_id", frozenset(groups)),)
        files, _ = query_pruning.needed(table, self._files(table.name), [scan], self._origins, self._writes)
        self._paths(files)
        yield query_views.table_sql(table, files, hide=self._hiding(table, files), whole=self._whole(table, files))

    def _read(self, table: Table, plan: query_pruning.Plan, *, may_hold: bool) -> tuple[Bound, str]:
        """What stands for a table and its SQL, over files."""
        by_clock = self._by_clock and table.name == JOBS.name
        wanted = () if by_clock else plan.scans.get(table.name, ())  # all rows of a lake make its order
        files, where = query_pruning.needed(table, self._files(table.name), wanted, self._origins, self._writes)
        hide = self._hiding(table, files)
        paths, whole, columns = self._paths(files), self._whole(table, files), None
        if may_hold and not by_clock and table.name in plan.columns and len(whole) < len(files):
            columns = frozenset(plan.columns[table.name])
        bound = (paths, where, hide, columns)
        if self.tables.get(table.name) != bound:
            self.bytes += sum(file.bytes for file in files)
        return bound, query_views.table_sql(
            table, files, hide=hide, where=where, by_clock=by_clock, columns=columns, whole=whole
        )

    def _bind_view(self, name: str, text: str, held: Sequence[str]) -> None:
        """Make a view answer: from memory, where that holds it, else as it was written."""
        if name in (self.tables if held else self.views):
            return
        if name in self.tables or name in self.views:
            self._connection().execute(f"DROP VIEW {query_views.quoted_name(name)}")
            self.tables.pop(name, None)
            self.views.discard(name)
        if not held:
            self._define(text)
            self.views.add(name)
            return
        hide = self._hides_any(0)
        text = query_views.held_sql(held, hide=hide)
        self._define(f"CREATE VIEW {query_views.quoted_name(name)} AS {text}")
        self.tables[name] = (None, "", (0,) if hide else (), None)

    def _over(self, view: str, table: Table, files: Sequence[DataFile]) -> pa.Table:
        """A shipped view over some files alone of the one table that it reads."""
        self._paths(files)
        query = query_views.over_sql(view, table, files, self._whole(table, files))
        return self._connection().sql(query).to_arrow_table()

    def _paths(self, files: Sequence[DataFile]) -> list[str]:
        """Paths of files, made known to a bucket's file system."""
        self._sizes.update((file.path, file.bytes) for file in files)
        return [file.path for file in files]

    def _whole(self, table: Table, files: Sequence[DataFile]) -> frozenset[str]:
        """Paths of files that have all columns; in a bucket each look would take a request."""
        return frozenset() if self._objects.folder is None else footers.whole(self._connection(), table, files)

    def _writes(self) -> frozenset[int]:
        """Writes that are known to have written episodes: with files of their own."""
        return frozenset(file.write_id for file in self._files("episodes") if file.write_id is not None)

    def _hiding(self, table: Table, files: Sequence[DataFile]) -> tuple[int, ...]:
        """Places of files of which episodes are hidden."""
        places = {file.place for file in files} if table.hides_retracted else set()
        return tuple(sorted(place for place in places if self._hides_any(place)))

    def _hides_any(self, place: int) -> bool:
        """Whether any episode is hidden in the files of a place; if so, a table in the connection holds them."""
        if place not in self._hides:
            hidden = self._hidden(place)
            self._hides[place] = hidden is not None and not hidden.is_empty()
            if hidden is not None and self._hides[place]:
                connection = self._connection()
                connection.register("hidden_episodes", hidden.to_frame("episode_id").to_arrow())
                connection.execute(f"CREATE TABLE {query_views.hidden(place)} AS FROM hidden_episodes")
                connection.unregister("hidden_episodes")
        return self._hides[place]

    def _origins(self, condition: query_pruning.Condition) -> list[query_pruning.Origin]:
        """Where the episodes are that meet a condition on `episode_id` or `group_id`."""
        if condition not in self._found:
            if len(self._found) > _MOST_FOUND:
                self._found.clear()
            self._found[condition] = self._find(condition)
        return self._found[condition]

    def _find(self, condition: query_pruning.Condition) -> list[query_pruning.Origin]:
        import polars as pl

        values = condition.values or frozenset()
        if self._memory.table("episodes", {*ORIGIN, condition.column}):
            parts = self._memory.found("episodes", condition.column, values)
            rows = {tuple(row[name] for name in ORIGIN) for part in parts for row in part.select(ORIGIN).to_pylist()}
            return [query_pruning.Origin(*row) for row in rows]
        files = self._files("episodes")
        if sum(file.rows for file in files) <= _MOST_KEPT_KEYS:
            keys_E = episode_keys(tuple(file.path for file in files), self._objects)
            found = keys_E.filter(pl.col(condition.column).is_in(list(values))).select(ORIGIN).unique()
            return [query_pruning.Origin(*row) for row in found.iter_rows()]
        files = [file for file in files if not query_pruning.excluded(file, (condition,))]
        if not files:
            return []
        source = query_views.parquet(TABLES["episodes"], self._paths(files))
        among = ", ".join(str(value) for value in sorted(values, key=str))
        query = f"SELECT DISTINCT {', '.join(ORIGIN)} FROM {source} WHERE {condition.column} IN ({among})"
        return [query_pruning.Origin(*row) for row in self._connection().execute(query).fetchall()]
