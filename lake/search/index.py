"""The index of a lake: segments in one SQLite file, which several processes may read and add to.

It holds what the lake's texts hold, so it is a cache with the lake's secrets: only its owner may read it, whatever the
newest lake no longer has goes with the next update, and `forget` deletes it (`lake.search.place`). A segment is added
in one transaction, so whoever stops an update loses at most the segment in the making.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from lake.read.snapshot import Snapshot
from lake.search import words
from lake.search.pieces import DOCUMENTS, PLAIN, ROWS, Piece, pieces, read, together
from lake.search.segment import EPISODE, Numbers, Segment

Report = Callable[[int, int], None]
"""Told of rows done and rows in all; what it raises ends the work."""
_CODEC = pa.Codec("zstd", compression_level=1)
_CHUNK = 1 << 14
"""Numbers that are packed together: a word is read without its neighbours."""
_TYPES = {
    "count_V": np.uint32,
    "document_P": np.uint32,
    "count_D": np.uint16,
    "row_M": np.uint16,
    "episode_R": np.int64,
    "step_R": np.int32,
}
"""Arrays of a segment, as they are stored."""
_FOUND = {"episode_id": pl.Int64, "step_index": pl.Int32, "steps": pl.Int64}
_FEW = 16
"""Small segments of a table that stand beside each other before they are made one."""
_BUSY_S = 60.0
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS segments (id INTEGER PRIMARY KEY, source TEXT NOT NULL, rows INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS pieces (
        segment INTEGER NOT NULL, position INTEGER NOT NULL, key INTEGER NOT NULL, PRIMARY KEY (segment, position)
    );
    CREATE TABLE IF NOT EXISTS arrays (
        segment INTEGER NOT NULL, name TEXT NOT NULL, chunk INTEGER NOT NULL, numbers INTEGER NOT NULL,
        data BLOB NOT NULL, PRIMARY KEY (segment, name, chunk)
    );
    """


class Index:
    """The segments of a lake.

    Args:
        path: the SQLite file; it is made if it is not there.

    Raises:
        sqlite3.DatabaseError: the file is damaged, as for all methods; an OperationalError: it cannot be used now.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.touch(mode=0o600)
        with self._connected() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)) as connection:
            # What is deleted is gone from the disk.
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA synchronous = NORMAL")
            yield connection

    def missing(self, snapshot: Snapshot) -> list[Piece]:
        """What an update would read."""
        found = list(pieces(snapshot))
        with self._connected() as connection:
            known = _known(connection, found)
        return [piece for piece in found if piece.key not in known]

    def update(self, snapshot: Snapshot, report: Report = lambda _done, _of: None) -> None:
        """Index what is missing of a snapshot, and drop what neither it nor the newest one has.

        Raises:
            LakeAccessError: a file of the lake is gone or damaged.
        """
        found = list(pieces(snapshot))
        self._tidy(found, list(pieces(snapshot.newest())))
        # Another process may add segments meanwhile: what it has put together with others is left to it.
        while missing := self.missing(snapshot):
            done, total = 0, sum(piece.rows for piece in missing)
            for batch in together(missing):
                report(done, total)
                name = batch[0].table
                self._add(batch, Segment.of(read(snapshot, batch), PLAIN[name], DOCUMENTS[name]), found)
                done += sum(piece.rows for piece in batch)

    def _tidy(self, *wanted: Sequence[Piece]) -> None:
        """Drop segments that no one wants any more, and many small ones: they come back as one."""
        with self._connected() as connection, _transaction(connection):
            used = {segment for found in wanted for segment, _ in _usable(connection, found)}
            small: dict[str, list[int]] = {}
            for segment, source, rows in connection.execute("SELECT id, source, rows FROM segments").fetchall():
                if segment not in used:
                    _drop(connection, segment)
                elif rows < ROWS // 2:
                    small.setdefault(source, []).append(segment)
            for segments in small.values():
                if len(segments) > _FEW:
                    for segment in segments:
                        _drop(connection, segment)

    def _add(self, batch: Sequence[Piece], segment: Segment, found: Sequence[Piece]) -> None:
        with self._connected() as connection, _transaction(connection):
            if not _known(connection, found).isdisjoint(piece.key for piece in batch):
                return
            values = (batch[0].table, sum(piece.rows for piece in batch))
            added = connection.execute("INSERT INTO segments (source, rows) VALUES (?, ?)", values).lastrowid
            numbered = [(added, position, piece.key) for position, piece in enumerate(batch)]
            connection.executemany("INSERT INTO pieces VALUES (?, ?, ?)", numbered)
            packed = _CODEC.compress(segment.vocabulary.encode(), asbytes=True)
            length = len(segment.vocabulary.encode())
            connection.execute("INSERT INTO arrays VALUES (?, 'vocabulary', 0, ?, ?)", (added, length, packed))
            for name in _TYPES:
                numbers = getattr(segment, name)
                length = _CHUNK if name == "document_P" else max(len(numbers), 1)
                chunks = [numbers[at : at + length] for at in range(0, len(numbers), length)]
                if name == "document_P":  # rising: their differences are small
                    chunks = [np.diff(chunk, prepend=chunk.dtype.type(0)) for chunk in chunks]
                rows = [(added, name, number, *_packed(chunk)) for number, chunk in enumerate(chunks)]
                connection.executemany("INSERT INTO arrays VALUES (?, ?, ?, ?, ?)", rows)

    def find(
        self, snapshot: Snapshot, terms: Sequence[words.Term], report: Report = lambda _done, _of: None
    ) -> pl.DataFrame | None:
        """The episodes with a step, or messages of their own, that hold all terms.

        Returns:
            None if something is missing: `update` first. Else episode_id (int64), step_index (int32: the first such
            step; NULL: messages of the episode), steps (int64: how many), by episode_id; retracted ones among them.

        Raises:
            LakeAccessError: terms in quotes are looked up in the lake's files, and one is gone or damaged.
        """
        by_key = {piece.key: piece for piece in pieces(snapshot)}
        exact = [term for term in terms if not term.is_word]
        parts = []
        with self._connected() as connection:
            # One state of the file, whatever other processes do to it meanwhile.
            connection.execute("BEGIN")
            usable = _usable(connection, list(by_key.values()))
            if sum(len(keys) for _, keys in usable) < len(by_key):
                return None
            for number, (segment, keys) in enumerate(usable):
                report(number, len(usable))
                stored = _Stored(connection, segment)
                rows = stored.rows_with_all(terms)
                if len(rows) and exact:
                    held = [by_key[key] for key in keys]
                    rows = rows[_hold(read(snapshot, held)[rows], held[0].table, exact)]
                if len(rows):
                    parts.append(stored.episodes(rows))
        return _joined(parts)


class _Stored:
    """A segment in the file, of which only what a search needs is read."""

    def __init__(self, connection: sqlite3.Connection, segment: int) -> None:
        self._connection = connection
        self._segment = segment

    def rows_with_all(self, terms: Sequence[words.Term]) -> Numbers:
        """Rows that may hold all terms: each word of a term stands in one text."""
        vocabulary = self._vocabulary()
        numbers = [[_words_with(vocabulary, needle) for needle in term.needles()] for term in terms]
        if not all(len(found) for of_term in numbers for found in of_term):
            return np.zeros(0, np.int64)
        ends_V = np.cumsum(self._array("count_V"), dtype=np.int64)
        count_D, row_M = self._array("count_D"), self._array("row_M")
        holds_R = np.ones(int(row_M.max()) + 1, np.bool_)
        for of_term in numbers:
            holds_D = np.ones(len(count_D), np.bool_)
            for found in of_term:
                of_word_D = np.zeros(len(count_D), np.bool_)
                of_word_D[self._documents(ends_V, found)] = True
                holds_D &= of_word_D
            of_term_R = np.zeros(len(holds_R), np.bool_)
            of_term_R[row_M[np.repeat(holds_D, count_D)]] = True
            holds_R &= of_term_R
        return np.flatnonzero(holds_R)

    def episodes(self, rows: Numbers) -> pl.DataFrame:
        """The episodes of rising rows, as `Index.find` gives them; one may come twice."""
        episode_R = self._array("episode_R")[rows]
        first = np.flatnonzero(np.diff(episode_R, prepend=~episode_R[0]))
        counts = np.diff(first, append=len(rows))
        step = self._array("step_R")[rows][first]
        return pl.DataFrame({"episode_id": episode_R[first], "step_index": step, "steps": counts}, schema=_FOUND)

    def _documents(self, ends_V: Numbers, found: Numbers) -> Numbers:
        """Documents of words."""
        first, last = np.where(found == 0, 0, ends_V[found - 1]), ends_V[found]
        parts = []
        for chunk in np.flatnonzero(_covered(first // _CHUNK, (last - 1) // _CHUNK + 1, int(ends_V[-1]) // _CHUNK + 1)):
            begin = int(chunk) * _CHUNK
            numbers = np.cumsum(self._array("document_P", int(chunk)), dtype=np.uint32)
            inside = (first < begin + _CHUNK) & (last > begin)
            low, high = np.maximum(first[inside] - begin, 0), np.minimum(last[inside] - begin, len(numbers))
            parts.append(numbers[_covered(low, high, len(numbers))])
        return np.concatenate(parts)

    def _vocabulary(self) -> bytes:
        query = "SELECT numbers, data FROM arrays WHERE segment = ? AND name = 'vocabulary'"
        length, data = self._connection.execute(query, (self._segment,)).fetchone()
        return bytes(_CODEC.decompress(data, length, asbytes=True))

    def _array(self, name: str, chunk: int = 0) -> Numbers:
        query = "SELECT numbers, data FROM arrays WHERE segment = ? AND name = ? AND chunk = ?"
        numbers, data = self._connection.execute(query, (self._segment, name, chunk)).fetchone()
        dtype = np.dtype(_TYPES[name])
        return np.frombuffer(_CODEC.decompress(data, numbers * dtype.itemsize, asbytes=True), dtype)


def _covered(first: Numbers, last: Numbers, length: int) -> Numbers:
    """What lies in any of the ranges from `first` to before `last`: bool [length]."""
    marks = np.bincount(first, minlength=length + 1).astype(np.int64) - np.bincount(last, minlength=length + 1)
    return np.cumsum(marks[:length]) > 0


def _words_with(vocabulary: bytes, needle: bytes) -> Numbers:
    """Numbers of the words that a needle stands in."""
    positions = []
    at = vocabulary.find(needle)
    while at >= 0:
        positions.append(at)
        # The rest of this word can add nothing; a needle may begin with the line break that ends it.
        at = vocabulary.find(needle, vocabulary.index(b"\n", at + 1))
    breaks = np.flatnonzero(np.frombuffer(vocabulary, np.uint8) == ord("\n")) if positions else np.zeros(0, np.int64)
    return np.searchsorted(breaks, positions, side="right") - 1


def _hold(rows: pl.DataFrame, table: str, terms: Sequence[words.Term]) -> Numbers:
    """Which rows hold every term in one of their texts, by the texts."""
    texts = [rows[name] for name in PLAIN[table]]
    texts += [pl.Series([words.document(text) for text in rows[name]], dtype=pl.String) for name in DOCUMENTS[table]]
    flat = pl.DataFrame({str(number): words.flat(words.readable(text)) for number, text in enumerate(texts)})
    held = [
        pl.any_horizontal(pl.all().str.contains(term.text, literal=True).fill_null(value=False)).alias(str(number))
        for number, term in enumerate(terms)
    ]
    return flat.select(held).select(pl.all_horizontal(pl.all())).to_series().to_numpy()


def _joined(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    found = pl.concat([pl.DataFrame(schema=_FOUND), *parts]).sort("episode_id")
    step = pl.col("step_index")
    if len(found) and (found["episode_id"] == found["episode_id"].shift()).any():
        # A step comes before messages: it is the better place to begin to read.
        first = pl.coalesce(step.filter(step != EPISODE).min(), step.min())
        found = found.group_by("episode_id", maintain_order=True).agg(first, pl.col("steps").sum())
    return found.with_columns(pl.when(step != EPISODE).then(step))


def _usable(connection: sqlite3.Connection, found: Sequence[Piece]) -> list[tuple[int, list[int]]]:
    """Segments that hold pieces among these and no others, none twice; each with its pieces' keys in order."""
    left = {piece.key for piece in found}
    segments: dict[int, list[int]] = {}
    for key, segment in connection.execute("SELECT key, segment FROM pieces ORDER BY segment, position"):
        segments.setdefault(segment, []).append(key)
    chosen = []
    for segment, keys in sorted(segments.items(), key=lambda one: -len(one[1])):
        if left.issuperset(keys):
            left -= set(keys)
            chosen.append((segment, keys))
    return chosen


def _known(connection: sqlite3.Connection, found: Sequence[Piece]) -> set[int]:
    """Keys of the pieces that need not be read any more."""
    return {key for _, keys in _usable(connection, found) for key in keys}


def _drop(connection: sqlite3.Connection, segment: int) -> None:
    for table, column in (("arrays", "segment"), ("pieces", "segment"), ("segments", "id")):
        connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (segment,))


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _packed(numbers: Numbers) -> tuple[int, bytes]:
    """How many, and their bytes in small."""
    return len(numbers), bytes(_CODEC.compress(numbers.tobytes(), asbytes=True))
