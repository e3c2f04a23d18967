"""Pieces of a big file that belong together and do not stand together: spans of traces that ran at the same time, say.

They go through a temporary SQLite database, which SQLite keeps in its cache while they fit, writes to its own
temporary file when they do not, and removes with the connection.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing

from lake.errors import LakeAccessError

_CACHE_KIB = 64 << 10
"""What is kept in memory of all pieces; what is beyond it lies on the disk."""


def grouped(items: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """Pieces by key: keys in the order in which each appears first, the pieces of a key in the order they came.

    All items are taken before the first group is given. Memory is bounded by one group.

    Raises:
        LakeAccessError: there is no room for them on the disk.
    """
    try:
        yield from _grouped(items)
    except sqlite3.Error as error:
        folder = os.environ.get("TMPDIR", "/var/tmp")  # where SQLite puts its temporary files
        raise LakeAccessError(
            f"the temporary folder {folder} cannot hold the pieces of the source while they are sorted: {error}; "
            "make room there, or set TMPDIR to a folder with more"
        ) from error


def _grouped(items: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    with closing(sqlite3.connect("", isolation_level=None, check_same_thread=False)) as spool:
        spool.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        spool.execute("PRAGMA journal_mode = OFF")
        spool.execute("PRAGMA synchronous = OFF")
        spool.execute("CREATE TABLE groups (number INTEGER PRIMARY KEY, key BLOB UNIQUE)")
        spool.execute("CREATE TABLE pieces (number INTEGER, piece BLOB)")
        spool.execute("BEGIN")
        last: tuple[str, int] | None = None
        for key, piece in items:
            if last is None or last[0] != key:
                last = key, _number(spool, key)
            spool.execute("INSERT INTO pieces VALUES (?, ?)", (last[1], piece))
        spool.execute("CREATE INDEX by_number ON pieces (number)")
        for number, key_bytes in spool.execute("SELECT number, key FROM groups ORDER BY number"):
            rows = spool.execute("SELECT piece FROM pieces WHERE number = ? ORDER BY rowid", (number,))
            yield key_bytes.decode("utf-8", "surrogatepass"), [piece for (piece,) in rows]


def _number(spool: sqlite3.Connection, key: str) -> int:
    # As bytes, because a key may hold half a surrogate pair, which is no text of SQLite.
    name = key.encode("utf-8", "surrogatepass")
    spool.execute("INSERT OR IGNORE INTO groups (key) VALUES (?)", (name,))
    ((number,),) = spool.execute("SELECT number FROM groups WHERE key = ?", (name,))
    return int(number)
