"""The state of the lake that a browser session shows: fixed table versions until the reader asks for others.

All pages of a session read the same versions, so numbers on two pages agree while jobs are writing. Answers are cached
by lake, era, versions, query and arguments. The era (`get_era`) tells equal version numbers apart: those of a lake that
was created again, or from which rows were forgotten.
"""

import getpass
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

import lake
from lake import Lake, ids
from lake.cli.options import Lakes
from lake.errors import UsageError
from lake.read.column_cache import ColumnCache
from lake.search.index import Report
from lake.storage.data_files import Replacements
from lake.storage.objects import Objects
from viewer.queries import LakeReader
from viewer.queries.lineage import StateChanges, compare_states, describe_news
from viewer.reader import MAX_ANSWER_BYTES, LruCache, Reader
from viewer.server import ENVIRONMENT, read_lakes

_VERSIONS = "pinned_versions"
_MARK = "pinned_mark"
_AT = "pinned_at"
_WHEN = "pinned_when"
_AUTHOR = "author"
AS_OF = "as_of"
"""Query parameter of an older state, with the values that `--as-of` takes."""
P = ParamSpec("P")
T = TypeVar("T")
TableVersions = tuple[tuple[str, int], ...]
"""Tables with their versions, sorted."""

_versions_by_name: LruCache[tuple[bytes, TableVersions]] = LruCache(1000)
"""Era and versions behind a name in an address (`name_versions`)."""
_SECONDS, _SECONDS_OF_A_BUCKET = 1.0, 15.0
"""How long an era is valid for a folder and for a bucket: a check reads five small files, or makes five requests."""
_eras: dict[Lakes, tuple[float, bytes]] = {}


def get_lakes() -> Lakes:
    """Return the address of the lake, or the addresses of several that are shown as one.

    Raises:
        UsageError: the process was started without a lake.
    """
    if (lakes := read_lakes()) is None:
        msg = f"the viewer was started without a lake; start it with `trajlake view --lake URI` (or set {ENVIRONMENT})"
        raise UsageError(msg)
    return lakes


def list_addresses() -> tuple[str, ...]:
    """Return the address of each lake."""
    lakes = get_lakes()
    return (lakes,) if isinstance(lakes, str) else lakes


def list_objects() -> list[Objects]:
    """Return the storage of each lake, for files next to its tables."""
    return [Objects(address) for address in list_addresses()]


def get_era() -> bytes:
    """Return a hash that changes when a lake is created again in its place, or rows of it are forgotten.

    A change clears the caches, so that nothing of another era is shown or stays in memory.
    """
    lakes, now = get_lakes(), time.monotonic()
    checked_at, era = _eras.get(lakes, (-math.inf, b""))
    age = now - checked_at
    if age >= _SECONDS and (age >= _SECONDS_OF_A_BUCKET or all(each.folder for each in list_objects())):
        new = _hash_lake_state()
        _eras[lakes] = now, new
        if era and era != new:
            _clear_caches()
        era = new
    return era


def _hash_lake_state() -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for each in list_objects():
        # The first commits of another lake name other files.
        for table, version in (("episodes", 0), ("episodes", 1), ("jobs", 0), ("jobs", 1)):
            digest.update(_read_commit(each, table, version))
        digest.update("\0".join(Replacements(each).records()).encode())
    return digest.digest()


def _read_commit(objects: Objects, table: str, version: int) -> bytes:
    return objects.get(f"{table}/_delta_log/{version:020d}.json") or b""


def _read_last_commits(versions: Mapping[str, int]) -> bytes:
    tables = [(table, versions[table]) for table in ("episodes", "jobs") if table in versions]
    return b"\0".join(_read_commit(each, *last) for each in list_objects() for last in tables)


def _clear_caches() -> None:
    for cache in (_run_query, _describe_newer, _build_reader, _compare, _open_lake, _build_shared_caches):
        cache.clear()


def get_home_lake(episode_id: int) -> Lake:
    """Return the lake that shows an episode, for writing about it. Raises UsageError: no lake shows it now."""
    return _get_lake().home(episode_id)


def get_versions() -> TableVersions:
    """Return the table versions of this session: those that the address names, else the newest ones.

    For an address that names none, these are the newest versions when the session first came to such an address. This
    holds for the browser's Back from an older state too.

    Raises:
        UsageError: the address names no snapshot, time or version.
    """
    older = st.query_params.get(AS_OF) or None
    if _VERSIONS not in st.session_state or older != get_older_state():
        pin(older)
    return cast("TableVersions", st.session_state[_VERSIONS])


def pin(older: str | None) -> None:
    """Show an older state (a snapshot's name, a time, a version of `episodes`), or the newest state for None.

    Raises:
        UsageError: there is no such state; the session then keeps its versions.
    """
    opened = _get_lake()
    snapshot = opened.at(int(older) if older.isdecimal() else older) if older else opened.snapshot()
    # Each assignment adds an entry to the browser's history.
    if older and st.query_params.get(AS_OF) != older:
        st.query_params[AS_OF] = older
    st.session_state[_VERSIONS] = _sort_versions(snapshot.versions)
    st.session_state[_MARK] = _read_last_commits(snapshot.versions)
    st.session_state[_AT] = datetime.now(UTC)
    st.session_state[_WHEN] = older


def _sort_versions(versions: Mapping[str, int]) -> TableVersions:
    return tuple(sorted(versions.items()))


def get_older_state() -> str | None:
    """Return the older state of this session, as the reader named it; None if it shows the newest state at a time."""
    return cast("str | None", st.session_state.get(_WHEN))


def list_snapshots() -> list[str]:
    """Return the names of the lake's snapshots, the newest first."""
    return [snapshot.name for snapshot in reversed(_get_lake().snapshots())]


def describe_newer_data() -> str | None:
    """Return in words what is newer in the lake than in this session; None if no page would change."""
    newest = _sort_versions(_get_lake().snapshot().versions)
    return None if newest == get_versions() else _describe_newer(get_lakes(), get_era(), get_versions(), newest)


@st.cache_data(show_spinner=False, max_entries=20)
def _describe_newer(lakes: Lakes, era: bytes, before: TableVersions, after: TableVersions) -> str | None:
    return describe_news(_build_reader(lakes, era, before), _build_reader(lakes, era, after))


def get_pin_time() -> datetime:
    """Return when this session took its versions."""
    get_versions()
    return cast("datetime", st.session_state[_AT])


def name_versions() -> str:
    """Return a name for the versions of this session, for addresses that are requested outside of it."""
    era, versions = get_era(), get_versions()
    name = ids.to_text(ids.key_hash("versions", era.hex(), *(part for pair in versions for part in pair)))
    _versions_by_name.put(name, (era, versions))
    return name


def get_reader(name: str) -> Reader:
    """Return the reader for a name of versions; of the newest versions if this process does not know the name."""
    return find_reader(name) or _read_from(_sort_versions(_get_lake().snapshot().versions))


def find_reader(name: str) -> Reader | None:
    """Return the reader for a name of versions; None if the name is unknown, or of another era."""
    era, versions = _versions_by_name.get(name) or (b"", ())
    return _read_from(versions) if era == get_era() else None


def is_outdated() -> bool:
    """Return whether the lake has newer versions than this session."""
    return _sort_versions(_get_lake().snapshot().versions) != get_versions()


def refresh() -> None:
    """Let the next read take the newest versions, also when a lake was created again in its place."""
    mark, versions = (st.session_state.pop(name, None) for name in (_MARK, _VERSIONS))
    if mark is not None and versions is not None and mark != _read_last_commits(dict(versions)):
        _clear_caches()  # the lake was restored or created again while pages were open
    _open_lake.clear()
    st.query_params.pop(AS_OF, None)


def compare_with(since: str) -> StateChanges:
    """Return the changes from an older state (see `pin`) to that of this session.

    Raises:
        UsageError: there is no such state.
    """
    older = _get_lake().at(int(since) if since.isdecimal() else since)
    return _compare(get_lakes(), get_era(), _sort_versions(older.versions), get_versions())


@st.cache_resource(show_spinner="Comparing", max_entries=4)
def _compare(lakes: Lakes, era: bytes, before: TableVersions, after: TableVersions) -> StateChanges:
    opened = _open_lake(lakes, era)
    return compare_states(opened.at(dict(before)), opened.at(dict(after)))


def search_text(text: str, report: Report) -> None:
    """Search for a text with `Reader.holding`, so that later queries about its episodes need not wait.

    Raises:
        UsageError: the text has no letter and no digit.
    """
    _read_from(get_versions()).holding(text, report)


def read(query: Callable[Concatenate[LakeReader, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the answer of a query of `viewer.queries` for the versions of this session."""
    return cast("T", _run_query(get_lakes(), get_era(), get_versions(), query, args, tuple(sorted(kwargs.items()))))


@st.cache_data(
    show_spinner="Reading the lake",
    max_entries=500,
    hash_funcs={FunctionType: lambda query: f"{query.__module__}.{query.__qualname__}"},
)
def _run_query(
    lakes: Lakes,
    era: bytes,
    versions: TableVersions,
    query: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
) -> Any:
    return query(_build_reader(lakes, era, versions), *args, **dict(kwargs))


def _read_from(versions: TableVersions) -> Reader:
    return _build_reader(get_lakes(), get_era(), versions)


def _get_lake() -> Lake:
    return _open_lake(get_lakes(), get_era())


@st.cache_resource(show_spinner=False, max_entries=8)
def _build_reader(lakes: Lakes, era: bytes, versions: TableVersions) -> Reader:
    return Reader(_open_lake(lakes, era).at(dict(versions)), *_build_shared_caches(lakes, era))


@st.cache_resource(show_spinner=False, max_entries=2)
def _build_shared_caches(lakes: Lakes, era: bytes) -> tuple[ColumnCache, LruCache[pl.DataFrame]]:
    """Return the caches of columns and small answers that all readers of a lake share."""
    return ColumnCache(_open_lake(lakes, era).snapshot().objects), LruCache(MAX_ANSWER_BYTES)


@st.cache_resource(show_spinner=False, max_entries=2)
def _open_lake(lakes: Lakes, era: bytes) -> Lake:
    """Open a lake once, because that takes longer than many pages. A read of it asks for its newest state."""
    return lake.open(lakes)


def get_author() -> str:
    """Return the author of annotations and views: who wrote last in this session, else the system's user, else empty.

    The name is not verified.
    """
    try:
        return st.session_state.get(_AUTHOR) or getpass.getuser()
    except (OSError, KeyError):
        return ""


def remember_author(name: str) -> None:
    """Offer a name as the author of the next annotation."""
    st.session_state[_AUTHOR] = name
