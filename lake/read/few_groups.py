"""Rows of a few groups in tables of a connection, for those who ask many small questions about the same ones.

A page about a group or an episode asks a dozen questions of the same few rows. What each of them takes is the binding
of a view over files and the reading of a row group, however little it wants of it; of a small table it takes a tenth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

import duckdb

TABLES = ("episodes", "advantages", "credit_groups")
"""Tables of which rows are copied: narrow ones that say their group."""
_MOST_GROUPS = 16
_MOST_ROWS = 20_000
_MOST_TABLES = 12


class FewGroups:
    """Tables in a connection, each with the rows of a few groups.

    Args:
        connection: where they are made, in the schema `hidden`.
    """

    def __init__(self, connection: Callable[[], duckdb.DuckDBPyConnection]) -> None:
        self._connection = connection
        self._made: OrderedDict[tuple[str, frozenset[int]], str | None] = OrderedDict()
        self._number = 0

    def named(self, table: str, groups: frozenset[int], body: Callable[[], AbstractContextManager[str]]) -> str | None:
        """What the table with the rows of these groups is called; None if groups or rows are too many.

        Args:
            body: SQL of all rows of `table` of these groups, perhaps beside others, that can be run while it lasts.
        """
        if not 0 < len(groups) <= _MOST_GROUPS:
            return None
        key = (table, groups)
        if key not in self._made:
            with body() as rows:
                self._made[key] = self._make(groups, rows)
            while len(self._made) > _MOST_TABLES:
                self._drop(self._made.popitem(last=False)[1])
        self._made.move_to_end(key)
        return self._made[key]

    def leave(self, connection: duckdb.DuckDBPyConnection | None) -> None:
        """Take all of them out of the connection, if that is left to others."""
        for name in self._made.values():
            if connection is not None and name is not None:
                connection.execute(f"DROP TABLE {name}")
        self._made.clear()

    def _make(self, groups: frozenset[int], body: str) -> str | None:
        self._number += 1
        name = f"hidden.few_{self._number}"
        among = ", ".join(map(str, sorted(groups)))
        run = self._connection().execute
        run(f"CREATE TABLE {name} AS SELECT * FROM ({body}) WHERE group_id IN ({among}) LIMIT {_MOST_ROWS + 1}")
        if run(f"SELECT count(*) FROM {name}").fetchall() == [(_MOST_ROWS + 1,)]:
            self._drop(name)
            return None
        return name

    def _drop(self, name: str | None) -> None:
        if name is not None:
            self._connection().execute(f"DROP TABLE {name}")
