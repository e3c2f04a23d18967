"""Compaction: many small files become few sorted ones, beside any number of writers and readers.

Only rows whose fate is decided are touched. A file with rows of an unaccepted write stays as it is: its writer may be
about to commit. So a compacted file holds visible rows only, and its name says since when (`FileEntry.clean_since`).
Nothing a reader sees changes, and files that are replaced stay on disk until `vacuum` finds that nobody needs them.
"""

import logging
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lake.errors import TrajlakeError, UsageError
from lake.execution.executor import Executor, with_items
from lake.execution.local import LocalExecutor
from lake.read.query_views import parquet, quoted, quoted_name
from lake.read.snapshot import Snapshot
from lake.read.visibility import is_clean
from lake.storage.commits import CommitLostError
from lake.storage.data_files import FileEntry, Written
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import TABLES
from lake.tables.columns import Table, Visibility

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("trajlake")
TARGET_BYTES = 128 << 20
"""Size of a compacted file."""
FEW_FILES = 100
"""A table is compacted by itself once it has this many small files: they double the cost of opening it."""
MEMORY = "1GB"
_BATCH_ROWS = 8192
_BITS = 16
"""Bits a column contributes to a z-order key: 65,536 quantiles."""


@dataclass(slots=True)
class Compaction:
    """What compaction did to a table."""

    table: str
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    """Before and after count the files that were merged, not the table."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Files of a table that become one."""

    objects: Objects
    table: str
    files: list[FileEntry]
    z_order: tuple[str, ...]
    since: tuple[int, int] | None
    """Versions of `episodes` and `jobs` from which on all rows are visible."""


def merged(part: Bin) -> Written:
    """Write the rows of a bin into a file that no commit names yet; a part of an executor."""
    return _merged_by(Store(part.objects), part)


def _merged_by(store: Store, part: Bin) -> Written:
    rows = ordered_rows(part.objects, part.files, TABLES[part.table], z_order=part.z_order)
    return store.put_aside(part.table, rows, part.since)


def compact(
    store: Store,
    name: str,
    *,
    z_order: Sequence[str] = (),
    target_bytes: int = TARGET_BYTES,
    executor: Executor | None = None,
) -> Compaction:
    """Merge a table's small files; see `Lake.compact`. Raises CommitLostError: another process rewrote the table.

    Bins are merged by an executor, one after another in this process unless given; each is then put in the place of its
    files, in their order.
    """
    _require_columns(name, z_order)
    snapshot = Snapshot(store)
    is_always = TABLES[name].visibility is Visibility.ALWAYS
    decided = [
        entry
        for entry in snapshot.entries(name)
        if is_always or is_clean(entry, snapshot.versions) or snapshot.write_ids(entry) <= snapshot.accepted_write_ids
    ]
    chosen = decided if z_order else [entry for entry in decided if entry.bytes < target_bytes // 2]
    since = None if is_always else (snapshot.versions["episodes"], snapshot.versions["jobs"])
    parts = [
        Bin(store.objects, name, files, tuple(z_order), since)
        for files in _bins(chosen, target_bytes, alone=bool(z_order))
    ]
    done = Compaction(name)
    there = (part for part in parts if _live(store, part) is not None)
    executor = executor or LocalExecutor(1)
    merge = partial(_merged_by, store) if executor.is_here else merged
    for part, written in with_items(executor, merge, there):
        files = part.files
        if (version := _live(store, part)) is None:
            store.objects.delete([f"{name}/{written.add.path}"])
            msg = f"table `{name}` of {store.root} was rewritten by another process; run it again"
            raise CommitLostError(msg)
        store.swap(name, version, files, written, operation="z-order" if z_order else "compact")
        done.files_before += len(files)
        done.files_after += written.rows > 0
        done.bytes_before += sum(entry.bytes for entry in files)
        done.bytes_after += written.add.size if written.rows else 0
    return done


def _live(store: Store, part: Bin) -> int | None:
    """The version of the table, at which all files of a bin are live; None if another process was quicker."""
    version, live = store.files(part.table)
    return version if {entry.name for entry in part.files} <= {entry.name for entry in live} else None


def compact_if_many(store: Store, names: Collection[str], few: int = FEW_FILES) -> None:
    """Compact those tables that have come to `few` small files, or none if that is 0.

    What was written stands whether this works or not. Another process that is at it already is left to it.
    """
    try:
        for name in names if few else ():
            small = [entry for entry in store.files(name)[1] if entry.bytes < TARGET_BYTES // 2]
            if len(small) >= few:
                with suppress(CommitLostError):
                    compact(store, name)
    except TrajlakeError as error:
        _log.warning("%s was not compacted: %s", store.root, error)


def _bins(entries: Sequence[FileEntry], target_bytes: int, *, alone: bool) -> Iterator[list[FileEntry]]:
    """Neighbours in the table's order, together as large as a merged file; a file alone only if asked for."""
    chosen: list[FileEntry] = []
    for entry in sorted(entries, key=lambda one: (one.low.get("run_id") or "", one.low.get("group_id") or 0, one.name)):
        if chosen and sum(other.bytes for other in chosen) + entry.bytes > target_bytes:
            if alone or len(chosen) > 1:
                yield chosen
            chosen = []
        chosen.append(entry)
    if len(chosen) > 1 or (alone and chosen):
        yield chosen


def _require_columns(name: str, z_order: Sequence[str]) -> None:
    if name not in TABLES:
        raise UsageError(f"there is no table `{name}`; the tables are {', '.join(TABLES)}")
    valid = [column.name for column in TABLES[name].columns if not column.type.is_list]
    if unknown := [column for column in z_order if column not in valid]:
        raise UsageError(f"table `{name}` cannot be ordered by {', '.join(unknown)}; valid: {', '.join(valid)}")
    if len(z_order) > 4:
        raise UsageError(f"z-order over {len(z_order)} columns orders by none of them; give at most 4")


def ordered_rows(
    objects: Objects, entries: Sequence[FileEntry], table: Table, *, z_order: Sequence[str] = (), where: str = ""
) -> "Iterator[pa.Table]":
    """Rows of files in the table's order, or along a z-order curve: what compaction, vacuum and erasure write back.

    DuckDB sorts with bounded memory and spills to a temporary folder, so a table's files are merged at any size.

    Args:
        z_order: columns to interleave instead of the table's sort keys.
        where: SQL condition of the rows that stay.
    """
    import duckdb
    import pyarrow as pa

    columns = ", ".join(map(quoted_name, table.names))
    source = parquet(table, (entry.path for entry in entries))
    condition = f" WHERE {where}" if where else ""
    query = f"SELECT {columns} FROM {source}{condition}"
    if z_order:
        query = _along_curve(query, columns, z_order)
    else:
        query += " ORDER BY " + ", ".join(f"{quoted_name(name)} ASC NULLS LAST" for name in table.sort)
    with tempfile.TemporaryDirectory(prefix="trajlake-sort-") as spill, duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET memory_limit = '{MEMORY}'")
        connection.execute(f"SET temp_directory = {quoted(spill)}")
        files = objects.filesystem({entry.path: entry.bytes for entry in entries})
        if files is not None:
            connection.register_filesystem(files)
        schema = table.arrow()
        try:
            for batch in connection.sql(query).to_arrow_reader(_BATCH_ROWS):
                if batch.num_rows:
                    yield pa.Table.from_batches([batch]).cast(schema)
        except duckdb.Error as error:
            raise objects.explained(error) from None


def _along_curve(query: str, columns: str, z_order: Sequence[str]) -> str:
    """Order by a Morton key: the bits of each column's quantile, interleaved."""
    ranks = ", ".join(
        f"ntile({1 << _BITS}) OVER (ORDER BY {quoted_name(name)} NULLS LAST) - 1 AS z{i}"
        for i, name in enumerate(z_order)
    )
    bits = " + ".join(
        f"(((z{i} >> {bit}) & 1)::HUGEINT << {bit * len(z_order) + i})"
        for bit in range(_BITS)
        for i in range(len(z_order))
    )
    return f"SELECT {columns} FROM (SELECT *, {ranks} FROM ({query})) ORDER BY {bits}"
