"""Commits that race with other writers: check the newest version, commit on top of it, and retry if another was first.

A process that drops rows of a write attempt first publishes its write_id permanently, then fences the writers. A writer
that lost a compare-and-swap reads the published ids before it retries, so a write attempt that is not accepted by then
can never be.

A power cut may leave a commit's entry in the log empty, cut short or missing. delta-rs reads an empty entry as a commit
without changes, so its data would vanish silently. So the store checks every entry once that it relies on, vacuum
checks before it deletes anything, and the doctor checks on every call.
"""

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
from lake.retries import compute_pause
from lake.storage.objects import Objects

_T = TypeVar("_T")
_RETRIES = 200
"""Retries of delta-rs, which puts a commit on top of others that do not conflict with it."""
_LONGEST_WAIT = 0.1
"""Longest wait between two tries, in seconds."""


def utc_now() -> datetime:
    """Return the current time; the default clock of a lake for the times of commits."""
    return datetime.now(UTC)


class CommitLostError(ConflictError):
    """Another process committed first; check again and retry."""


def commit(
    handle: DeltaTable,
    name: str,
    actions: Sequence[AddAction | RemoveAction],
    metadata: dict[str, Any],
    marks: list[Transaction] | None = None,
) -> None:
    """Commit on a handle's version; if two commits share a mark, the later one raises CommitLostError."""
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
    """Call `attempt` until no other process is faster, waiting a little longer each time.

    Args:
        attempt: refreshes what it relies on, checks it again and commits; raises CommitLostError if it was too late.
        tries: number of tries; None never gives up, since each lost try means that another process advanced.

    Raises:
        ConflictError: every try was too late.
    """
    for done in count(1):
        try:
            return attempt()
        except CommitLostError as lost:
            if done == tries:
                raise ConflictError(f"{busy} ({lost})") from lost
        # Random waits keep two writers from colliding again; the first retry is immediate.
        time.sleep(compute_pause(done - 1, first=0.002, longest=_LONGEST_WAIT, jitter=1))
    raise AssertionError


_REVOKED = "_trajlake/condemned"


def publish_revoked(objects: Objects, write_ids: frozenset[int]) -> None:
    """Publish write attempts that must never be accepted."""
    if write_ids:
        objects.put(f"{_REVOKED}/{ids.to_text(ids.fresh_id())}.json", msgspec.json.encode(sorted(write_ids)))


def read_revoked(objects: Objects) -> frozenset[int]:
    """Return the write attempts that were dropped or are about to be."""
    records = ((entry.path, objects.get(entry.path)) for entry in objects.list(_REVOKED))
    remedy = "restore it from a backup: readers cannot know which writes it revokes"
    return frozenset().union(
        *(decode_document(data, list[int], objects.uri(path), remedy) for path, data in records if data is not None)
    )


NOTE = "trajlake"
"""Key of our note in a commit's metadata."""
_AT_ONCE = 16
"""Concurrent requests to a bucket."""


class LogCheck:
    """The checked part of one table's log; entries never change, so each is read once."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name
        self._checked_from = 0
        self._checked_to = -1

    def note_own_commit(self, number: int) -> None:
        """Record that this process committed a version; entries of others before it still need a check."""
        if number == self._checked_to + 1:
            self._checked_to = number

    def require(self, version: int) -> None:
        """Check the entries since a version's checkpoint. Raises LakeAccessError: names table, version and file."""
        if self._checked_from <= version <= self._checked_to:
            return
        if 0 <= self._checked_to < version:
            numbers = range(self._checked_to + 1, version + 1)
        else:
            numbers = _find_unchecked(self._objects, self._name, version)
        if faults := _find_faults(self._objects, self._name, numbers):
            raise _damaged_log_error(self._objects, self._name, faults)
        if version > self._checked_to:
            self._checked_from = numbers.start - 1 if self._checked_to < 0 else self._checked_from
            self._checked_to = version


def check_log(objects: Objects, name: str) -> LakeAccessError | None:
    """Return the error of a table whose log has damaged entries; None if every entry is complete."""
    faults = find_log_faults(objects, {name: max(_list_numbers(objects, name, ".json"), default=-1)})
    return _damaged_log_error(objects, name, faults) if faults else None


def _damaged_log_error(objects: Objects, name: str, faults: Sequence[str]) -> LakeAccessError:
    rest = f" (+{len(faults) - 1} more)" if len(faults) > 1 else ""
    return LakeAccessError(
        f"table `{name}` of {objects.root} cannot be read: {faults[0]}{rest}. What it committed is lost: restore the "
        "file from a backup. `trajlake doctor` lists every damaged table"
    )


def find_log_faults(objects: Objects, versions: Mapping[str, int]) -> list[str]:
    """Return the damaged commits up to these versions of the tables that no checkpoint contains."""
    return [
        fault
        for name, version in versions.items()
        for fault in _find_faults(objects, name, _find_unchecked(objects, name, version))
    ]


def _list_numbers(objects: Objects, name: str, kind: str) -> list[int]:
    """Return the numbers of the files of a kind in a table's log, including damaged files."""
    files = [listing.path.rpartition("/")[2] for listing in objects.list(f"{name}/_delta_log")]
    return [int(file[:20]) for file in files if file[:20].isdecimal() and file[20:].startswith(kind)]


def _find_unchecked(objects: Objects, name: str, version: int) -> range:
    checkpoints = [number for number in _list_numbers(objects, name, ".checkpoint") if number <= version]
    return range(max(checkpoints, default=-1) + 1, version + 1)


def _find_faults(objects: Objects, name: str, numbers: Sequence[int]) -> list[str]:
    paths = [f"{name}/_delta_log/{number:020d}.json" for number in numbers]
    if objects.folder is None and len(paths) > 1:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            entries = list(pool.map(objects.get, paths))
    else:
        entries = [objects.get(path) for path in paths]
    return [
        f"commit {int(path[-25:-5])} of `{name}` is {fault} ({objects.uri(path)})"
        for path, data in zip(paths, entries, strict=True)
        if (fault := _describe_fault(data)) is not None
    ]


class _Note(msgspec.Struct):
    rows: int = 0
    removed: int = 0


class _CommitInfo(msgspec.Struct):
    trajlake: _Note = msgspec.field(default_factory=_Note)


class _RowStatistics(msgspec.Struct):
    numRecords: int = 0


class _Add(msgspec.Struct):
    stats: str = "{}"


class _CheckedAction(msgspec.Struct):
    """One line of an entry: the fields of lines with rows, and the presence of all other actions."""

    commitInfo: _CommitInfo | None = None
    add: _Add | None = None
    remove: Any = None
    metaData: Any = None
    protocol: Any = None
    txn: Any = None


_decoder = msgspec.json.Decoder(_CheckedAction)
_statistics = msgspec.json.Decoder(_RowStatistics)


def _describe_fault(data: bytes | None) -> str | None:
    """Describe the fault of an entry; our notes say how many rows an entry adds and how many files it removes."""
    if data is None:
        return "missing"
    if not data.strip():
        return "empty"
    try:
        actions = [_decoder.decode(line) for line in data.splitlines() if line.strip()]
        rows = sum(_statistics.decode(action.add.stats).numRecords for action in actions if action.add is not None)
    except (ValueError, RecursionError):
        return "cut short, or garbage: it is not a commit in JSON"
    if all(action == _CheckedAction() for action in actions):
        return "garbage: it holds no action"
    removed = sum(action.remove is not None for action in actions)
    for info in (action.commitInfo for action in actions if action.commitInfo is not None):
        if info.trajlake.rows > rows or info.trajlake.removed > removed:
            return f"cut short: its note has {info.trajlake.rows} rows, and its files have {rows}"
    return None
