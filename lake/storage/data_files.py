"""A table's data files: as the log lists them, and as new ones are written for it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BytesIO
from typing import IO, TYPE_CHECKING, Annotated, Any, Self, cast
from urllib.parse import unquote

import msgspec
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from lake import ids
from lake.documents import Moment, decode_document
from lake.errors import LakeAccessError
from lake.storage.objects import Objects
from lake.tables.columns import Table

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from lake.storage.encoding import FileStatistics

_DIGEST_BYTES = 16
CLEAN = "clean"
"""How the name of a compacted file begins."""
WRITE_SUMS = 1 << 63
"""Modulus of the sums of write attempts."""
_NAME = re.compile(r"[\w.=+@~, -]*[\w=+@~, -][\w.=+@~, -]*")
"""A plain name: no folder, and nothing that a reader takes for a pattern, a scheme or an escape."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A Parquet file of a table at some version."""

    path: str
    """Where it is, in full."""
    name: str
    """Its path below the table's folder."""
    rows: int
    bytes: int
    written_at: datetime
    """By the clock of whoever wrote it."""
    low: Mapping[str, Any]
    """Minimum of each column in `Table.statistics`; None if not known."""
    high: Mapping[str, Any]
    """Maximum, likewise."""
    emptied: frozenset[int] = frozenset()
    """Write attempts whose rows in it were all forgotten (`Replacements`)."""

    @property
    def only_write_id(self) -> int | None:
        """The write attempt that all rows belong to, if the log says that there is one."""
        low, high = self.low.get("write_id"), self.high.get("write_id")
        return low if low is not None and low == high else None

    @property
    def write_sum(self) -> int | None:
        """Sum of its write attempts modulo 2^63: from the log if there is one, else from its name; None if unknown."""
        parts = self.name.split("-")
        if self.only_write_id is not None:
            return self.only_write_id
        return ids.from_text(parts[-2]) if len(parts) == (6 if parts[0] == CLEAN else 3) else None

    @property
    def clean_since(self) -> tuple[int, int] | None:
        """Versions of `episodes` and `jobs` from which on every row is visible; None if that is not known.

        Compaction takes rows that are visible, and writes the versions it went by into the file's name.
        """
        parts = self.name.split("-")
        return (int(parts[1]), int(parts[2])) if parts[0] == CLEAN else None


def stem(clean_since: tuple[int, int] | None) -> str:
    """How the name of a file begins whose rows are visible from these versions of `episodes` and `jobs` on."""
    return "" if clean_since is None else f"{CLEAN}-{clean_since[0]}-{clean_since[1]}-"


_LATEST = 1 << 47
"""Milliseconds: the year 6429."""


class _Statistics(msgspec.Struct):
    """What the log says of the columns of a file."""

    numRecords: int
    minValues: dict[str, Any]
    maxValues: dict[str, Any]
    nullCount: dict[str, int]


class Told(msgspec.Struct, frozen=True, array_like=True):
    """A data file that another process wrote: what the log is going to say of it."""

    name: Annotated[str, msgspec.Meta(max_length=255, pattern=rf"\A{_NAME.pattern}\.parquet\Z")]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    modified: Annotated[int, msgspec.Meta(ge=0, le=_LATEST)]
    """Milliseconds."""
    statistics: str
    """JSON, as Delta spells it."""
    rows: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    at: Moment

    def check(self) -> None:
        """Raise ValueError, MsgspecError for statistics that no reader of the log could take, or of another file."""
        rows = msgspec.json.decode(self.statistics, type=_Statistics).numRecords
        if rows != self.rows:
            raise ValueError(f"`statistics` are of {rows} rows, and the file has {self.rows}")


@dataclass(slots=True)
class Written:
    """A data file that is on its way into the log, or was put aside for earlier versions."""

    add: AddAction
    rows: int
    at: datetime

    def told(self) -> Told:
        """As another process can be told of it."""
        return Told(self.add.path, self.add.size, self.add.modification_time, self.add.stats, self.rows, self.at)

    @classmethod
    def of(cls, told: Told) -> Self:
        """As another process has told of it."""
        add = AddAction(told.name, told.bytes, {}, told.modified, True, told.statistics)
        return cls(add, told.rows, told.at)


@dataclass(slots=True)
class Staged:
    """Rows with the file that holds them already."""

    rows: pl.DataFrame | None
    """None in a process that only commits the file: whoever wrote it looks after it."""
    written: Written
    job_id: int | None = None


def write_file(objects: Objects, table: Table, rows: Iterator[pa.Table], stem: str, at: datetime) -> Written:
    """Write a data file that no commit names yet.

    The digest of its bytes is part of its name: a bit that flips later would decode to another value, and nobody would
    know (`digest_in_name`).
    """
    from lake.storage import encoding

    name = f"{stem}{ids.to_text(ids.fresh_id())}"
    sink = _Sink(objects, f"{table.name}/{name}")
    try:
        statistics = encoding.write(cast("IO[bytes]", sink), rows, table)
        size = sink.tell()
        writes = statistics.write_ids
        # What the log cannot tell of several write attempts, the name does: their sum (`lake.read.lost_rows`).
        path = sink.finish(f"{ids.to_text(sum(writes) % WRITE_SUMS)}-" if len(writes) > 1 else "")
    except BaseException:
        sink.abandon()
        raise
    add = AddAction(path, size, {}, int(at.timestamp() * 1000), True, _statistics_json(statistics))
    return Written(add, statistics.rows, at)


class _Sink:
    """A binary file that hashes what is written: in a folder a staging file, renamed at the end; else a buffer."""

    closed = False

    def __init__(self, objects: Objects, place: str) -> None:
        self._objects = objects
        self._place = place
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        # As object_store names its staging files: no listing shows them, and vacuum knows them.
        self._staging = None if objects.folder is None else objects.folder / f"{place}.parquet#{ids.fresh_id()}"
        self._file: IO[bytes] = BytesIO() if self._staging is None else self._staging.open("xb")

    def write(self, data: Any) -> int:
        """Append bytes."""
        self._digest.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._file.flush()

    def close(self) -> None:
        """What pyarrow calls when it is done; the file is finished or abandoned by whoever opened it."""

    def finish(self, mark: str) -> str:
        """Put the file in its place, under a name that ends with a mark and the digest; return that name."""
        target = f"{self._place}-{mark}{self._digest.hexdigest()}.parquet"
        if self._staging is None:
            assert isinstance(self._file, BytesIO)
            self._objects.put(target, self._file.getvalue())
        self._file.close()
        if self._staging is not None and self._objects.folder is not None:
            self._staging.rename(self._objects.folder / target)
        return target.rpartition("/")[2]

    def abandon(self) -> None:
        """Leave nothing behind."""
        with suppress(OSError):  # a full disk fails the last flush as it failed the write
            self._file.close()
        if self._staging is not None:
            self._staging.unlink(missing_ok=True)


def digest_in_name(name: str) -> str | None:
    """The digest of a file's bytes, from its name; None for files that were not written here, or by format 1."""
    digest = name.removesuffix(".parquet").rpartition("-")[2]
    return digest if re.fullmatch(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}", digest) else None


def digest_of(objects: Objects, place: str) -> str:
    """The digest of a file's bytes as they are now. Raises FileNotFoundError: there is no such file."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if objects.folder is None:
        if (data := objects.get(place)) is None:
            raise FileNotFoundError(errno.ENOENT, "No such file", objects.uri(place))
        digest.update(data)
    else:
        with (objects.folder / place).open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def listed(objects: Objects, table: Table, handle: DeltaTable) -> list[FileEntry]:
    """The live files at a version, by path. Raises LakeAccessError: one outside the folder, or for other readers."""
    version = handle.version()
    maps_columns = handle.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
    if maps_columns or "deletionVectors" in (handle.protocol().reader_features or ()):
        raise LakeAccessError(
            f"table `{table.name}` of {objects.root} at version {version} may have deletion vectors or mapped columns: "
            "another tool wrote it, and no reader here applies them. Rewrite it there without, or restore a backup"
        )
    # Read as it comes: turned into a pyarrow table it would import pandas, a third of a second.
    actions = handle.get_add_actions(flatten=True)
    present = set(actions.schema.names)

    def column(key: str) -> list[Any]:
        return list(actions.column(key).to_pylist()) if key in present else [None] * actions.num_rows

    keys = table.statistics
    lows, highs = ([column(f"{end}.{key}") for key in keys] for end in ("min", "max"))
    names = _names(objects, table, version, column("path"))
    entries = [
        FileEntry(
            objects.uri(f"{table.name}/{name}"),
            name,
            rows,
            size,
            datetime.fromtimestamp(written / 1000, UTC),
            dict(zip(keys, low, strict=True)),
            dict(zip(keys, high, strict=True)),
        )
        for name, rows, size, written, low, high in zip(
            names,
            column("num_records"),
            column("size_bytes"),
            column("modification_time"),
            zip(*lows, strict=True),
            zip(*highs, strict=True),
            strict=True,
        )
    ]
    # delta-rs lists newest first, in no promised order; the file list is part of a snapshot's identity.
    return sorted(entries, key=lambda entry: entry.path)


def added_in(objects: Objects, table: Table, log: bytes, version: int) -> list[FileEntry]:
    """The files that one commit added. Raises LakeAccessError: a file that lies outside the table's folder."""
    where, remedy = objects.uri(f"{table.name}/_delta_log/{version:020d}.json"), "restore it from a backup"
    actions = [decode_document(line, dict[str, Any], where, remedy) for line in log.splitlines()]
    adds = [add for action in actions if (add := action.get("add")) is not None]
    names = _names(objects, table, version, [add["path"] for add in adds])
    entries = []
    for name, add in zip(names, adds, strict=True):
        statistics = decode_document(add["stats"], dict[str, Any], where, remedy)
        low, high = ({key: statistics[end].get(key) for key in table.statistics} for end in ("minValues", "maxValues"))
        written = datetime.fromtimestamp(add["modificationTime"] / 1000, UTC)
        path = objects.uri(f"{table.name}/{name}")
        entries.append(FileEntry(path, name, statistics["numRecords"], add["size"], written, low, high))
    return entries


def _names(objects: Objects, table: Table, version: int, paths: Sequence[str]) -> list[str]:
    """Files of the table's folder, as a log names them. Raises LakeAccessError: one may lead readers elsewhere."""
    names = [unquote(path) for path in paths]
    links = _links(objects, table.name)
    for name in names:
        if not _NAME.fullmatch(name) or not links.isdisjoint((name, "")):
            raise LakeAccessError(
                f"table `{table.name}` of {objects.root} at version {version} names {name!r}, which is no file in its "
                "own folder, so nothing of the table is read. The log was tampered with, or this is a clone that "
                "points to its original: restore it from a backup, or copy the files as well"
            )
    return names


def _links(objects: Objects, name: str) -> set[str]:
    """Names right under a table's folder that are links out of it; the empty name if the folder itself is one."""
    if objects.folder is None:
        return set()
    home = os.path.realpath(objects.folder / name)
    found = set() if home == f"{os.path.realpath(objects.folder)}{os.sep}{name}" else {""}
    with suppress(FileNotFoundError), os.scandir(home) as entries:
        for entry in entries:
            if entry.is_symlink() and not os.path.realpath(entry.path).startswith(f"{home}{os.sep}"):
                found.add(entry.name)
    return found


def sorted_rows(frame: pl.DataFrame, table: Table) -> Iterator[pa.Table]:
    """A frame's rows in the table's order, as Arrow data of its schema."""
    from lake.storage import encoding

    ordered = frame if _is_sorted(frame, table.sort) else frame.sort(table.sort, nulls_last=True)
    yield encoding.arrow(ordered, table)


def _is_sorted(frame: pl.DataFrame, keys: Sequence[str]) -> bool:
    """Whether rows are in ascending order of the keys; a look is ten times cheaper than a sort."""
    import polars as pl

    ordered = pl.lit(value=True)
    for key in reversed(keys):
        value, before = pl.col(key), pl.col(key).shift(1)
        ordered = (before < value) | ((before == value) & ordered)
    return bool(frame.select(ordered.slice(1).all()).item())


def _statistics_json(statistics: FileStatistics) -> str:
    """What the log says of a file, as Delta spells it."""
    low, high = (
        {name: value for name, value in values.items() if value is not None}
        for values in (statistics.low, statistics.high)
    )
    known = {"numRecords": statistics.rows, "minValues": low, "maxValues": high, "nullCount": statistics.nulls}
    return msgspec.json.encode(known).decode()


_REPLACED = "_trajlake/replaced"


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """A deleted file and the one that holds its other rows."""

    old: str
    """Its path below the lake."""
    new: str | None
    """Name of the other in the same table; None if no row is left."""
    rows: int
    bytes: int
    emptied: tuple[int, ...]
    """Write attempts that have no row left in it: they were accepted all the same."""


class Replacements:
    """What `forget` put in the place of files of earlier versions: the same rows without the forgotten episodes'.

    A log is never rewritten, so an earlier version goes on naming files that held something forgotten and are deleted.
    Whoever opens such a version is led to the files without it; named snapshots and interrupted runs keep the rest of
    what they held, and know how much was taken from them. A record is published before its file is deleted.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._read: dict[str, list[Replacement]] = {}

    def publish(self, replaced: Sequence[Replacement]) -> None:
        """Let readers of earlier versions know, before the old files are deleted."""
        if replaced:
            self._objects.put(f"{_REPLACED}/{ids.to_text(ids.fresh_id())}.json", msgspec.json.encode(replaced))

    def records(self) -> list[str]:
        """Addresses of what was published, sorted: where there are more, earlier versions are read otherwise."""
        return sorted(found.path for found in self._objects.list(_REPLACED))

    def known(self) -> dict[str, Replacement]:
        """Replacements by the old file's path; each record is read once."""
        for found in self._objects.list(_REPLACED):
            if found.path not in self._read and (data := self._objects.get(found.path)) is not None:
                where, remedy = self._objects.uri(found.path), "restore it from a backup"
                self._read[found.path] = decode_document(data, list[Replacement], where, remedy)
        return {one.old: one for path in sorted(self._read) for one in self._read[path]}


def applied(
    objects: Objects, name: str, entries: Iterable[FileEntry], known: Mapping[str, Replacement]
) -> tuple[list[FileEntry], list[FileEntry]]:
    """Files of a version as they are read now, by path, and those of which nothing is left.

    A replacement may have been replaced again. What the log says of ranges still holds: they only shrink.
    """
    if not known:
        return list(entries), []
    there, gone = [], []
    for entry in entries:
        found = entry
        while (one := known.get(f"{name}/{found.name}")) is not None:
            emptied = found.emptied | frozenset(one.emptied)
            if one.new is None:
                gone.append(replace(found, emptied=emptied))
                break
            path = objects.uri(f"{name}/{one.new}")
            found = replace(found, path=path, name=one.new, rows=one.rows, bytes=one.bytes, emptied=emptied)
        else:
            there.append(found)
    return sorted(there, key=lambda entry: entry.path), gone
