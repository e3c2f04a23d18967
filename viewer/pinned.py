"""The lake that a browser session looks at: pinned to table versions until the reader asks for others.

All pages of a session read the same versions, so numbers on two pages agree while jobs are writing. Answers are cached
by (lake, era, versions, query, arguments): another version is another answer, and so are the same versions of a lake
that was made anew, or from which something was forgotten (`era`).
"""

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

import lake
from lake import Lake, ids
from lake.cli.options import Lakes
from lake.errors import UsageError
from lake.read import query_views
from lake.read.kept import Kept
from lake.read.parquet import collected
from lake.read.query import Session
from lake.read.snapshot import Snapshot
from lake.search.find import holding
from lake.search.index import Report
from lake.storage.data_files import Replacements
from lake.storage.objects import Objects
from lake.tables import TABLES
from viewer.environment import ENVIRONMENT, named_lakes
from viewer.locked_sql import Answers
from viewer.queries import Reads
from viewer.queries.since import Changes, newer
from viewer.queries.since import changes as between
from viewer.remembered import Remembered

_VERSIONS = "pinned_versions"
_MARK = "pinned_mark"
_AT = "pinned_at"
_WHEN = "pinned_when"
AS_OF = "as_of"
"""Parameter of an address: an older state, as `--as-of` takes it."""
P = ParamSpec("P")
T = TypeVar("T")


_named: Remembered[tuple[bytes, tuple[tuple[str, int], ...]]] = Remembered(1000)
"""Era and versions that a name in an address stands for."""
_MOST_IDLE = 4
_SECONDS, _SECONDS_OF_A_BUCKET = 1.0, 15.0
"""How long it is taken for granted that a lake is the one it was and nothing was forgotten: a look takes five small
files, or requests."""
_MOST_SEARCHES = 8
_MOST_ANSWERS = 32 << 20
"""Bytes of answers that are remembered of a lake."""


_turns = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))
"""Queries at a time: more of them would be no quicker, and each of the large ones takes memory."""


class Reader:
    """A snapshot for the threads of all browser sessions that pin it; none waits for another's query.

    A query has a SQL session of its own while it runs; some are kept for the next ones.

    Args:
        kept: what is held of the lake in memory; by default something of its own.
        answered: answers that readers of the lake share, whichever state they read; by default some of its own.
    """

    def __init__(
        self, snapshot: Snapshot, kept: Kept | None = None, answered: Remembered[pl.DataFrame] | None = None
    ) -> None:
        self._snapshot = snapshot
        self._kept = kept or Kept(snapshot.objects)
        self._idle: list[Session] = []
        self._searches: Remembered[pl.DataFrame] = Remembered(_MOST_SEARCHES)
        self._answered = answered or Remembered(_MOST_ANSWERS)
        self._digests: dict[str, bytes] = {}
        self._answers = Answers(snapshot)
        self._lock = threading.Lock()

    def sql(self, query: str, params: list[Any] | dict[str, Any] | None = None) -> pl.DataFrame:
        """Rows of one SELECT; the last small answers are remembered, while the tables that it reads stay the same."""
        tables = sorted(name for name in query_views.mentioned(query) if name in TABLES)
        key = (query, repr(params), *map(self._digest, tables))
        known = self._answered.get(key)
        if known is None:
            known = self._asked(query, params)
            self._answered.put(key, known, int(known.estimated_size()) + sum(map(len, key)))
        return known.clone()  # which costs nothing: whoever changes it, changes it for no other

    def _digest(self, table: str) -> bytes:
        """What tells the visible rows of a table from those of other states: its files never change."""
        if table not in self._digests:
            files = self._snapshot.files(table)
            found = hashlib.blake2b(digest_size=16)
            for file in files:
                found.update(f"{file.path}\0{sorted(file.dead)}\0".encode())
            for place in sorted({file.place for file in files}) if TABLES[table].hides_retracted else ():
                hidden = self._snapshot.hidden(place)
                found.update(b"" if hidden is None else hidden.to_numpy().tobytes())
            self._digests[table] = found.digest()
        return self._digests[table]

    def _asked(self, query: str, params: list[Any] | dict[str, Any] | None) -> pl.DataFrame:
        with self._lock:
            session = self._idle.pop() if self._idle else self._snapshot.session(kept=self._kept)
        try:
            with _turns:
                return session.query(query, params)
        finally:
            with self._lock:
                is_kept = len(self._idle) < _MOST_IDLE
                if is_kept:
                    self._idle.append(session)
            if not is_kept:
                session.close()

    def rows(self, table: str) -> int:
        """Rows of a table, hidden ones among them, as its log has them (`Snapshot.size`)."""
        return self._snapshot.size(table)[1]

    def holding(self, text: str, report: Report = lambda _done, _of: None) -> pl.DataFrame:
        """The episodes that hold a text (`lake.search.find.holding`); the last answers are kept, for pages to come."""
        known = self._searches.get(text)
        if known is None:
            known = holding(self._snapshot, text, report)
            self._searches.put(text, known)
        return known

    def members(self, group_id: int) -> list[int]:
        """The episodes of a group as it was collected, those among them that readers do not see any more; sorted."""
        rows = self._snapshot.scan_all("episodes").filter(pl.col("group_id") == group_id).select("episode_id")
        return sorted(set(collected(rows)["episode_id"]))

    def locked(self, query: str) -> pl.DataFrame:
        """Rows of one SELECT that nobody vouches for (`viewer.locked_sql.Answers.rows`)."""
        return self._answers.rows(query)


def lakes() -> Lakes:
    """The address of the lake, or those of several that are shown as one. Raises UsageError: none was named."""
    if (named := named_lakes()) is None:
        msg = f"the viewer was started without a lake; start it with `trajlake view --lake URI` (or set {ENVIRONMENT})"
        raise UsageError(msg)
    return named


def addresses() -> tuple[str, ...]:
    """The address of each lake."""
    named = lakes()
    return (named,) if isinstance(named, str) else named


_eras: dict[Lakes, tuple[float, bytes]] = {}


def era() -> bytes:
    """What tells states of the same versions apart: a lake that was made anew in its place, rows forgotten since.

    Nothing of another era is shown, and nothing of it stays in memory.
    """
    shown, now = lakes(), time.monotonic()
    looked_at, found = _eras.get(shown, (-math.inf, b""))
    age = now - looked_at
    if age >= _SECONDS and (age >= _SECONDS_OF_A_BUCKET or all(each.folder for each in objects())):
        new = _look()
        _eras[shown] = now, new
        if found and found != new:
            _forget()
        found = new
    return found


def _look() -> bytes:
    told = hashlib.blake2b(digest_size=16)
    for each in objects():
        # A commit of its own has files with names of its own.
        for table, version in (("episodes", 0), ("episodes", 1), ("jobs", 0), ("jobs", 1)):
            told.update(_commit(each, table, version))
        told.update("\0".join(Replacements(each).records()).encode())
    return told.digest()


def _commit(of: Objects, table: str, version: int) -> bytes:
    return of.get(f"{table}/_delta_log/{version:020d}.json") or b""


def _mark(pinned: Mapping[str, int]) -> bytes:
    """The commits that versions end with."""
    tables = [(table, pinned[table]) for table in ("episodes", "jobs") if table in pinned]
    return b"\0".join(_commit(each, *ends) for each in objects() for ends in tables)


def _forget() -> None:
    """Let go of all that was read."""
    for cache in (_answer, _newer, _reader, _between, _opened, _kept):
        cache.clear()


def home(episode_id: int) -> Lake:
    """The lake that shows an episode, for what is written about it. Raises UsageError: none shows it now."""
    return _open().home(episode_id)


def versions() -> tuple[tuple[str, int], ...]:
    """Table versions that this session is pinned to: those that the address asks for, else the newest ones.

    Of an address that asks for none they are the newest ones when the session first came to such an address, also by
    Back from an older state.

    Raises:
        UsageError: the address names no snapshot, time or version.
    """
    asked = st.query_params.get(AS_OF) or None
    if _VERSIONS not in st.session_state or asked != when():
        show(asked)
    return cast("tuple[tuple[str, int], ...]", st.session_state[_VERSIONS])


def show(older: str | None) -> None:
    """Pin this session to an older state (a snapshot's name, a time, a version of `episodes`), or the newest for None.

    Raises:
        UsageError: there is no such state; the session then stays where it is.
    """
    found = _open()
    snapshot = found.at(int(older) if older.isdecimal() else older) if older else found.snapshot()
    # Each time that it is set is an entry of the browser's history.
    if older and st.query_params.get(AS_OF) != older:
        st.query_params[AS_OF] = older
    st.session_state[_VERSIONS] = tuple(sorted(snapshot.versions.items()))
    st.session_state[_MARK] = _mark(snapshot.versions)
    st.session_state[_AT] = datetime.now(UTC)
    st.session_state[_WHEN] = older


def when() -> str | None:
    """The older state that this session is pinned to, as the reader named it; None: the newest at some time."""
    return cast("str | None", st.session_state.get(_WHEN))


def snapshots() -> list[str]:
    """Names of the lake's snapshots, the newest first."""
    return [pin.name for pin in reversed(_open().snapshots())]


def news() -> str | None:
    """What the newest state has that is not here, in words; None: nothing that a page would show otherwise."""
    newest = tuple(sorted(_open().snapshot().versions.items()))
    return None if newest == versions() else _newer(lakes(), era(), versions(), newest)


@st.cache_data(show_spinner=False, max_entries=20)
def _newer(
    lakes: Lakes, era: bytes, before: tuple[tuple[str, int], ...], after: tuple[tuple[str, int], ...]
) -> str | None:
    return newer(_reader(lakes, era, before), _reader(lakes, era, after))


def pinned_at() -> datetime:
    """When this session was pinned."""
    versions()
    return cast("datetime", st.session_state[_AT])


def name() -> str:
    """What stands for the versions of this session in an address outside of it."""
    found = ids.to_text(ids.key_hash("versions", era().hex(), *(part for pair in versions() for part in pair)))
    _named.put(found, (era(), versions()))
    return found


def named(text: str) -> Reader:
    """What reads the versions of a name; the newest ones if this process does not know it."""
    return known(text) or _read_from(tuple(sorted(_open().snapshot().versions.items())))


def known(text: str) -> Reader | None:
    """What reads the versions of a name; None if this process does not know it, or if they are not what they were."""
    of, found = _named.get(text) or (b"", ())
    return _read_from(found) if of == era() else None


def is_outdated() -> bool:
    """Whether the lake has newer versions than this session is pinned to."""
    return tuple(sorted(_open().snapshot().versions.items())) != versions()


def refresh() -> None:
    """Let the next read pin this session to the newest versions, of a lake that was made anew in its place too."""
    mark, were = (st.session_state.pop(name, None) for name in (_MARK, _VERSIONS))
    if mark is not None and were is not None and mark != _mark(dict(were)):
        _forget()  # it was put back, or made anew, under the pages that are open
    _opened.clear()
    st.query_params.pop(AS_OF, None)


def objects() -> list[Objects]:
    """Where each lake lies, for what is kept beside its tables."""
    return [Objects(address) for address in addresses()]


def changes(since: str) -> Changes:
    """What changed from an older state, as `show` takes it, to the one that this session is pinned to.

    Raises:
        UsageError: there is no such state.
    """
    then = _open().at(int(since) if since.isdecimal() else since)
    return _between(lakes(), era(), tuple(sorted(then.versions.items())), versions())


@st.cache_resource(show_spinner="Comparing", max_entries=4)
def _between(
    lakes: Lakes, era: bytes, before: tuple[tuple[str, int], ...], after: tuple[tuple[str, int], ...]
) -> Changes:
    opened = _opened(lakes, era)
    return between(opened.at(dict(before)), opened.at(dict(after)))


def search(text: str, report: Report) -> None:
    """Look a text up, as `Reader.holding` does, so that what is asked of its episodes next need not wait.

    Raises:
        UsageError: the text has no letter and no digit.
    """
    _read_from(versions()).holding(text, report)


def read(query: Callable[Concatenate[Reads, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The answer of a query of `viewer.queries` on the pinned lake."""
    name = f"{query.__module__}.{query.__qualname__}"
    return cast("T", _answer(lakes(), era(), versions(), name, args, tuple(sorted(kwargs.items())), query))


@st.cache_data(show_spinner="Reading the lake", max_entries=500)
def _answer(
    lakes: Lakes,
    era: bytes,
    pinned: tuple[tuple[str, int], ...],
    name: str,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    _query: Callable[..., Any],
) -> Any:
    """The leading underscore keeps the function itself out of the key; its name stands in for it."""
    return _query(_reader(lakes, era, pinned), *args, **dict(kwargs))


def _read_from(versions: tuple[tuple[str, int], ...]) -> Reader:
    return _reader(lakes(), era(), versions)


def _open() -> Lake:
    return _opened(lakes(), era())


@st.cache_resource(show_spinner=False, max_entries=8)
def _reader(lakes: Lakes, era: bytes, pinned: tuple[tuple[str, int], ...]) -> Reader:
    return Reader(_opened(lakes, era).at(dict(pinned)), *_kept(lakes, era))


@st.cache_resource(show_spinner=False, max_entries=2)
def _kept(lakes: Lakes, era: bytes) -> tuple[Kept, Remembered[pl.DataFrame]]:
    """What all sessions hold of a lake, whichever state of it they show: narrow columns, and answers."""
    return Kept(_opened(lakes, era).snapshot().objects), Remembered(_MOST_ANSWERS)


@st.cache_resource(show_spinner=False, max_entries=2)
def _opened(lakes: Lakes, era: bytes) -> Lake:
    """A lake, opened once: that takes longer than many a page. What it is asked for is the newest each time."""
    return lake.open(lakes)
