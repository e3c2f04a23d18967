"""Read the lake that the viewer shows, for any number of threads and without Streamlit.

Every answer is in one cache, by the state of the lake, the function that computed it, and its arguments.

A link can hold any SQL, and a reader who follows the link runs it. So the text of a query from an address is not
trusted: it runs in a locked process, reads this one snapshot, writes nothing, and ends after
`lake.locked.query.SECONDS` (`lake.locked`).
"""

import copy
import hashlib
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import polars as pl
from cachetools import LRUCache, cached
from cachetools.keys import typedkey

import lake
from lake import Lake, ids
from lake.cli.options import Lakes
from lake.locked.query import LockedReader
from lake.read import query_views
from lake.read.column_cache import ColumnCache
from lake.read.joined_snapshot import JoinedSnapshot
from lake.read.parquet import collect_rows
from lake.read.query import QuerySession
from lake.read.runs import measure_runs
from lake.read.snapshot import Snapshot
from lake.search import Report, search_episodes
from lake.storage.data_files import Replacements
from lake.storage.objects import Objects
from lake.tables import TABLES
from lake.write.tokenizers import read_vocabulary
from viewer.queries import LakeReader
from viewer.queries.episodes import find_named_episodes
from viewer.queries.lineage import StateChanges, compare_states, describe_news

MAX_LOCKED_ROWS = 10_000
"""Rows of an answer to untrusted SQL; a query with more is refused, with the advice to add LIMIT."""
MAX_CACHE_BYTES = 256 << 20
"""Bytes of cached answers of a lake."""
# Of the rows of a large query the function that asks makes a smaller answer, which is cached too.
_MAX_SQL_BYTES = 4 << 20
_MAX_LOCKED_BYTES = 64 << 20
_MAX_IDLE_SESSIONS = 4
_MAX_NAMES = 1000
# More queries at a time would be no faster, and each of the large ones takes memory.
_sql_slots = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))
# Over all browser sessions: a page full of links must not take all processors and all memory.
_locked_slots = threading.BoundedSemaphore(2)
P = ParamSpec("P")
T = TypeVar("T")
TableVersions = tuple[tuple[str, int], ...]
"""Tables with their versions, sorted."""


class AnswerCache:
    """Least-recently-used cache of answers, limited by their bytes; threads with one question wait for one answer.

    An answer above a quarter of the limit is not cached: it would evict too many others. A failure is not cached.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_answer_bytes = max_bytes // 4
        self._entries: LRUCache[Hashable, tuple[Any, float]] = LRUCache(max_bytes, getsizeof=lambda entry: entry[1])
        find_entry = cached(self._entries, key=lambda key, *_: key, condition=threading.Condition())
        self._find_entry = find_entry(self._compute_entry)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable, compute: Callable[[], T], max_bytes: int | None = None) -> T:
        """Return the answer to a question, which callers share and must not change.

        Args:
            key: the state of the lake, the function and its arguments.
            compute: computes the answer if it is not cached.
            max_bytes: bytes above which this answer is not cached; by default a quarter of the cache.
        """
        return cast("T", self._find_entry(key, compute, max_bytes or self._max_answer_bytes)[0])

    def _compute_entry(self, _: Hashable, compute: Callable[[], Any], max_bytes: int) -> tuple[Any, float]:
        answer = compute()
        estimate = getattr(answer, "estimated_size", None)
        size = estimate() if estimate else len(pickle.dumps(answer))
        return answer, size if size <= max_bytes else math.inf


class Reader:
    """A snapshot for the threads of all browser sessions that show it; none waits for another query.

    Each query has its own SQL session while it runs; some sessions are reused.

    Args:
        snapshot: the snapshot.
        columns: columns in memory, shared by the readers of a lake; a new cache by default.
        answers: the cache, shared by the readers of a lake, whichever state they read; a new one by default.
    """

    def __init__(
        self, snapshot: Snapshot, columns: ColumnCache | None = None, answers: AnswerCache | None = None
    ) -> None:
        self._snapshot = snapshot
        self._state = sort_versions(snapshot.versions)
        self._columns = columns or ColumnCache(snapshot.objects)
        self._answers = answers or AnswerCache()
        self._idle: list[QuerySession] = []
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def estimated_size(self) -> int:
        """Return the bytes for which the cache counts a reader: those of its idle SQL sessions, roughly."""
        return 8 << 20

    def read(self, query: Callable[Concatenate[LakeReader, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the answer of a query of `viewer.queries` as a copy, which the caller may change."""
        key = self._build_key(query, *args, **kwargs)
        return copy.deepcopy(self._answers.get(key, lambda: query(self, *args, **kwargs)))

    def has_answer(self, query: Callable[Concatenate[LakeReader, P], T], /, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Return whether `read` need not wait."""
        return self._build_key(query, *args, **kwargs) in self._answers

    def _build_key(self, query: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Hashable:
        return self._state, query, typedkey(*args, **kwargs)

    def sql(self, query: str, params: list[Any] | dict[str, Any] | None = None) -> pl.DataFrame:
        """Return the rows of one SELECT; a small answer is cached while the tables of the query stay the same."""
        tables = sorted(name for name in query_views.find_mentioned(query) if name in TABLES)
        key = (tuple(map(self._digest_table, tables)), Reader.sql, query, repr(params))
        rows = self._answers.get(key, lambda: self._run(query, params), _MAX_SQL_BYTES)
        return rows.clone()  # a cheap copy: a caller may change the columns of its frame

    def _digest_table(self, table: str) -> bytes:
        """Hash the visible rows of a table by its files, which never change, and its hidden rows."""
        if table not in self._digests:
            files = self._snapshot.files(table)
            digest = hashlib.blake2b(digest_size=16)
            for file in files:
                digest.update(f"{file.path}\0{sorted(file.dead)}\0".encode())
            for hidden_set in sorted({file.hidden_set for file in files}) if TABLES[table].hides_retracted else ():
                hidden = self._snapshot.hidden(hidden_set)
                digest.update(b"" if hidden is None else hidden.to_numpy().tobytes())
            self._digests[table] = digest.digest()
        return self._digests[table]

    def _run(self, query: str, params: list[Any] | dict[str, Any] | None) -> pl.DataFrame:
        with self._lock:
            session = self._idle.pop() if self._idle else self._snapshot.session(cache=self._columns)
        try:
            with _sql_slots:
                return session.query(query, params)
        finally:
            with self._lock:
                is_reusable = len(self._idle) < _MAX_IDLE_SESSIONS
                if is_reusable:
                    self._idle.append(session)
            if not is_reusable:
                session.close()

    def rows(self, table: str) -> int:
        """Return the number of rows of a table by its log, hidden rows included (`Snapshot.size`)."""
        return self._snapshot.size(table)[1]

    def run_sizes(self) -> dict[str | None, int]:
        """Return the bytes of the tables' files by run (`lake.read.runs.measure_runs`); None: of no run."""
        sizes = self._answers.get(self._build_key(measure_runs), lambda: measure_runs(self._snapshot))
        return dict(sizes.group_by("run_id").agg(pl.col("bytes").sum()).iter_rows())

    def holding(self, text: str, report: Report = lambda _done, _of: None) -> pl.DataFrame:
        """Return the episodes that hold a text (`lake.search.search_episodes`), then those that have it as an id."""

        def find() -> pl.DataFrame:
            hits = [search_episodes(self._snapshot, text, report), find_named_episodes(self, text)]
            return pl.concat(hits).unique("episode_id", keep="first", maintain_order=True)

        return self._answers.get(self._build_key(search_episodes, text), find)

    def members(self, group_id: int) -> list[int]:
        """Return the sorted episodes of a group as it was collected, hidden ones included."""
        rows = self._snapshot.scan_all("episodes").filter(pl.col("group_id") == group_id).select("episode_id")
        return sorted(set(collect_rows(rows)["episode_id"]))

    def vocabulary(self, encoding_id: int) -> dict[int, bytes] | None:
        """Return the bytes of each token of an encoding (`lake.write.tokenizers`); None: the lake has no tokenizer."""
        members = self._snapshot.members if isinstance(self._snapshot, JoinedSnapshot) else (self._snapshot,)

        def find() -> dict[int, bytes] | None:
            vocabularies = (read_vocabulary(member.objects, encoding_id) for member in members)
            return next((vocabulary for vocabulary in vocabularies if vocabulary is not None), None)

        return self._answers.get(self._build_key(read_vocabulary, encoding_id), find)

    def locked(self, query: str) -> pl.DataFrame:
        """Return the rows of one untrusted SELECT, at most `MAX_LOCKED_ROWS`.

        Raises:
            QueryError: the text is not a SELECT, has no result, or takes more than a locked query may.
            UsageError: this machine cannot lock a process in, or the lake is not in a local folder.
        """

        def run() -> pl.DataFrame:
            with _locked_slots:
                return LockedReader(self._snapshot, max_rows=MAX_LOCKED_ROWS, max_bytes=_MAX_LOCKED_BYTES).sql(query)

        return self._answers.get(self._build_key(LockedReader.sql, query), run)


def sort_versions(versions: Mapping[str, int]) -> TableVersions:
    """Return versions of tables as a key."""
    return tuple(sorted(versions.items()))


class ViewedLake:
    """The lake that this process shows, or several as one: opened once for all browser sessions, with their cache.

    An era ends when a lake is created again in its place, or rows of it are forgotten. The cache ends with it, so that
    nothing of another era is shown or stays in memory. Any thread may call the methods.

    Args:
        lakes: the address of the lake, or of each lake.
    """

    era_seconds = 1.0, 15.0
    """How long an era is valid for a folder and a bucket: a check reads five small files, or makes five requests."""

    def __init__(self, lakes: Lakes) -> None:
        self.lakes = lakes
        self.addresses = (lakes,) if isinstance(lakes, str) else lakes
        self.objects = [Objects(address) for address in self.addresses]
        """Storage of each lake, for files next to its tables."""
        self._opened: Lake | None = None
        self._era: _Era | None = None
        self._checked_at = -math.inf
        self._lock = threading.RLock()

    @property
    def lake(self) -> Lake:
        """The open lake. Opening takes longer than many pages; a read of it asks for its newest state."""
        with self._lock:
            self._get_era()
            self._opened = self._opened or lake.open(self.lakes)
            return self._opened

    @property
    def answers(self) -> AnswerCache:
        """The cache of this era."""
        return self._get_era().answers

    def _get_era(self) -> "_Era":
        with self._lock:
            valid = self.era_seconds[0 if all(each.folder for each in self.objects) else 1]
            if self._era is None or time.monotonic() - self._checked_at >= valid:
                digest, self._checked_at = self._hash_lakes(), time.monotonic()
                if self._era is None or self._era.digest != digest:
                    self._era = None
                    self._opened = lake.open(self.lakes)
                    self._era = _Era(digest, ColumnCache(self._opened.snapshot().objects))
            return self._era

    def _hash_lakes(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for each in self.objects:
            # The first commits of another lake name other files.
            for table, version in (("episodes", 0), ("episodes", 1), ("jobs", 0), ("jobs", 1)):
                digest.update(_read_commit(each, table, version))
            digest.update("\0".join(Replacements(each).records()).encode())
        return digest.digest()

    def _read_last_commits(self, versions: Mapping[str, int]) -> bytes:
        tables = [(table, versions[table]) for table in ("episodes", "jobs") if table in versions]
        return b"\0".join(_read_commit(each, *last) for each in self.objects for last in tables)

    def reopen(self, session: "BrowserSession") -> None:
        """Open the lake again at the next read; without its cache if it was restored or created again."""
        with self._lock:
            self._opened = None
            if session.last_commits != self._read_last_commits(dict(session.versions)):
                self._era = None

    def pin(self, older: str | None = None) -> "BrowserSession":
        """Return a session that shows an older state (see `find_state`), or the newest state for None."""
        snapshot = self.find_state(older) if older else self.lake.snapshot()
        commits = self._read_last_commits(snapshot.versions)
        return BrowserSession(self, sort_versions(snapshot.versions), older, datetime.now(UTC), commits)

    def find_state(self, name: str) -> Snapshot:
        """Return the state with a snapshot's name, a time or a version of `episodes`. Raises UsageError: none."""
        return self.lake.at(int(name) if name.isdecimal() else name)

    def get_newest_versions(self) -> TableVersions:
        """Return the versions of the newest state."""
        return sort_versions(self.lake.snapshot().versions)

    def get_reader(self, versions: TableVersions) -> Reader:
        """Return the reader of versions, which all sessions share."""
        era = self._get_era()
        key = (versions, ViewedLake.get_reader)
        return era.answers.get(key, lambda: Reader(self.lake.at(dict(versions)), era.columns, era.answers))

    def name_versions(self, versions: TableVersions) -> str:
        """Return the name by which `find_reader` knows versions; the last 1,000 names are known."""
        with self._lock:
            era = self._get_era()
            parts = (part for pair in versions for part in pair)
            name = ids.to_text(ids.key_hash("versions", era.digest.hex(), *parts))
            era.versions_by_name.pop(name, None)
            era.versions_by_name[name] = versions
            if len(era.versions_by_name) > _MAX_NAMES:
                del era.versions_by_name[next(iter(era.versions_by_name))]
        return name

    def find_reader(self, name: str) -> Reader | None:
        """Return the reader for a name of versions; None if the name is unknown, or of another era."""
        versions = self._get_era().versions_by_name.get(name)
        return None if versions is None else self.get_reader(versions)


@dataclass(frozen=True)
class _Era:
    digest: bytes
    columns: ColumnCache
    answers: AnswerCache = field(default_factory=AnswerCache)
    versions_by_name: dict[str, TableVersions] = field(default_factory=dict)


def _read_commit(objects: Objects, table: str, version: int) -> bytes:
    return objects.get(f"{table}/_delta_log/{version:020d}.json") or b""


@dataclass(frozen=True)
class BrowserSession:
    """What one browser tab is shown: a lake at fixed versions, so that its pages agree while jobs are writing."""

    viewed: ViewedLake
    versions: TableVersions
    older: str | None
    """The older state as the address names it; None for the state that was the newest at `pinned_at`."""
    pinned_at: datetime
    last_commits: bytes
    """The last commits of the versions, by which `ViewedLake.reopen` recognises the lake."""

    @property
    def reader(self) -> Reader:
        """The reader of the versions, for queries."""
        return self.viewed.get_reader(self.versions)

    def name_versions(self) -> str:
        """Return a name for the versions, for addresses that are requested outside of the session."""
        return self.viewed.name_versions(self.versions)

    def is_outdated(self) -> bool:
        """Return whether the lake has newer versions."""
        return self.viewed.get_newest_versions() != self.versions

    def describe_newer_data(self) -> str | None:
        """Return in words what is newer in the lake; None if no page would change."""
        newest = self.viewed.get_newest_versions()
        if newest == self.versions:
            return None
        key = (self.versions, describe_news, newest)
        return self.viewed.answers.get(key, lambda: describe_news(self.reader, self.viewed.get_reader(newest)))

    def compare_with(self, since: str) -> StateChanges:
        """Return the changes from an older state (`ViewedLake.find_state`) to this one."""
        older = self.viewed.find_state(since)
        key = (self.versions, compare_states, sort_versions(older.versions))
        return self.viewed.answers.get(key, lambda: compare_states(older, self.viewed.lake.at(dict(self.versions))))
