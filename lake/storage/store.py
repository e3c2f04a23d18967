"""The only module that commits to Delta tables: opening, creating, appending, rewriting, listing files.

A lake is a folder (or a prefix of a bucket) of Delta tables, one per entry of `lake.tables.TABLES` that was ever
written, each carrying the format version in its configuration. delta-rs keeps the log; the data files are written by
`lake.storage.encoding` and registered with it: 2 ms a commit, and one layout for append, compaction and erasure.

Traps this module absorbs (measured; docs/decisions/0002, 0010): a repeated app transaction is a conflict key, not a
guard against duplicates; two rewrites of the same files do not conflict unless they carry one; a file that vacuum took
for an orphan before its commit must be written again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from lake import ids
from lake.errors import LakeAccessError, NotALakeError, TrajlakeError
from lake.storage.addresses import with_engine_errors
from lake.storage.commits import NOTE, CommitLostError, LogCheck, commit, damaged_log, until_committed, utc_now
from lake.storage.data_files import (
    FileEntry,
    Replacements,
    Staged,
    Written,
    added_in,
    applied,
    listed,
    sorted_rows,
    stem,
    write_file,
)
from lake.storage.migrations import MadeTables, made_with_lake, make_table, migrate, missing_table, require_known
from lake.storage.objects import Objects
from lake.tables import EPISODES, FORMAT_VERSION, TABLES

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

_APPEND_TRIES = 20
SOON = timedelta(hours=1)
"""A data file that waits longer for its commit may have been taken for an orphan."""
_FEW_COMMITS = 50
_REWRITE = "rewrite"
"""App transaction of every rewrite: two that start from one version cannot both succeed."""


class Store:
    """The Delta tables of one lake, under `objects`; `clock` says what time it is."""

    def __init__(self, objects: Objects, clock: Callable[[], datetime] = utc_now) -> None:
        self.objects = objects
        self.replacements = Replacements(objects)
        self.clock = clock
        self._handles: dict[str, DeltaTable] = {}
        self._formats: dict[str, int] = {}
        self._made = MadeTables(objects)
        self._logs = {name: LogCheck(objects, name) for name in TABLES}
        self._listed: dict[str, tuple[int, list[FileEntry]]] = {}
        self._prepared = False
        self._inside: dict[str, frozenset[int]] = {}
        self._lock = threading.RLock()
        self.root = objects.root

    def __reduce__(self) -> tuple[Any, ...]:
        """By address: what is open here is not carried to another process, whose clock counts there."""
        return Store, (self.objects,)

    def exists(self) -> bool:
        """Whether the root holds a lake."""
        # Not DeltaTable.is_deltatable: it keeps the GIL while a bucket answers.
        log = f"{EPISODES.name}/_delta_log"
        return any(self.objects.exists(f"{log}/{name}") for name in (f"{0:020d}.json", "_last_checkpoint"))

    def create(self) -> None:
        """Make a lake: an empty `episodes`. Does nothing if another process has."""
        self._create(EPISODES.name)

    def check_format(self) -> None:
        """Refuse a lake that a newer package wrote, and one that has lost a table: it would read as if it were empty.

        Raises:
            LakeVersionError: names the table, its version and ours.
            NotALakeError: a Delta table that is not ours.
            LakeAccessError: a table is missing.
        """
        had = self.had()
        there = [name for name in TABLES if self.refresh(name) != -1]
        if lost := sorted(had.difference(there)):
            raise LakeAccessError(missing_table(self.root, lost[0]))

    def had(self) -> frozenset[str]:
        """Tables that the lake has had. Ask first and look for them after: those that are named are there already."""
        with suppress(TrajlakeError):  # damaged: its format is not known
            self.refresh(EPISODES.name)
        return self._made.names() | made_with_lake(self._formats.get(EPISODES.name))

    def refresh(self, name: str) -> int:
        """Bring the table's handle to the newest version and return it; -1 if the table does not exist."""
        with self._lock, self._translated(name):
            handle = self._handles.get(name)
            if handle is None:
                if (handle := self._found(name)) is None:
                    return -1
                self._formats[name] = require_known(handle, f"table `{name}` of {self.root}")
            else:
                handle.update_incremental()
            self._logs[name].require(handle.version())
            self._handles[name] = handle
            return handle.version()

    def files(self, name: str, version: int | None = None) -> tuple[int, list[FileEntry]]:
        """Version and live files of a table: the newest, or a given one (-1: no files).

        Where `forget` deleted files of a given version, those that took their place are listed.

        Raises:
            LakeAccessError: there is no such version, or its log is damaged.
        """
        at, entries = self.logged(name, version)
        known = {} if version is None else self.replacements.known()
        return at, applied(self.objects, name, entries, known)[0]

    def logged(self, name: str, version: int | None = None) -> tuple[int, list[FileEntry]]:
        """As `files`, as the log lists them, deleted ones too."""
        if version == -1:
            return -1, []
        with self._lock:
            if version is None:
                version = self.refresh(name)
                if version == -1:
                    return -1, []
                handle = self._handles[name]
            else:
                handle = None
            known = self._listed.get(name)
            if known is None or known[0] != version:
                with self._translated(name):
                    at = handle or self._at(name, version)
                    known = (version, listed(self.objects, TABLES[name], at))
                if handle is not None:
                    self._listed[name] = known
            return version, known[1]

    def remembered(self, path: str, look: Callable[[], frozenset[int]]) -> frozenset[int]:
        """What a look into a file found, looked for once: files never change."""
        if path not in self._inside:
            self._inside[path] = look()
        return self._inside[path]

    def append(self, name: str, frame: pl.DataFrame, *, job_id: int | None = None) -> str:
        """Append rows unconditionally, and return the name of the file that holds them."""
        staged = self.stage(name, frame, job_id=job_id)
        self.append_staged(name, [staged])
        return staged.written.add.path

    def stage(self, name: str, frame: pl.DataFrame, *, job_id: int | None = None) -> Staged:
        """Write rows to a file that a commit can name, alone or beside others, as often as it takes."""
        self._prepare(name)
        return Staged(frame, self._write(name, sorted_rows(frame, TABLES[name])), job_id)

    def append_staged(self, name: str, staged: Sequence[Staged]) -> None:
        """Append files unconditionally, in one commit."""

        def append() -> None:
            with self._lock:
                self.refresh(name)
                # delta-rs has no blind append: beside a rewrite it may call a conflict where there is none.
                self._append(self._handles[name], name, staged)

        busy = f"table `{name}` of {self.root} is too busy: {_APPEND_TRIES} commits failed; try again later"
        until_committed(append, tries=_APPEND_TRIES, busy=busy)
        self.keep(name, staged)

    def append_episodes(self, staged: Sequence[Staged], checked_version: int) -> None:
        """Append to `episodes` as a compare-and-swap on the version that was checked. Raises CommitLostError."""
        self._append_if(EPISODES.name, staged, checked_version)

    def append_terminal(self, staged: Sequence[Staged], checked_version: int) -> None:
        """Append terminal rows likewise. Raises CommitLostError: a job ended, or dead writes were dropped: retry."""
        self._append_if("jobs", staged, checked_version)

    def _append_if(self, name: str, staged: Sequence[Staged], version: int) -> None:
        with self._lock:
            # Only what is not newer than the caller's look is a base for its commit.
            base = self._handles[name] if self._handles[name].version() == version else self._at(name, version)
            # If it fails the files stay: over a network a commit may have arrived although it was reported lost.
            self._append(base, name, staged, [self._next(base, name)])
        self.keep(name, staged)

    def _append(
        self, handle: DeltaTable, name: str, staged: Sequence[Staged], marks: list[Transaction] | None = None
    ) -> None:
        for one in staged:
            one.written = self._fresh(name, one)
        note = self._note("append", *(one.job_id for one in staged), rows=sum(one.written.rows for one in staged))
        self._commit(handle, name, [one.written.add for one in staged], note, marks)

    def added(self, name: str, since: int, until: int) -> list[FileEntry]:
        """Files that a few commits after a version brought, up to another; all files where that cannot be told."""
        if until - since <= _FEW_COMMITS:
            logs = [self.objects.get(f"{name}/_delta_log/{v:020d}.json") for v in range(since + 1, until + 1)]
            if None not in logs:
                return [e for log in logs for e in added_in(self.objects, TABLES[name], log or b"", until)]
        return self.files(name, until)[1]

    def holds(self, name: str, write_id: int, since: int) -> bool:
        """Whether a write attempt was committed after a version: it may have been, although it was reported lost."""
        return any(entry.only_write_id == write_id for entry in self.added(name, since, self.refresh(name)))

    def fence(self, name: str) -> int:
        """Make compare-and-swaps and rewrites of a table that are under way fail; its version afterwards."""
        self._prepare(name)

        def fence() -> int:
            with self._lock:
                self.refresh(name)
                marks = [self._next(self._handles[name], app) for app in (name, _REWRITE)]
                self._commit(self._handles[name], name, [], self._note("fence"), marks)
                return self.refresh(name)

        return until_committed(fence)

    def swap(
        self,
        name: str,
        version: int,
        removed: Sequence[FileEntry],
        written: Written,
        *,
        operation: str,
        erases: bool = False,
        job_id: int | None = None,
    ) -> None:
        """Replace files by one that was put aside, in one commit.

        Args:
            version: at which the removed files are live.
            operation: what this is called in the history.
            erases: rows are gone for good, so writers of `episodes` must look again at what is there.

        Raises:
            CommitLostError: another rewrite was first.
        """
        self._prepare(name)
        now = int(self.clock().timestamp() * 1000)
        actions: list[AddAction | RemoveAction] = [
            RemoveAction(entry.name, erases, now, size=entry.bytes) for entry in removed
        ]
        if written.rows:
            written.add.data_change = erases
            actions.append(written.add)
        handle = self._at(name, version)
        marks = [self._next(handle, _REWRITE)]
        if erases and name == EPISODES.name:
            marks.append(self._next(handle, EPISODES.name))
        note = self._note(operation, job_id, rows=written.rows, removed=len(removed))
        try:
            self._commit(handle, name, actions, note, marks)
        except CommitLostError as error:
            msg = f"table `{name}` of {self.root} was rewritten by another process; nothing changed, run it again"
            raise CommitLostError(msg) from error

    def put_aside(self, name: str, rows: Iterable[pa.Table], clean_since: tuple[int, int] | None) -> Written:
        """Write a file that no commit names; no rows leave no file. All are visible at `clean_since`, if that is known.

        Args:
            clean_since: versions of `episodes` and `jobs`.
        """
        written = self._write(name, iter(rows), stem(clean_since))
        if not written.rows:
            self.objects.delete([f"{name}/{written.add.path}"])
        return written

    def history(self, name: str, limit: int | None = None) -> list[dict[str, Any]]:
        """Commits of a table, newest first: version, timestamp, operation, and our note (`job`, `rows`, ...)."""
        with self._lock, self._translated(name):
            commits = [] if self.refresh(name) == -1 else self._handles[name].history(limit)
        return [commit | {"note": commit.get(NOTE) or {}} for commit in commits]

    def keep(self, name: str, staged: Sequence[Staged]) -> None:
        """See to it that committed files are there, and write them again where they are gone.

        A writer that was stopped for days between writing a file and committing it finds it taken for an orphan.
        """
        for one in staged:
            while one.rows is not None and not self.objects.exists(f"{name}/{one.written.add.path}"):
                version, entries = self.files(name)
                if not (missing := [entry for entry in entries if entry.name == one.written.add.path]):
                    break  # committed, seen by a rewrite, and replaced by it
                again = self._write(name, sorted_rows(one.rows, TABLES[name]))
                now = int(self.clock().timestamp() * 1000)
                gone = RemoveAction(missing[0].name, False, now, size=missing[0].bytes)
                handle = self._at(name, version)
                with suppress(CommitLostError):
                    note = self._note("repair", rows=again.rows)
                    self._commit(handle, name, [gone, again.add], note, [self._next(handle, _REWRITE)])
                    one.written = again

    def _write(self, name: str, rows: Iterator[pa.Table], beginning: str = "") -> Written:
        with self._translated(name):
            return write_file(self.objects, TABLES[name], rows, beginning, self.clock())

    def _fresh(self, name: str, staged: Staged) -> Written:
        """A file about to be committed, written again if vacuum may have taken it meanwhile."""
        is_young = timedelta(0) <= self.clock() - staged.written.at < SOON
        if is_young or staged.rows is None or self.objects.exists(f"{name}/{staged.written.add.path}"):
            return staged.written
        return self._write(name, sorted_rows(staged.rows, TABLES[name]))

    def _commit(
        self,
        handle: DeltaTable,
        name: str,
        actions: Sequence[AddAction | RemoveAction],
        note: dict[str, Any],
        marks: list[Transaction] | None = None,
    ) -> None:
        with self._translated(name):
            commit(handle, name, actions, {NOTE: note}, marks)
        self._logs[name].wrote(handle.version())

    def _note(self, operation: str, *jobs: int | None, **figures: int) -> dict[str, Any]:
        """What a commit says of itself; it names its job if it is of one alone."""
        job = {"job": ids.to_text(jobs[0])} if jobs and jobs[0] is not None and len(set(jobs)) == 1 else {}
        return {"at": self.clock().isoformat(), "operation": operation, **figures, **job}

    def _next(self, handle: DeltaTable, app: str) -> Transaction:
        """A number for an app transaction: that there is one decides about a conflict, but it has to grow."""
        return Transaction(app, handle.version() + 1)

    def _prepare(self, name: str) -> None:
        """Before a write: the table is made if need be, and once, a lake of an older format becomes one of this."""
        with self._lock:
            if not self._prepared:
                there = [other for other in TABLES if self.refresh(other) != -1]
                for other in there:  # those of an older format, which are on no list: before the first is migrated
                    self._made.add(other)
                for other in there:
                    with self._translated(other):
                        version = require_known(self._handles[other], f"table `{other}` of {self.root}")
                        if version < FORMAT_VERSION and migrate(partial(self._open, other), TABLES[other]):
                            self._handles[other] = self._open(other)
                self._prepared = True
            if name not in self._handles and self.refresh(name) == -1:
                self._create(name)
            self._made.add(name)

    def _create(self, name: str) -> None:
        with self._translated(name):
            make_table(self.objects, TABLES[name], self.clock())
        self.refresh(name)

    def _at(self, name: str, version: int) -> DeltaTable:
        with self._translated(name):
            try:
                handle = self._open(name, version)
            except DeltaError as error:
                if (damage := damaged_log(self.objects, name)) is not None:
                    raise damage from None
                msg = f"table `{name}` of {self.root} has no version {version}; its newest is {self.refresh(name)}"
                raise LakeAccessError(msg) from error
            self._logs[name].require(version)
            return handle

    def _found(self, name: str) -> DeltaTable | None:
        """A table's handle; None if there is no such table."""
        try:
            if self.objects.folder is not None:
                (self.objects.folder / name / "_delta_log").stat()  # far cheaper than opening what is not there
            return self._open(name)
        except (TableNotFoundError, FileNotFoundError, NotADirectoryError):
            return None

    def _open(self, name: str, version: int | None = None) -> DeltaTable:
        return DeltaTable(self.objects.uri(name), version=version, storage_options=self.objects.delta_options)

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Turn what storage raises into errors that say what to do; lost commits pass through."""
        try:
            yield
        except (CommitFailedError, TrajlakeError):
            raise
        except TableNotFoundError:
            msg = f"{self.objects.uri(name)} holds no table; `trajlake ingest FILE --lake URI` makes a lake"
            raise NotALakeError(msg) from None
        except with_engine_errors(DeltaError, OSError) as error:
            damage = damaged_log(self.objects, name) if "json" in str(error).lower() else None
            raise damage or self.objects.explained(error) from None
