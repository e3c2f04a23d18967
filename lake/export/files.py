"""The files of an export: rows as lines, as a Parquet table, as a table of SQLite, or as the files of a tree.

Each is written beside its place and renamed when it is whole. Nothing in them depends on the machine or the time.
"""

import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

import msgspec

from lake.errors import LakeAccessError
from lake.export.target import Row, Target

STAGING = ".part"
"""Ending of a file that is not whole."""
SUFFIXES = {"jsonl": ".jsonl", "parquet": ".parquet", "sqlite": ".db"}
"""Of the files of a container; a tree has none of its own."""
_ROWS_A_BATCH = 512
_PIECE = 1 << 20


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Errors of the disk as one sentence. The folder is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        what = error.strerror or error
        place = error.filename or folder
        raise LakeAccessError(f"{place}: {what}; what is written so far is kept: run it again") from error


def write_table(path: Path, rows: Iterable[Row], target: Target) -> tuple[int, int, str]:
    """Write a file of rows; their number, its bytes and its sha256."""
    staging = path.with_name(path.name + STAGING)
    try:
        match target.container:
            case "parquet":
                count = _write_parquet(staging, rows, target)
            case "sqlite":
                count = _write_sqlite(staging, rows, target)
            case _:
                count = write_lines(staging, rows)
        size, digest = staging.stat().st_size, _sha256(staging)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    return count, size, digest


def write_lines(path: Path, rows: Iterable[Row]) -> int:
    """Write a row a line; their number."""
    count = 0
    encoder, buffer = msgspec.json.Encoder(), bytearray()
    with path.open("wb") as file:
        for row in rows:
            encoder.encode_into(row, buffer)
            buffer += b"\n"
            file.write(buffer)
            count += 1
        _sync(file)
    return count


def _write_parquet(path: Path, rows: Iterable[Row], target: Target) -> int:
    if target.schema_of is None:
        assert target.schema is not None
        return _write_batches(path, rows, target.schema())
    # Its columns are known when all rows are: they wait in a file.
    waiting = path.with_name(f"{path.stem}.rows{STAGING}")
    try:
        write_lines(waiting, rows)
        schema, fit = target.schema_of(_lines(waiting))
        return _write_batches(path, map(fit, _lines(waiting)), schema)
    finally:
        waiting.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[Row]:
    decode = msgspec.json.Decoder(Row).decode
    with path.open("rb") as file:
        yield from map(decode, file)


def _write_batches(path: Path, rows: Iterable[Row], schema: Any) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Rows cannot be made into columns that are marked as JSON: they are text first.
    unmarked = pa.schema([(field.name, _unmarked(field.type)) for field in schema])
    count, batch = 0, []
    with path.open("wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for row in rows:
                batch.append(row)
                count += 1
                if len(batch) == _ROWS_A_BATCH:
                    writer.write_table(pa.Table.from_pylist(batch, unmarked).cast(schema))
                    batch.clear()
            writer.write_table(pa.Table.from_pylist(batch, unmarked).cast(schema))
        _sync(file)
    return count


def _unmarked(kind: Any) -> Any:
    """An Arrow type with what is stored in place of what it is marked as."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_list(kind):
        return pa.list_(_unmarked(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _unmarked(field.type)) for field in kind])
    return kind


def _write_sqlite(path: Path, rows: Iterable[Row], target: Target) -> int:
    assert target.schema is not None
    *definitions, insert = target.schema()
    path.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            # What a killed export leaves is written anew, so nothing has to be undone.
            db.execute("PRAGMA journal_mode = OFF")
            for definition in definitions:
                db.execute(definition)
            db.execute("BEGIN")
            count = db.executemany(insert, rows).rowcount
            db.execute("COMMIT")
    except sqlite3.OperationalError as error:
        raise OSError(None, f"SQLite: {error}", str(path)) from error
    with path.open("rb") as file:
        _sync(file)
    return max(count, 0)


def write_tree(folder: Path, rows: Iterable[Row], log: "TreeLog", number: int) -> tuple[int, int, str]:
    """Write the files of some episodes; their number, their bytes and the sha256 of all, with their paths."""
    count = size = 0
    digest = hashlib.sha256()
    written: list[Path] = []
    log.undo(number)
    for row in rows:
        data = row["text"].encode()
        path = folder / row["path"]
        if (there := _content(path)) is not None and there != data:
            path = path.with_name(f"{path.stem}-{row['id']}{path.suffix}")
        if there != data:
            log.add(number, path)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, data, sync=False)
            written.append(path)
        count += 1
        size += len(data)
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + data)
    # All at once: one after the other, the disk would be waited for once a file.
    for path in written:
        with path.open("rb") as file:
            _sync(file)
    return count, size, digest.hexdigest()


class TreeLog:
    """Which files an unfinished tree has, by shard: what is begun anew has to go."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.path = folder / name

    def add(self, number: int, path: Path) -> None:
        """Note a file before it is made."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{number} {path.relative_to(self._folder).as_posix()}\n")

    def undo(self, number: int = 0) -> None:
        """Delete the files of a shard and of those after it."""
        try:
            noted = self.path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return
        kept = []
        for line in noted:
            shard, _, name = line.partition(" ")
            if shard.isdecimal() and int(shard) < number:
                kept.append(line)
            elif name and not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts:
                self._delete(self._folder / name)
        replace(self.path, "".join(f"{line}\n" for line in kept).encode())

    def _delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.with_name(path.name + STAGING).unlink(missing_ok=True)
        for above in path.parents:
            if above == self._folder:
                break
            with suppress(OSError):
                above.rmdir()


def replace(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file in one piece."""
    staging = path.with_name(path.name + STAGING)
    with staging.open("wb") as file:
        file.write(data)
        if sync:
            _sync(file)
    staging.replace(path)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
