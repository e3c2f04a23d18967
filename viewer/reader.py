"""Read a snapshot for any number of threads, without Streamlit; with the caches that such readers share.

A link can hold any SQL, and a reader who follows the link runs it. So the text of a query from an address is not
trusted: it runs in a locked process, reads this one snapshot, writes nothing, and ends after
`lake.locked.query.SECONDS` (`lake.locked`).
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import polars as pl

from lake.locked.query import LockedReader
from lake.read import query_views
from lake.read.column_cache import ColumnCache
from lake.read.parquet import collect_rows
from lake.read.query import QuerySession
from lake.read.snapshot import Snapshot
from lake.search.index import Report
from lake.search.query import search_episodes
from lake.tables import TABLES

MAX_LOCKED_ROWS = 10_000
"""Rows of an answer to untrusted SQL; a query with more is refused, with the advice to add LIMIT."""
MAX_ANSWER_BYTES = 32 << 20
"""Bytes of cached answers of a lake."""
_MAX_LOCKED_BYTES = 64 << 20
_MAX_LOCKED_ANSWERS = 8
_MAX_SEARCHES = 8
_MAX_IDLE_SESSIONS = 4
# More queries at a time would be no faster, and each of the large ones takes memory.
_sql_slots = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))
# Over all browser sessions: a page full of links must not take all processors and all memory.
_locked_slots = threading.BoundedSemaphore(2)
V = TypeVar("V")


class LruCache(Generic[V]):
    """Least-recently-used cache for any number of threads, limited by the total weight of its values.

    A value that weighs more than 1 and more than an eighth of the limit is not cached: it would evict too many others.
    """

    def __init__(self, max_weight: int) -> None:
        self._max_weight = max_weight
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """Return the value of a key, or None if it is not cached."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: V, weight: int = 1) -> None:
        """Cache a value and evict those that were not used for longest."""
        if weight > max(1, self._max_weight // 8):
            return
        with self._lock:
            self._weight += weight - self._values.pop(key, (value, 0))[1]
            self._values[key] = (value, weight)
            while self._weight > self._max_weight:
                self._weight -= self._values.popitem(last=False)[1][1]


class Reader:
    """A snapshot for the threads of all browser sessions that show it; none waits for the query of another.

    Each query has its own SQL session while it runs; some sessions are reused.

    Args:
        snapshot: the snapshot.
        columns: columns in memory, shared by the readers of a lake; a new cache by default.
        answers: small answers, shared by the readers of a lake, whichever state they read; a new cache by default.
    """

    def __init__(
        self, snapshot: Snapshot, columns: ColumnCache | None = None, answers: LruCache[pl.DataFrame] | None = None
    ) -> None:
        self._snapshot = snapshot
        self._columns = columns or ColumnCache(snapshot.objects)
        self._answers = answers or LruCache(MAX_ANSWER_BYTES)
        self._searches: LruCache[pl.DataFrame] = LruCache(_MAX_SEARCHES)
        self._locked_answers: LruCache[pl.DataFrame] = LruCache(_MAX_LOCKED_ANSWERS)
        self._idle: list[QuerySession] = []
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def sql(self, query: str, params: list[Any] | dict[str, Any] | None = None) -> pl.DataFrame:
        """Return the rows of one SELECT; small answers are cached while the tables of the query stay the same."""
        tables = sorted(name for name in query_views.find_mentioned(query) if name in TABLES)
        key = (query, repr(params), *map(self._digest_table, tables))
        answer = self._answers.get(key)
        if answer is None:
            answer = self._run(query, params)
            self._answers.put(key, answer, int(answer.estimated_size()) + sum(map(len, key)))
        return answer.clone()  # a cheap copy: a caller may change the columns of its frame

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

    def holding(self, text: str, report: Report = lambda _done, _of: None) -> pl.DataFrame:
        """Return the episodes that hold a text (`lake.search.query.search_episodes`); the last answers are cached."""
        episodes = self._searches.get(text)
        if episodes is None:
            episodes = search_episodes(self._snapshot, text, report)
            self._searches.put(text, episodes)
        return episodes

    def members(self, group_id: int) -> list[int]:
        """Return the sorted episodes of a group as it was collected, hidden ones included."""
        rows = self._snapshot.scan_all("episodes").filter(pl.col("group_id") == group_id).select("episode_id")
        return sorted(set(collect_rows(rows)["episode_id"]))

    def locked(self, query: str) -> pl.DataFrame:
        """Return the rows of one untrusted SELECT, at most `MAX_LOCKED_ROWS`; the last answers are cached.

        Raises:
            QueryError: the text is not a SELECT, has no result, or takes more than a locked query may.
            UsageError: this machine cannot lock a process in, or the lake is not in a local folder.
        """
        answer = self._locked_answers.get(query)
        if answer is None:
            with _locked_slots:
                answer = LockedReader(self._snapshot, max_rows=MAX_LOCKED_ROWS, max_bytes=_MAX_LOCKED_BYTES).sql(query)
            self._locked_answers.put(query, answer)
        return answer
