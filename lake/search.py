"""Full-text search: an inverted index of words over everything a person reads, kept as a cache outside the lake.

A JSON document is indexed by its contents: keys that only structure messages, roles and types are left out, but names
and arguments of tool calls are not. A word is a run of letters, digits and underscores in lower case.

A segment records which words occur in which rows of some data files, as arrays. Equal texts are one document in a
segment, because agents' texts repeat: a system prompt, a tool result, a state that siblings share. Words refer to
documents, documents to rows, rows to an episode and a step.

Several processes may read and extend the file. It contains the texts of the lake, so it is a private cache in the
user's cache folder, one file per lake; a viewer never writes into a lake. An update removes texts that the newest lake
lacks, and `forget` deletes the file (`delete_index`). Each segment is added in one transaction, so a killed update
loses at most one unfinished segment.

A search updates the index first, by one thread for all that wait. The index holds only texts of rollouts. Reasons of
scores and notes of people can change, and only current ones count, so each search reads them from the tables. Scores
without a reason cost next to nothing.
"""

import re
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from lake import ids
from lake.errors import LakeAccessError, SearchIndexError, UsageError
from lake.judgements.scores import current_scores_sql
from lake.read.joined_snapshot import JoinedSnapshot
from lake.read.parquet import DataFile, collect_rows, scan_files
from lake.read.snapshot import Snapshot, SnapshotReader
from lake.storage import local_cache
from lake.storage.locks import hold_file_lock
from lake.tables import TABLES
from lake.write.rows import inline_blobs

# ------------------------------------------------------------ words

LONGEST_WORD = 256
"""Characters of a word that are indexed: longer words are data, not language."""
_WORD = r"\w+"
_ESCAPES = r"\\+[nrt]"
"""Escaped line breaks in arguments, which are JSON in a string."""
_TERM = re.compile(r'"([^"]+)"?|([^\s"]+)')
_STRUCTURE = frozenset({"role", "type", "id", "tool_call_id", "index", "object"})
"""Keys whose values are not indexed."""
_WRAPPERS = frozenset(
    {"content", "text", "parts", "function", "tool_calls", "name", "arguments", "reasoning", "reasoning_content"}
    | {"thinking", "refusal", "input", "output"}
)
"""Keys that structure a message and are not part of its content."""


@dataclass(frozen=True, slots=True)
class Term:
    """One text that a step must contain, in any case.

    Args:
        text: in lower case, white space as single blanks.
        words: the words in it, in order.
    """

    text: str
    words: tuple[str, ...]

    @property
    def is_word(self) -> bool:
        """Whether the term is exactly one word, so that the index alone decides without reading texts."""
        return self.words == (self.text,)

    def needles(self) -> list[bytes]:
        """Return what to search for among words between line breaks: one text for each word of the term.

        The search is for part of a text, so the first and last word may continue. A single letter matches only itself,
        since it is part of nearly every text.
        """
        if len(self.text) == 1 and self.text.isascii():
            return [f"\n{self.text}\n".encode()]
        last = len(self.words) - 1
        needles = []
        for number, word in enumerate(self.words):
            begins = "" if number == 0 and self.text.startswith(word) else "\n"
            ends = "" if number == last and self.text.endswith(word) else "\n"
            needles.append(f"{begins}{word}{ends}".encode())
        return needles


def parse_terms(query: str) -> tuple[Term, ...]:
    """Parse a query: words or parts of words, which one step must all contain; a text in quotes is one term.

    Raises:
        UsageError: the query has no letter and no digit.
    """
    texts = [" ".join((quoted or plain).split()) for quoted, plain in _TERM.findall(query)]
    lower = pl.Series(texts, dtype=pl.String).str.to_lowercase()
    terms = [
        Term(text, tuple(inside)) for text, inside in zip(lower, split_words(lower).to_list(), strict=True) if inside
    ]
    if not terms:
        raise UsageError(f"a search needs a letter or a digit; {query!r} has none")
    return tuple(dict.fromkeys(terms))


def quote_words(query: str) -> str | None:
    """Return several words of a query that has no quotes as one term, in quotes; None for other queries."""
    return f'"{query}"' if '"' not in query and len(parse_terms(query)) > 1 else None


def split_words(texts: pl.Series) -> pl.Series:
    """Return the words of each text, in order: list[str]."""
    return texts.str.to_lowercase().str.extract_all(_WORD).list.eval(pl.element().str.slice(0, LONGEST_WORD))


def normalise(texts: pl.Series) -> pl.Series:
    """Return texts in lower case, white space as single blanks, for comparison with quoted terms."""
    return texts.str.to_lowercase().str.replace_all(r"\s+", " ")


def strip_escapes(texts: pl.Series) -> pl.Series:
    """Replace the escapes of JSON inside texts."""
    return texts.str.replace_all(_ESCAPES, " ")


def document_text(text: str | None) -> str | None:
    """Return the text of a stored JSON document; None for an empty one. Invalid JSON is returned unchanged."""
    if not text or text in ("[]", "{}", "null"):
        return None
    try:
        return "\n".join(_read_texts(msgspec.json.decode(text))) or None
    except (msgspec.DecodeError, RecursionError):
        return text


def _read_texts(document: Any) -> Iterator[str]:
    if isinstance(document, str):
        if not document.startswith("data:"):  # an image's bytes
            yield document
    elif isinstance(document, list):
        for element in document:
            yield from _read_texts(element)
    elif isinstance(document, Mapping):
        # The name of a call comes before its arguments.
        for key, content in sorted(document.items(), key=lambda item: item[0] != "name"):
            if key in _STRUCTURE:
                continue
            if key not in _WRAPPERS:
                yield str(key)
            yield from _read_texts(content)
    elif document is not None:
        yield str(document)


# ------------------------------------------------------------ segments

Numbers = npt.NDArray[Any]
EPISODE = -1
"""Step index of texts that belong to the whole episode."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Arrays of V words, P word occurrences in documents, D documents, M document occurrences in rows, and R rows."""

    vocabulary: str
    """V words in order, each between two line breaks."""
    count_V: Numbers
    """Number of documents of each word: uint32."""
    document_P: Numbers
    """Documents of each word, ascending, word after word: uint32."""
    count_D: Numbers
    """Number of rows of each document: uint16."""
    row_M: Numbers
    """Rows of each document, document after document: uint16."""
    episode_R: Numbers
    """Episode ids: int64."""
    step_R: Numbers
    """Step indices, `EPISODE` for texts of the whole episode: int32."""

    @classmethod
    def of(cls, rows: pl.DataFrame, columns: Sequence[str], documents: Sequence[str]) -> "Segment":
        """Build the segment of rows.

        Args:
            rows: episode_id, step_index, and the columns with texts.
            columns: names of plain texts.
            documents: names of JSON documents.
        """
        row_texts = [rows.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"), text=name) for name in columns]
        for name in documents:  # each distinct document is parsed once
            distinct = rows[name].drop_nulls().unique()
            parsed = pl.Series([document_text(text) for text in distinct], dtype=pl.String)
            text_of_document = pl.DataFrame({"document": distinct, "text": parsed})
            numbered = rows[name].to_frame("document").with_row_index("row")
            row_texts.append(numbered.join(text_of_document, on="document").select("row", "text"))
        pairs = pl.concat(row_texts).drop_nulls().filter(pl.col("text") != "")
        texts = pairs["text"].unique(maintain_order=True)
        numbers = pl.DataFrame({"text": texts, "document": pl.int_range(len(texts), dtype=pl.UInt32, eager=True)})
        pairs = pairs.join(numbers, on="text").select("document", "row").unique().sort("document", "row")
        of_words = (
            numbers.select("document", word=split_words(strip_escapes(numbers["text"])).list.unique())
            .explode("word", empty_as_null=False, keep_nulls=False)
            .group_by("word")
            .agg(pl.col("document").sort())
            .sort("word")
        )
        return cls(
            vocabulary="\n" + "".join(f"{word}\n" for word in of_words["word"]),
            count_V=of_words["document"].list.len().to_numpy(),
            document_P=of_words["document"].explode(empty_as_null=False, keep_nulls=False).to_numpy(),
            count_D=np.bincount(pairs["document"].to_numpy(), minlength=len(texts)).astype(np.uint16),
            row_M=pairs["row"].cast(pl.UInt16).to_numpy(),
            episode_R=rows["episode_id"].to_numpy(),
            step_R=rows["step_index"].cast(pl.Int32).to_numpy(),
        )


SEGMENT_ROWS = 50_000
"""Largest number of rows of a segment."""
SEGMENT_BYTES = 32 << 20
"""Approximate bytes on disk of the files of a segment; their texts take about five times as much."""
PLAIN = {"steps": ("state", "action", "reasoning"), "episodes": ("error",)}
"""Columns of plain texts by table."""
DOCUMENTS = {"steps": ("context", "tool_calls"), "episodes": ("initial_messages", "final_observation")}
"""Columns of JSON documents by table, without the ground truth: an agent's expected answer is not something it did."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a data file, so that the memory of a segment does not depend on the size of files."""

    table: str
    file: DataFile
    first: int
    rows: int

    @property
    def key(self) -> int:
        """Hash of the visible rows: a file never changes, but one of its writes may become accepted."""
        return ids.key_hash("piece", self.file.path, self.first, self.rows, *sorted(self.file.dead))

    @property
    def bytes(self) -> int:
        """Approximate bytes of the file that the piece takes."""
        return self.file.bytes * self.rows // max(self.file.rows, 1)


def list_pieces(snapshot: Snapshot) -> Iterator[Piece]:
    """Yield all pieces of a snapshot that can be searched."""
    for table in PLAIN:
        for file in snapshot.files(table):
            rows = max(1, min(SEGMENT_ROWS, file.rows * SEGMENT_BYTES // max(file.bytes, 1)))
            for first in range(0, file.rows, rows):
                yield Piece(table, file, first, min(rows, file.rows - first))


def batch_pieces(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces of one table that make a segment; small pieces share one."""
    for table in PLAIN:
        batch: list[Piece] = []
        for piece in (piece for piece in pieces if piece.table == table):
            full = (
                sum(p.rows for p in batch) + piece.rows > SEGMENT_ROWS
                or sum(p.bytes for p in batch) + piece.bytes > SEGMENT_BYTES
            )
            if batch and full:
                yield batch
                batch = []
            batch.append(piece)
        if batch:
            yield batch


def read_pieces(snapshot: Snapshot, pieces: Sequence[Piece]) -> pl.DataFrame:
    """Read the visible rows of pieces of one table: episode_id, step_index and the columns with texts.

    Raises:
        LakeAccessError: a file is missing or damaged.
    """
    name = pieces[0].table
    columns = (*PLAIN[name], *DOCUMENTS[name])
    frames = []
    for piece in pieces:
        frame = scan_files([piece.file.path], TABLES[name], snapshot.objects.polars_options).slice(
            piece.first, piece.rows
        )
        if piece.file.dead:
            frame = frame.filter(~pl.col("write_id").is_in(sorted(piece.file.dead)))
        step = pl.lit(EPISODE, pl.Int32).alias("step_index") if name == "episodes" else pl.col("step_index")
        frames.append(frame.select("episode_id", step, *columns))
    return inline_blobs(snapshot, collect_rows(pl.concat(frames)), DOCUMENTS[name])


# ------------------------------------------------------------ the index

Report = Callable[[int, int], None]
"""Receives rows done and rows in total; an error that it raises ends the work."""
_CODEC = pa.Codec("zstd", compression_level=1)
_CHUNK = 1 << 14
"""Numbers that are compressed together; a word is read without its neighbours."""
_TYPES = {
    "count_V": np.uint32,
    "document_P": np.uint32,
    "count_D": np.uint16,
    "row_M": np.uint16,
    "episode_R": np.int64,
    "step_R": np.int32,
}
"""Stored types of a segment's arrays."""
_EPISODE_SCHEMA = {"episode_id": pl.Int64, "step_index": pl.Int32, "steps": pl.Int64}
_FEW = 16
"""Number of small segments of a table above which they are merged."""
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
        path: the SQLite file, created if it is missing.

    Raises:
        sqlite3.DatabaseError: the file is damaged. All methods raise it, or OperationalError if the file is not usable.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # SQLite fails instead of waiting if two connections want to change the journal.
            with hold_file_lock(path.with_name("lock")):
                path.touch(mode=0o600)
                with self._connect() as connection:
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.executescript(_SCHEMA)
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)) as connection:
            # Overwrite deleted rows on the disk.
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA synchronous = NORMAL")
            yield connection

    def missing(self, snapshot: Snapshot) -> list[Piece]:
        """Return the pieces that an update would read."""
        pieces = list(list_pieces(snapshot))
        with self._connect() as connection:
            indexed = _find_indexed(connection, pieces)
        return [piece for piece in pieces if piece.key not in indexed]

    def update(self, snapshot: Snapshot, report: Report = lambda _done, _of: None) -> None:
        """Index the missing pieces of a snapshot, and drop pieces that neither it nor the newest snapshot has.

        Raises:
            LakeAccessError: a file of the lake is missing or damaged.
        """
        pieces = list(list_pieces(snapshot))
        self._drop_unused(pieces, list(list_pieces(snapshot.newest())))
        # Another process may add segments at the same time; its segments are used.
        while missing := self.missing(snapshot):
            done, total = 0, sum(piece.rows for piece in missing)
            for batch in batch_pieces(missing):
                report(done, total)
                name = batch[0].table
                self._add_segment(batch, Segment.of(read_pieces(snapshot, batch), PLAIN[name], DOCUMENTS[name]), pieces)
                done += sum(piece.rows for piece in batch)

    def _drop_unused(self, *states: Sequence[Piece]) -> None:
        """Drop segments that no snapshot needs, and many small ones, which come back as one."""
        with self._connect() as connection, _transaction(connection):
            used = {segment for pieces in states for segment, _ in _find_usable(connection, pieces)}
            small: dict[str, list[int]] = {}
            for segment, source, rows in connection.execute("SELECT id, source, rows FROM segments").fetchall():
                if segment not in used:
                    _drop_segment(connection, segment)
                elif rows < SEGMENT_ROWS // 2:
                    small.setdefault(source, []).append(segment)
            for segments in small.values():
                if len(segments) > _FEW:
                    for segment in segments:
                        _drop_segment(connection, segment)

    def _add_segment(self, batch: Sequence[Piece], segment: Segment, pieces: Sequence[Piece]) -> None:
        with self._connect() as connection, _transaction(connection):
            if not _find_indexed(connection, pieces).isdisjoint(piece.key for piece in batch):
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
                if name == "document_P":  # ascending numbers have small differences
                    chunks = [np.diff(chunk, prepend=chunk.dtype.type(0)) for chunk in chunks]
                rows = [
                    (added, name, number, len(chunk), bytes(_CODEC.compress(chunk.tobytes(), asbytes=True)))
                    for number, chunk in enumerate(chunks)
                ]
                connection.executemany("INSERT INTO arrays VALUES (?, ?, ?, ?, ?)", rows)

    def find(
        self, snapshot: Snapshot, terms: Sequence[Term], report: Report = lambda _done, _of: None
    ) -> pl.DataFrame | None:
        """Find the episodes with a step, or messages outside steps, that contain all terms.

        Returns:
            None if pieces are missing: call `update` first. Else episode_id (int64), step_index (int32: the first such
            step; NULL for messages of the episode), steps (int64: their number), by episode_id; retracted episodes
            included.

        Raises:
            LakeAccessError: quoted terms need the lake's files, and one is missing or damaged.
        """
        by_key = {piece.key: piece for piece in list_pieces(snapshot)}
        exact = [term for term in terms if not term.is_word]
        frames = []
        with self._connect() as connection:
            # Read one consistent state of the file while other processes change it.
            connection.execute("BEGIN")
            usable = _find_usable(connection, list(by_key.values()))
            if sum(len(keys) for _, keys in usable) < len(by_key):
                return None
            for number, (segment, keys) in enumerate(usable):
                report(number, len(usable))
                stored = _StoredSegment(connection, segment)
                rows = stored.rows_with_all(terms)
                if len(rows) and exact:
                    segment_pieces = [by_key[key] for key in keys]
                    rows = rows[
                        _rows_with_texts(read_pieces(snapshot, segment_pieces)[rows], segment_pieces[0].table, exact)
                    ]
                if len(rows):
                    frames.append(stored.episodes(rows))
        episodes = pl.concat([pl.DataFrame(schema=_EPISODE_SCHEMA), *frames]).sort("episode_id")
        step = pl.col("step_index")
        if len(episodes) and (episodes["episode_id"] == episodes["episode_id"].shift()).any():
            # A step comes before messages, since it is the better start for a reader.
            first = pl.coalesce(step.filter(step != EPISODE).min(), step.min())
            episodes = episodes.group_by("episode_id", maintain_order=True).agg(first, pl.col("steps").sum())
        return episodes.with_columns(pl.when(step != EPISODE).then(step))


class _StoredSegment:
    """A segment in the file; a search reads only the parts it needs."""

    def __init__(self, connection: sqlite3.Connection, segment: int) -> None:
        self._connection = connection
        self._segment = segment

    def rows_with_all(self, terms: Sequence[Term]) -> Numbers:
        """Return the rows that may contain all terms: each word of a term occurs in one text."""
        query = "SELECT numbers, data FROM arrays WHERE segment = ? AND name = 'vocabulary'"
        length, data = self._connection.execute(query, (self._segment,)).fetchone()
        vocabulary = bytes(_CODEC.decompress(data, length, asbytes=True))
        numbers = [[_find_words(vocabulary, needle) for needle in term.needles()] for term in terms]
        if not all(len(matches) for of_term in numbers for matches in of_term):
            return np.zeros(0, np.int64)
        ends_V = np.cumsum(self._read_array("count_V"), dtype=np.int64)
        count_D, row_M = self._read_array("count_D"), self._read_array("row_M")
        holds_R = np.ones(int(row_M.max()) + 1, np.bool_)
        for of_term in numbers:
            holds_D = np.ones(len(count_D), np.bool_)
            for matches in of_term:
                of_word_D = np.zeros(len(count_D), np.bool_)
                of_word_D[self._read_documents(ends_V, matches)] = True
                holds_D &= of_word_D
            of_term_R = np.zeros(len(holds_R), np.bool_)
            of_term_R[row_M[np.repeat(holds_D, count_D)]] = True
            holds_R &= of_term_R
        return np.flatnonzero(holds_R)

    def episodes(self, rows: Numbers) -> pl.DataFrame:
        """Return the episodes of ascending rows, as `Index.find` does; an episode may occur twice."""
        episode_R = self._read_array("episode_R")[rows]
        first = np.flatnonzero(np.diff(episode_R, prepend=~episode_R[0]))
        counts = np.diff(first, append=len(rows))
        step = self._read_array("step_R")[rows][first]
        return pl.DataFrame(
            {"episode_id": episode_R[first], "step_index": step, "steps": counts}, schema=_EPISODE_SCHEMA
        )

    def _read_documents(self, ends_V: Numbers, words: Numbers) -> Numbers:
        """Return the documents of words."""
        first, last = np.where(words == 0, 0, ends_V[words - 1]), ends_V[words]
        documents = []
        for chunk in np.flatnonzero(
            _mark_covered(first // _CHUNK, (last - 1) // _CHUNK + 1, int(ends_V[-1]) // _CHUNK + 1)
        ):
            begin = int(chunk) * _CHUNK
            numbers = np.cumsum(self._read_array("document_P", int(chunk)), dtype=np.uint32)
            inside = (first < begin + _CHUNK) & (last > begin)
            low, high = np.maximum(first[inside] - begin, 0), np.minimum(last[inside] - begin, len(numbers))
            documents.append(numbers[_mark_covered(low, high, len(numbers))])
        return np.concatenate(documents)

    def _read_array(self, name: str, chunk: int = 0) -> Numbers:
        query = "SELECT numbers, data FROM arrays WHERE segment = ? AND name = ? AND chunk = ?"
        numbers, data = self._connection.execute(query, (self._segment, name, chunk)).fetchone()
        dtype = np.dtype(_TYPES[name])
        return np.frombuffer(_CODEC.decompress(data, numbers * dtype.itemsize, asbytes=True), dtype)


def _mark_covered(first: Numbers, last: Numbers, length: int) -> Numbers:
    """Return the positions inside any of the ranges from `first` to before `last`: bool [length]."""
    marks = np.bincount(first, minlength=length + 1).astype(np.int64) - np.bincount(last, minlength=length + 1)
    return np.cumsum(marks[:length]) > 0


def _find_words(vocabulary: bytes, needle: bytes) -> Numbers:
    """Return the numbers of the words that contain a needle."""
    positions = []
    at = vocabulary.find(needle)
    while at >= 0:
        positions.append(at)
        # Skip the rest of this word. A needle may begin with the line break that ends it.
        at = vocabulary.find(needle, vocabulary.index(b"\n", at + 1))
    breaks = np.flatnonzero(np.frombuffer(vocabulary, np.uint8) == ord("\n")) if positions else np.zeros(0, np.int64)
    return np.searchsorted(breaks, positions, side="right") - 1


def _rows_with_texts(rows: pl.DataFrame, table: str, terms: Sequence[Term]) -> Numbers:
    """Return which rows contain every term in one of their texts, by reading the texts."""
    texts = [rows[name] for name in PLAIN[table]]
    texts += [pl.Series([document_text(text) for text in rows[name]], dtype=pl.String) for name in DOCUMENTS[table]]
    flat = pl.DataFrame({str(number): normalise(strip_escapes(text)) for number, text in enumerate(texts)})
    holds = [
        pl.any_horizontal(pl.all().str.contains(term.text, literal=True).fill_null(value=False)).alias(str(number))
        for number, term in enumerate(terms)
    ]
    return flat.select(holds).select(pl.all_horizontal(pl.all())).to_series().to_numpy()


def _find_usable(connection: sqlite3.Connection, pieces: Sequence[Piece]) -> list[tuple[int, list[int]]]:
    """Return the segments that contain only these pieces, without overlap, each with its pieces' keys in order."""
    missing = {piece.key for piece in pieces}
    segments: dict[int, list[int]] = {}
    for key, segment in connection.execute("SELECT key, segment FROM pieces ORDER BY segment, position"):
        segments.setdefault(segment, []).append(key)
    usable = []
    for segment, keys in sorted(segments.items(), key=lambda entry: -len(entry[1])):
        if missing.issuperset(keys):
            missing -= set(keys)
            usable.append((segment, keys))
    return usable


def _find_indexed(connection: sqlite3.Connection, pieces: Sequence[Piece]) -> set[int]:
    """Return the keys of the indexed pieces."""
    return {key for _, keys in _find_usable(connection, pieces) for key in keys}


def _drop_segment(connection: sqlite3.Connection, segment: int) -> None:
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


_KIND = "search"
_LAYOUT = 1
"""Version of the file's layout, part of its name."""


def index_path(root: str) -> Path:
    """Return the index file of a lake, in a private folder that exists."""
    return local_cache.ensure_cache_folder(_KIND) / _file_name(root)


def delete_index(root: str) -> None:
    """Delete the cached texts of a lake on this machine. Raises LakeAccessError: they cannot be deleted."""
    for folder in local_cache.list_cache_folders(_KIND):
        for suffix in ("", "-wal", "-shm"):
            file = Path(folder, _file_name(root) + suffix)
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                msg = f"{file} holds texts of {root} and cannot be deleted ({error.strerror}); delete it yourself"
                raise LakeAccessError(msg) from error


def _file_name(root: str) -> str:
    return f"{ids.to_text(ids.key_hash('lake', root))}-{_LAYOUT}.sqlite"


# ------------------------------------------------------------ searches

_WAIT_S = 0.2
_locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
_SOURCES = {"scores": ("reason", "error"), "annotations": ("text",)}
"""Columns of texts by table."""


def search_episodes(snapshot: Snapshot, text: str, report: Report = lambda _done, _of: None) -> pl.DataFrame:
    """Find the episodes in which a step, messages outside steps, or a judgement contains a text, in any case.

    Words and parts of words match in any order, a text in quotes matches literally. The search covers states, actions,
    reasoning, tool calls, messages, reasons of scores and annotations (`search_reasons`).

    Args:
        report: called repeatedly with the progress; an error that it raises ends the search, and the index keeps the
            segments added so far.

    Returns:
        As `Index.find`, without retracted episodes.

    Raises:
        UsageError: the text has no letter and no digit.
        LakeAccessError: a file of the lake is missing or damaged.
        SearchIndexError: no space or no permission for the index.
    """
    terms = parse_terms(text)
    in_rollouts = _search_rollouts(snapshot, terms, report)
    reasons = search_reasons(snapshot, terms).group_by("episode_id")
    judged = reasons.agg(pl.col("step_index").min(), steps=pl.len().cast(pl.Int64))
    if judged.is_empty():
        return in_rollouts
    # A step with the text is the better start for a reader.
    matches = pl.concat([in_rollouts, judged.select(in_rollouts.columns)]).group_by("episode_id", maintain_order=True)
    return matches.agg(pl.col("step_index").drop_nulls().first(), pl.col("steps").sum()).sort("episode_id")


def search_reasons(lake: SnapshotReader, terms: Sequence[Term], among: Sequence[int] | None = None) -> pl.DataFrame:
    """Find current scores and annotations with a text that contains all terms.

    Args:
        among: ids of the episodes to search; None searches all.

    Returns:
        episode_id (int64), step_index (int32; NULL for the whole episode), `by` (the scorer, or the label and its
        author), text; an episode may have several rows.
    """
    condition = "" if among is None else f"episode_id IN ({', '.join(map(str, among)) or 'NULL'}) AND "
    # SQL looks for the longest word of each term only, since any white space may separate words.
    words = [max(term.words, key=len) for term in terms]
    schema = {"episode_id": pl.Int64, "step_index": pl.Int32, "by": pl.String, "text": pl.String}
    frames = [pl.DataFrame(schema=schema)]
    for table, columns in _SOURCES.items():
        for column in columns:
            contains = (f"contains(lower({column}), ${number})" for number in range(1, len(terms) + 1))
            where = condition + " AND ".join(contains)
            if not lake.sql(f"SELECT EXISTS (SELECT 1 FROM {table} WHERE {where})", words).item():
                continue
            current = current_scores_sql(lake) if table == "scores" else "latest_annotations"
            by = "scorer" if table == "scores" else "label || ' (' || author || ')'"
            query = f'SELECT episode_id, step_index, {by} AS "by", {column} AS text FROM {current} WHERE {where}'
            rows = lake.sql(query, words)
            texts, words_of_texts = normalise(rows["text"]), split_words(rows["text"])
            holds = pl.Series([True]).new_from_index(0, len(rows))
            for term in terms:
                # A single letter matches only itself, as in the index.
                is_letter = len(term.text) == 1 and term.text.isascii()
                by_word, by_text = words_of_texts.list.contains(term.text), texts.str.contains(term.text, literal=True)
                holds &= by_word if is_letter else by_text
            frames.append(rows.filter(holds).cast(schema))  # type: ignore[arg-type]
    return pl.concat(frames)


def _search_rollouts(snapshot: Snapshot, terms: Sequence[Term], report: Report) -> pl.DataFrame:
    """Return the matches in the index, without retracted episodes."""
    if isinstance(snapshot, JoinedSnapshot):
        matches = pl.concat([_search_rollouts(member, terms, report) for member in snapshot.members])
        visible = collect_rows(snapshot.scan("episodes").select("episode_id"))
        matches = matches.unique("episode_id", keep="first", maintain_order=True)
        return matches.join(visible, on="episode_id", how="semi", maintain_order="left")
    path = index_path(snapshot.root)
    try:
        matches = _search_index(path, snapshot, terms, report)
    except sqlite3.OperationalError as error:
        msg = (
            f"the search index {path} cannot be used: {error}. Make room for it, or name another folder in "
            f"{local_cache.CACHE_VARIABLE}"
        )
        raise SearchIndexError(msg) from error
    except sqlite3.DatabaseError:
        # A damaged index is rebuilt, since it is only a cache.
        delete_index(snapshot.root)
        matches = _search_index(path, snapshot, terms, report)
    return matches.filter(~pl.col("episode_id").is_in(snapshot.retracted.implode()))


def _search_index(path: Path, snapshot: Snapshot, terms: Sequence[Term], report: Report) -> pl.DataFrame:
    """Update and search the index until nothing is missing; another process may drop segments in between."""
    words = Index(path)
    while True:
        with _lock_index(_locks[path], report):
            words.update(snapshot, report)
        matches = words.find(snapshot, terms, report)
        if matches is not None:
            return matches


@contextmanager
def _lock_index(lock: threading.Lock, report: Report) -> Iterator[None]:
    """Hold the lock; while a thread waits for it, `report` can end the wait with an error."""
    while not lock.acquire(timeout=_WAIT_S):
        report(0, 0)
    try:
        yield
    finally:
        lock.release()
