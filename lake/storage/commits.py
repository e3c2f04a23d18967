"""Commits that race others: look at what is there, commit on top of it, and if somebody was first, do it again.

Whoever drops rows of a write attempt publishes its write_id first, for good, and fences the writers after. A writer
that lost a compare-and-swap looks at what was published before it tries again, so a write attempt that is not accepted
by then can no longer be.

A power cut may leave a commit's entry in the log empty, cut short, or not there at all. delta-rs reads an empty entry
as a commit that changed nothing, so what it committed is gone without a word. So the store checks every entry once that
it relies on, vacuum before it deletes anything, the doctor whenever it is called.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import count
from typing import Any, TypeVar

import msgspec
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from lake import ids
from lake.documents import decode_document
from lake.errors import ConflictError, LakeAccessError
from lake.storage.objects import Objects

_T = TypeVar("_T")
_RETRIES = 200
"""Of delta-rs, which puts a commit on top of others that do not conflict with it."""
_LONGEST_WAIT = 0.1
"""Seconds."""


def utc_now() -> datetime:
    """The clock a lake uses unless it is given another: what commits say of when they were made."""
    return datetime.now(UTC)


class CommitLostError(ConflictError):
    """Another process committed first: look again and retry."""


def commit(
    handle: DeltaTable,
    name: str,
    actions: Sequence[AddAction | RemoveAction],
    metadata: dict[str, Any],
    marks: list[Transaction] | None = None,
) -> None:
    """Commit on a handle's version; of two that share a mark, the later raises CommitLostError."""
    properties = CommitProperties(custom_metadata=metadata, max_commit_retries=_RETRIES, app_transactions=marks)
    try:
        handle.create_write_transaction(
            list(actions),
            "append",
            handle.schema(),
            commit_properties=properties,
            post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
        )
    except CommitFailedError as error:
        raise CommitLostError(f"`{name}` changed after version {handle.version()}: {error}") from error


def until_committed(attempt: Callable[[], _T], *, tries: int | None = None, busy: str = "") -> _T:
    """Call `attempt` until nobody is quicker, waiting a little longer each time.

    Args:
        attempt: refreshes what it relies on, checks it again and commits; raises CommitLostError if it was too late.
        tries: how often; without a limit unless given, as somebody else gets on each time.

    Raises:
        ConflictError: every try was too late.
    """
    for done in count(1):
        try:
            return attempt()
        except CommitLostError as lost:
            if done == tries:
                raise ConflictError(f"{busy} ({lost})") from lost
        # Two that collide at the same pace would collide again; the first retry is at once.
        time.sleep(random.uniform(0, min(_LONGEST_WAIT, 0.001 * (2 ** min(done - 1, 10) - 1))))
    raise AssertionError


_REVOKED = "_trajlake/condemned"


def revoke(objects: Objects, write_ids: frozenset[int]) -> None:
    """Let writers know that these write attempts must not be accepted any more."""
    if write_ids:
        objects.put(f"{_REVOKED}/{ids.to_text(ids.fresh_id())}.json", msgspec.json.encode(sorted(write_ids)))


def revoked(objects: Objects) -> frozenset[int]:
    """Write attempts that were dropped, or are about to be."""
    found = ((entry.path, objects.get(entry.path)) for entry in objects.list(_REVOKED))
    remedy = "restore it from a backup: readers cannot know which writes it revokes"
    return frozenset().union(
        *(decode_document(data, list[int], objects.uri(path), remedy) for path, data in found if data is not None)
    )


NOTE = "trajlake"
"""Key of our note in a commit's metadata."""
_AT_ONCE = 16
"""Requests to a bucket."""


class LogCheck:
    """What of one table's log has been found whole; entries never change, so each is read once."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name
        self._first = 0
        self._last = -1

    def wrote(self, version: int) -> None:
        """This process committed a version itself; what others committed before it is still to be read."""
        if version == self._last + 1:
            self._last = version

    def require(self, version: int) -> None:
        """Check the entries since a version's checkpoint. Raises LakeAccessError: names table, version and file."""
        if self._first <= version <= self._last:
            return
        if 0 <= self._last < version:
            numbers = range(self._last + 1, version + 1)
        else:
            numbers = _since_checkpoint(self._objects, self._name, version)
        if faults := _faults(self._objects, self._name, numbers):
            raise _damaged(self._objects, self._name, faults)
        if version > self._last:
            self._first = numbers.start - 1 if self._last < 0 else self._first
            self._last = version


def damaged_log(objects: Objects, name: str) -> LakeAccessError | None:
    """The error of a table that delta-rs cannot open because of an entry in its log; None if every entry is whole."""
    faults = log_faults(objects, {name: max(_numbered(objects, name, ".json"), default=-1)})
    return _damaged(objects, name, faults) if faults else None


def _damaged(objects: Objects, name: str, faults: Sequence[str]) -> LakeAccessError:
    more = f" (+{len(faults) - 1} more)" if len(faults) > 1 else ""
    return LakeAccessError(
        f"table `{name}` of {objects.root} cannot be read: {faults[0]}{more}. What it committed is lost: restore the "
        "file from a backup. `trajlake doctor` lists every damaged table"
    )


def log_faults(objects: Objects, versions: Mapping[str, int]) -> list[str]:
    """Damaged commits up to these versions of the tables that are in no checkpoint either."""
    return [
        fault
        for name, version in versions.items()
        for fault in _faults(objects, name, _since_checkpoint(objects, name, version))
    ]


def _numbered(objects: Objects, name: str, kind: str) -> list[int]:
    """Numbers of the files of a kind in a table's log, damaged ones too."""
    files = [found.path.rpartition("/")[2] for found in objects.list(f"{name}/_delta_log")]
    return [int(file[:20]) for file in files if file[:20].isdecimal() and file[20:].startswith(kind)]


def _since_checkpoint(objects: Objects, name: str, version: int) -> range:
    checkpoints = [number for number in _numbered(objects, name, ".checkpoint") if number <= version]
    return range(max(checkpoints, default=-1) + 1, version + 1)


def _faults(objects: Objects, name: str, numbers: Sequence[int]) -> list[str]:
    paths = [f"{name}/_delta_log/{number:020d}.json" for number in numbers]
    if objects.folder is None and len(paths) > 1:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            entries = list(pool.map(objects.get, paths))
    else:
        entries = [objects.get(path) for path in paths]
    return [
        f"commit {int(path[-25:-5])} of `{name}` is {fault} ({objects.uri(path)})"
        for path, data in zip(paths, entries, strict=True)
        if (fault := _fault(data)) is not None
    ]


class _Note(msgspec.Struct):
    rows: int = 0
    removed: int = 0


class _Info(msgspec.Struct):
    trajlake: _Note = msgspec.field(default_factory=_Note)


class _Statistics(msgspec.Struct):
    numRecords: int = 0


class _Add(msgspec.Struct):
    stats: str = "{}"


class _Action(msgspec.Struct):
    """One line of an entry: what is needed of those that name rows, and whether it is any of the others."""

    commitInfo: _Info | None = None
    add: _Add | None = None
    remove: Any = None
    metaData: Any = None
    protocol: Any = None
    txn: Any = None


_decoder = msgspec.json.Decoder(_Action)
_statistics = msgspec.json.Decoder(_Statistics)


def _fault(data: bytes | None) -> str | None:
    """What is wrong with an entry, in words; ours say how many rows they bring and how many files they take."""
    if data is None:
        return "missing"
    if not data.strip():
        return "empty"
    try:
        actions = [_decoder.decode(line) for line in data.splitlines() if line.strip()]
        rows = sum(_statistics.decode(action.add.stats).numRecords for action in actions if action.add is not None)
    except (ValueError, RecursionError):
        return "cut short, or garbage: it is no commit in JSON"
    if all(action == _Action() for action in actions):
        return "garbage: it holds no action"
    removed = sum(action.remove is not None for action in actions)
    for info in (action.commitInfo for action in actions if action.commitInfo is not None):
        if info.trajlake.rows > rows or info.trajlake.removed > removed:
            return f"cut short: it says that it brings {info.trajlake.rows} rows, and names files of {rows}"
    return None
