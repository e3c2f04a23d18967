"""The only module that touches deltalake: opening, creating, appending, listing files.

A lake is a folder of Delta tables, one per entry of `lake.tables.TABLES`, each carrying the format version in its
configuration. Commits of one process go through one `Store`, which keeps a handle per table and serialises its use.

Traps this module absorbs (measured; docs/decisions/0002): a repeated app transaction is a conflict key, not a guard
against duplicates; delta-rs' default of 15 commit retries is too few for eight writers; compaction and appends fall
back to dictionaries and one huge row group unless the writer properties are passed every time.
"""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
from deltalake import (
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    PostCommitHookProperties,
    Schema,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from lake.columns import Table, Type
from lake.errors import ConflictError, LakeAccessError, LakeVersionError, NotALakeError, TrajlakeError
from lake.tables import EPISODES, FORMAT_VERSION, TABLES

FORMAT_KEY = "trajlake.formatVersion"
_ROW_GROUP_BYTES = 16 << 20
_WIDE_ROW_BYTES = 1024
_COMMIT_RETRIES = 200
_APPEND_TRIES = 20
_NO_PERMISSION = "no permission to write here; choose another --lake or change the folder's permissions"
_NO_ROOM = ("No space left", "quota exceeded", "File too large")
_REFUSALS = ("Permission denied", "Operation not permitted", "Read-only")
_CONFIGURATION = {
    FORMAT_KEY: str(FORMAT_VERSION),
    # The default forgets versions after 30 days; a pinned snapshot must open years later.
    "delta.logRetentionDuration": "interval 36500 days",
    "delta.dataSkippingNumIndexedCols": "32",
}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A Parquet file of a table at some version."""

    path: str
    rows: int
    bytes: int
    low_write_id: int | None
    high_write_id: int | None


class CommitLostError(ConflictError):
    """Another writer committed episodes first: check again and retry."""


@cache
def writer_properties(table: Table) -> WriterProperties:
    """How every file of a table is encoded.

    zstd (level 3 for text and tokens; level 1 for narrow tables of numbers, which it packs as small in three quarters
    of the time), dictionaries for words only, BYTE_STREAM_SPLIT for floats, plain for ids, which repeat from row to
    row, and row groups of about 16 MB. Lists stay plain: delta-rs ignores properties of nested columns, a
    BYTE_STREAM_SPLIT default would hit the lists of booleans too, and for token ids plain is the smaller encoding.
    """
    floats = ColumnProperties(dictionary_enabled=False, encoding="BYTE_STREAM_SPLIT")
    words = ColumnProperties(dictionary_enabled=True)
    overrides = {}
    for column in table.columns:
        if column.type is Type.WORD:
            overrides[column.name] = words
        elif column.type is Type.FLOAT:
            overrides[column.name] = floats
    return WriterProperties(
        compression="ZSTD",
        compression_level=3 if table.row_bytes >= _WIDE_ROW_BYTES else 1,
        max_row_group_size=max(1024, _ROW_GROUP_BYTES // table.row_bytes),
        default_column_properties=ColumnProperties(dictionary_enabled=False, encoding="PLAIN"),
        column_properties=overrides,
    )


class Store:
    """The Delta tables of one lake.

    Args:
        root: folder of the lake.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._handles: dict[str, DeltaTable] = {}
        self._lock = threading.RLock()

    def exists(self) -> bool:
        """Whether the root holds a lake."""
        return DeltaTable.is_deltatable(self._path(EPISODES.name))

    def create(self) -> None:
        """Create every table that is missing; safe beside another process doing the same."""
        for table in TABLES.values():
            if DeltaTable.is_deltatable(self._path(table.name)):
                continue
            _require_writable(Path(self.root))
            with _translated(self._path(table.name)):
                try:
                    DeltaTable.create(
                        self._path(table.name),
                        schema=Schema.from_arrow(table.arrow()),
                        mode="ignore",
                        name=table.name,
                        configuration=_CONFIGURATION,
                        raise_if_key_not_exists=False,
                    )
                except CommitFailedError:
                    # Another process created it between the look and the commit.
                    DeltaTable(self._path(table.name))

    def check_format(self) -> None:
        """Refuse a lake that a newer package wrote.

        Raises:
            LakeVersionError: names the table, its version and ours.
            NotALakeError: a Delta table that is not ours.
        """
        for name in TABLES:
            if self.refresh(name) == -1:
                continue
            found = self._handles[name].metadata().configuration.get(FORMAT_KEY, "")
            if not found.isdecimal():
                msg = f"{self._path(name)} is a Delta table, but not of a lake: it names no {FORMAT_KEY}"
                raise NotALakeError(msg)
            if int(found) > FORMAT_VERSION:
                msg = (
                    f"table `{name}` of {self.root} has format version {found}; this trajlake reads up to "
                    f"{FORMAT_VERSION}. Install a newer trajlake: pip install --upgrade trajlake"
                )
                raise LakeVersionError(msg)

    def refresh(self, name: str) -> int:
        """Bring the table's handle to the newest version and return it; -1 if the table does not exist."""
        with self._lock, _translated(self._path(name)):
            handle = self._handles.get(name)
            if handle is not None:
                handle.update_incremental()
                return handle.version()
            try:
                self._handles[name] = DeltaTable(self._path(name))
            except TableNotFoundError:
                return -1
            return self._handles[name].version()

    def files(self, name: str, version: int | None = None) -> tuple[int, list[FileEntry]]:
        """Version and live files of a table: the handle's version, refreshed, or a given one (-1: no files)."""
        if version == -1:
            return -1, []
        with self._lock:
            if version is None:
                if self.refresh(name) == -1:
                    return -1, []
                handle = self._handles[name]
            else:
                handle = self._open_at(name, version)
            with _translated(self._path(name)):
                return handle.version(), self._entries(handle, name)

    def append(self, name: str, frame: pl.DataFrame) -> int:
        """Append rows unconditionally and return the new version."""
        self._require_writable(name)
        with self._lock:
            if self.refresh(name) == -1:
                self.create()  # a lake older than this table, or made by a process that was killed
            for _ in range(_APPEND_TRIES):
                self.refresh(name)
                try:
                    self._write(name, frame, CommitProperties(max_commit_retries=_COMMIT_RETRIES))
                except CommitFailedError as error:
                    # delta-rs has no blind append: beside a compaction it may call a conflict where there is none.
                    lost = error
                else:
                    return self._handles[name].version()
        msg = f"table `{name}` of {self.root} is too busy: {_APPEND_TRIES} commits failed ({lost}); try again later"
        raise ConflictError(msg)

    def append_episodes(self, frame: pl.DataFrame, checked_version: int) -> None:
        """Append to `episodes` as a compare-and-swap on the version the caller has checked.

        Every append to `episodes` carries the same app transaction, so two that start from the same version cannot
        both succeed.

        Raises:
            CommitLostError: another writer was first; refresh, check again, retry.
        """
        self._require_writable(EPISODES.name)
        with self._lock:
            handle = self._handles[EPISODES.name]
            if handle.version() != checked_version:
                msg = f"`episodes` moved from version {checked_version} to {handle.version()}"
                raise CommitLostError(msg)
            with _translated(self._path(EPISODES.name)):
                number = (handle.transaction_version(EPISODES.name) or 0) + 1
            properties = CommitProperties(
                max_commit_retries=_COMMIT_RETRIES, app_transactions=[Transaction(EPISODES.name, number)]
            )
            try:
                self._write(EPISODES.name, frame, properties)
            except CommitFailedError as error:
                msg = f"`episodes` changed after version {checked_version}"
                raise CommitLostError(msg) from error

    def history(self, name: str, limit: int | None = None) -> list[dict[str, Any]]:
        """Commits of a table, newest first, as delta-rs reports them."""
        with _translated(self._path(name)):
            return DeltaTable(self._path(name)).history(limit)

    def _write(self, name: str, frame: pl.DataFrame, commit: CommitProperties) -> None:
        table = TABLES[name]
        ordered = frame if _is_sorted(frame, table.sort) else frame.sort(table.sort, nulls_last=True)
        data = ordered.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(table.arrow())
        with _translated(self._path(name)):
            write_deltalake(
                self._handles[name],
                data,
                mode="append",
                writer_properties=writer_properties(table),
                commit_properties=commit,
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )

    def _entries(self, handle: DeltaTable, name: str) -> list[FileEntry]:
        # Read as it comes: turned into a pyarrow table it would import pandas, a third of a second.
        actions = handle.get_add_actions(flatten=True)
        present = actions.schema.names
        folder = self._path(name)
        wanted = ("path", "num_records", "size_bytes", "min.write_id", "max.write_id")
        columns = {key: actions.column(key).to_pylist() for key in wanted if key in present}
        nothing = [None] * actions.num_rows
        entries = [
            FileEntry(f"{folder}/{unquote(path)}", rows, size, low, high)
            for path, rows, size, low, high in zip(
                columns["path"],
                columns["num_records"],
                columns["size_bytes"],
                columns.get("min.write_id", nothing),
                columns.get("max.write_id", nothing),
                strict=True,
            )
        ]
        # delta-rs lists newest first, in no promised order; the file list is part of a snapshot's identity.
        return sorted(entries, key=lambda entry: entry.path)

    def _open_at(self, name: str, version: int) -> DeltaTable:
        with _translated(self._path(name)):
            try:
                return DeltaTable(self._path(name), version=version)
            except DeltaError as error:
                msg = f"table `{name}` of {self.root} has no version {version}; its newest is {self.refresh(name)}"
                raise LakeAccessError(msg) from error

    def _require_writable(self, name: str) -> None:
        for folder in (Path(self._path(name)), Path(self._path(name), "_delta_log")):
            _require_writable(folder)

    def _path(self, name: str) -> str:
        return str(Path(self.root, name))


def _is_sorted(frame: pl.DataFrame, keys: Sequence[str]) -> bool:
    """Whether rows are in ascending order of the keys; a look is ten times cheaper than a sort."""
    ordered = pl.lit(value=True)
    for key in reversed(keys):
        value, before = pl.col(key), pl.col(key).shift(1)
        ordered = (before < value) | ((before == value) & ordered)
    return bool(frame.select(ordered.slice(1).all()).item())


def _require_writable(folder: Path) -> None:
    """Raise before delta-rs is asked to write where it cannot: it would also print a panic of its own."""
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
        msg = f"{folder}: {_NO_PERMISSION}"
        raise LakeAccessError(msg)


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Turn what storage can do to us into errors that say what to do; conflicts pass through."""
    try:
        yield
    except (CommitFailedError, TrajlakeError):
        raise
    except TableNotFoundError as error:
        msg = f"{path} holds no table; is this a lake? `trajlake ingest FILE --lake URI` makes one"
        raise NotALakeError(msg) from error
    except (DeltaError, OSError, pl.exceptions.PolarsError, pa.ArrowException) as error:
        raise LakeAccessError(f"{path}: {_advice(error)}") from error


def _advice(error: BaseException) -> str:
    text = " ".join(str(error).split())
    code = getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(words in text for words in _NO_ROOM):
        return f"the disk is full; what was being written is not visible. Free space and run it again. ({text})"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS) or any(words in text for words in _REFUSALS):
        return f"{_NO_PERMISSION}. ({text})"
    return f"{text}. `trajlake doctor` tells what is damaged"
