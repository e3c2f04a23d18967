"""What a connection has of a lake in memory: parts of tables and views that `lake.read.kept` holds, by their names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import duckdb

from lake.read.visibility import DataFile
from lake.storage.objects import Objects
from lake.tables import TABLES
from lake.tables.columns import Table

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from lake.read.kept import Kept

ORIGIN = ("write_id", "run_id", "group_id")
"""Columns that say where an episode's rows are."""


@lru_cache(maxsize=2)
def episode_keys(paths: tuple[str, ...], objects: Objects) -> pl.DataFrame:
    """episode_id and `ORIGIN` of all rows of files of `episodes`, kept for the next query: files never change."""
    from lake.read.parquet import collected, scan

    if not paths:
        return TABLES["episodes"].polars().to_frame().select("episode_id", *ORIGIN)
    return collected(scan(paths, TABLES["episodes"], objects.polars_options).select("episode_id", *ORIGIN))


class InMemory:
    """Parts that are registered with one connection.

    Args:
        kept: what holds them; None: nothing is in memory.
        files: table name -> files with visible rows.
        connection: the connection.
        over: a view over some files alone of the one table that it reads.
    """

    def __init__(
        self,
        kept: Kept | None,
        files: Callable[[str], Sequence[DataFile]],
        connection: Callable[[], duckdb.DuckDBPyConnection],
        over: Callable[[str, Table, Sequence[DataFile]], pa.Table],
    ) -> None:
        self._kept = kept
        self._files = files
        self._connection = connection
        self._over = over
        self._names: dict[str, list[str]] = {}

    def columns(self, table: str) -> frozenset[str]:
        """What may be in memory of a table."""
        return frozenset() if self._kept is None else self._kept.columns(table)

    def table(self, name: str, columns: Set[str]) -> list[str]:
        """What the parts of a table are called; none if they do not hold all of these columns."""
        if self._kept is None or not columns & set(TABLES[name].names) <= self._kept.columns(name):
            return []
        if name not in self._names:
            self._register(name, self._kept.rows(name, self._files(name)))
        return self._names[name]

    def found(self, name: str, column: str, values: Collection[Any]) -> list[pa.Table]:
        """Rows of a table of which all that is held is read, in parts, whose column has one of some values.

        Arrow finds them in a fraction of the time in which DuckDB goes through its rows.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        assert self._kept is not None
        found = []
        for part in self._kept.rows(name, self._files(name)):
            words = part[column].combine_chunks()
            words = words.dictionary_decode() if pa.types.is_dictionary(words.type) else words
            found.append(part.filter(pc.is_in(words, pa.array(list(values), words.type))))
        return found

    @contextmanager
    def registered(self, parts: Sequence[pa.Table]) -> Iterator[list[str]]:
        """What some rows are called in the connection, for as long as this lasts."""
        names = [f"found_{number}" for number in range(len(parts))]
        for called, part in zip(names, parts, strict=True):
            self._connection().register(called, part)
        try:
            yield names
        finally:
            for called in names:
                self._connection().unregister(called)

    def view(self, name: str) -> list[str]:
        """What the parts of a view with a row for each episode are called; none if it is not held."""
        if self._kept is None or (of := self._kept.summed(name)) is None:
            return []
        if name not in self._names:
            self._register(name, self._kept.sums(name, self._files(of), partial(self._over, name, TABLES[of])))
        return self._names[name]

    def leave(self, connection: duckdb.DuckDBPyConnection | None) -> None:
        """Take everything out of the connection, if that is left to others."""
        for part in (part for parts in self._names.values() for part in parts):
            if connection is not None:
                connection.unregister(part)
        self._names = {}

    def _register(self, name: str, parts: Sequence[pa.Table]) -> None:
        self._names[name] = [f"held_{name}_{number}" for number in range(len(parts))]
        for called, part in zip(self._names[name], parts, strict=True):
            self._connection().register(called, part)
