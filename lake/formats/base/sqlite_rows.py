"""Rows of SQLite files that other tools may be writing at this moment.

Nothing is locked for longer than one row, nothing is written, and nothing is left beside the file. A database in WAL
mode that nobody has open is opened as one that does not change, because SQLite would else create its two files beside
it. As soon as the file changes or a log appears, it is opened anew.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from lake.formats.base.source import Input
from lake.records import Reject

_WAL_MODE = 2
"""Value of the header's bytes 18 and 19 in a file that logs ahead."""
_LOWEST = -(1 << 63)
_CREATED = re.compile(rb"CREATE TABLE (?:IF NOT EXISTS )?[\"'`\\[]?(\w+)")


def opened(path: Path) -> sqlite3.Connection:
    """A connection that reads. Raises sqlite3.Error, OSError."""
    uri = f"{path.absolute().as_uri()}?{'immutable=1' if _is_still(path) else 'mode=ro'}"
    # Rows may be read by one thread and closed by another.
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    db.text_factory = bytes
    return db


def table_rows(file: Input, table: str, column: str) -> Iterator[tuple[int, bytes] | Reject]:
    """The values of a column, as bytes, by row from 0; last, if the file is damaged, a reject that says so."""
    count, last = 0, _LOWEST
    query = f'SELECT rowid, "{column}" FROM "{table}" WHERE rowid > ? ORDER BY rowid LIMIT 1'
    db: sqlite3.Connection | None = None
    seen: tuple[bool, int, int] | None = None
    try:
        while True:
            stat = file.path.stat()
            now = _log(file.path).exists(), stat.st_mtime_ns, stat.st_size
            if db is None or now != seen:
                if db is not None:
                    db.close()
                db, seen = opened(file.path), now
            rows = db.execute(query, (last,)).fetchall()
            if not rows:
                break
            last, value = rows[0]
            yield count, value if isinstance(value, bytes) else str(value).encode()
            count += 1
            file.meter.done = min(file.meter.done + len(rows[0][1] or b""), stat.st_size)
    except (sqlite3.Error, OSError) as error:
        reason = "truncated" if _is_short(file.path) else "malformed"
        message = f"the SQLite file cannot be read from row {count} on: {error}"
        yield Reject(position=count, reason=reason, message=message, raw="")
    finally:
        if db is not None:
            db.close()


def tables(path: Path) -> tuple[str, ...]:
    """Names of the tables; of a damaged file those that its beginning shows. Raises OSError."""
    try:
        with closing(opened(path)) as db:
            return tuple(name.decode() for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))
    except (sqlite3.Error, UnicodeDecodeError):
        with path.open("rb") as file:
            found = _CREATED.findall(file.read(1 << 16))
        return tuple(dict.fromkeys(name.decode() for name in found))


def _is_still(path: Path) -> bool:
    """Whether a file that is in WAL mode has no log: nobody writes it."""
    with path.open("rb") as file:
        header = file.read(20)
    return header[18:19] == bytes([_WAL_MODE]) and not _log(path).exists()


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _is_short(path: Path) -> bool:
    """Whether a file has fewer bytes than its header says."""
    try:
        with path.open("rb") as file:
            header = file.read(32)
        page = int.from_bytes(header[16:18], "big")
        return path.stat().st_size < (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    except OSError:
        return False
