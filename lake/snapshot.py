"""A snapshot: one consistent, reopenable view of all tables.

Tables are resolved in the reverse of the order in which writers commit (`RESOLUTION_ORDER`), so whatever a resolved
row refers to is there. A snapshot is a mapping table -> Delta version: printable, storable in a job or a checkpoint,
and reopened with `Lake.at`.
"""

from functools import cached_property
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.columns import Table, Visibility
from lake.errors import ContractError
from lake.query import Session
from lake.store import FileEntry, Store
from lake.tables import RESOLUTION_ORDER, TABLES
from lake.visibility import DataFile, all_files, collected, visible_files, write_ids


class Snapshot:
    """All tables at fixed versions, with dead writes left out.

    Args:
        store: the lake's tables.
        versions: table -> Delta version; None takes the newest of each.
    """

    def __init__(self, store: Store, versions: dict[str, int] | None = None) -> None:
        self._entries: dict[str, list[FileEntry]] = {}
        self.versions: dict[str, int] = {}
        self.root = store.root
        if versions is not None and (unknown := set(versions) - set(TABLES)):
            msg = f"a snapshot names unknown tables {sorted(unknown)}; valid: {', '.join(TABLES)}"
            raise ContractError(msg)
        for name in RESOLUTION_ORDER:
            wanted = None if versions is None else versions.get(name, -1)
            if wanted is not None and (not isinstance(wanted, int) or wanted < -1):
                msg = f"table `{name}` has no version {wanted!r}; valid: -1 (no table yet), 0, 1, 2, ..."
                raise ContractError(msg)
            self.versions[name], self._entries[name] = store.files(name, wanted)

    def __repr__(self) -> str:
        """The mapping, as JSON."""
        return f"Snapshot({msgspec.json.encode(self.versions).decode()})"

    def files(self, name: str) -> list[DataFile]:
        """Parquet files of a table that hold visible rows."""
        entries = self._entries[_table(name).name]
        if TABLES[name].visibility is Visibility.ACCEPTED:
            return visible_files(entries, self.accepted_write_ids)
        return all_files(entries)

    def scan(self, name: str) -> pl.LazyFrame:
        """The table's visible rows, lazily, with the columns and types of its spec."""
        table = _table(name)
        files = self.files(name)
        whole = [file.path for file in files if not file.dead]
        parts = [_parquet(whole, table)] if whole else []
        for file in files:
            if file.dead:
                parts.append(_parquet([file.path], table).filter(~pl.col("write_id").is_in(sorted(file.dead))))
        frame = pl.concat(parts) if parts else pl.LazyFrame(schema=table.polars())
        if table.visibility is Visibility.SET:
            frame = frame.sort("write_id").unique(list(table.key), keep="first", maintain_order=True)
        return frame

    def sql(self, query: str, params: list[Any] | dict[str, Any] | None = None) -> pl.DataFrame:
        """Rows of one SELECT over the snapshot (DuckDB). Views: every table by name, and the shipped ones.

        Args:
            query: one SELECT statement; parameters are ? or $name.
            params: their values.

        Raises:
            QueryError: not one SELECT, or SQL that DuckDB refuses.
        """
        with self.session() as session:
            return session.query(query, params)

    def session(self) -> Session:
        """A DuckDB session over the snapshot, for several queries in a row; close it, or use it as a context."""
        return Session({name: self.files(name) for name in TABLES}, self.root)

    @cached_property
    def accepted_write_ids(self) -> frozenset[int]:
        """Write attempts whose rows exist: those of `episodes`, and those a succeeded job's terminal row names.

        Raises:
            LakeAccessError: a file of `episodes` or `jobs` is missing or damaged.
        """
        of_episodes = (write_ids(entry) for entry in self._entries["episodes"])
        jobs = self.scan("jobs").filter(pl.col("event") == "succeeded").select("accepted_write_ids")
        of_jobs = collected(jobs)["accepted_write_ids"].explode(empty_as_null=False, keep_nulls=False).to_list()
        return frozenset().union(*of_episodes, of_jobs)

    @cached_property
    def dead_write_ids(self) -> frozenset[int]:
        """Write attempts that left rows nobody sees: of crashed writers, lost races and failed jobs."""
        names = [name for name, table in TABLES.items() if table.visibility is Visibility.ACCEPTED]
        inside = (write_ids(entry) for name in names for entry in self._entries[name])
        return frozenset().union(*inside) - self.accepted_write_ids

    def size(self, name: str) -> tuple[int, int, int]:
        """Files, visible rows (dead rows in shared files counted) and bytes of a table."""
        files = self.files(name)
        return len(files), sum(f.rows for f in files), sum(f.bytes for f in files)

    def fingerprint(self, episodes: pl.DataFrame, **inputs: str | int | float | bool | None) -> int:
        """Hash of what a job reads: its episodes as written, and every other input by name.

        Built from episode_ids and write_ids, which survive compaction, never from files or versions.

        Args:
            episodes: rows with columns episode_id and write_id.
            inputs: for example the filter's text and the consumed series.
        """
        pairs_E2 = episodes.select("episode_id", "write_id").unique().sort("episode_id", "write_id").to_numpy()
        facts = ids.bytes_hash(pairs_E2.astype("<i8", order="C").tobytes())
        return ids.key_hash("fingerprint", facts, *(part for name in sorted(inputs) for part in (name, inputs[name])))


def _parquet(paths: list[str], table: Table) -> pl.LazyFrame:
    """Files as a lazy frame of the table's columns; columns younger than a file are NULL."""
    return pl.scan_parquet(paths, missing_columns="insert", extra_columns="ignore", schema=table.polars())


def _table(name: str) -> Table:
    if name not in TABLES:
        msg = f"there is no table `{name}`; the tables are {', '.join(TABLES)}"
        raise ContractError(msg)
    return TABLES[name]
