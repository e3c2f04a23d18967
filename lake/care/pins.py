"""Pins: which versions of the tables must stay readable, by name or for as long as somebody is at work.

A named snapshot stays until it is dropped. A lease is held by a running reader (a trainer) and expires when its
heartbeat stops. Both are small JSON objects under `_trajlake/`; `vacuum` deletes no file that a pinned version needs.
A pin is written first and its files are looked for after, so a vacuum that was quicker is noticed at once.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Self

import msgspec

from lake import ids
from lake.documents import Moment, T, Versions, decode_document
from lake.errors import LakeAccessError, TrajlakeError, UsageError
from lake.read.snapshot import versions_at_episodes, versions_at_time
from lake.storage.store import Store
from lake.tables import TABLES

LEASE = timedelta(hours=1)
"""How long a lease lasts without a heartbeat."""
_SNAPSHOTS = "_trajlake/snapshots"
_LEASES = "_trajlake/leases"
_VACUUMS = "_trajlake/vacuums"
_LONGEST_VACUUM = timedelta(days=1)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Pin(msgspec.Struct, kw_only=True):
    """Versions of the tables that stay readable."""

    name: str
    """Of the snapshot, or the holder of the lease."""
    versions: Versions
    created_at: Moment
    expires_at: Moment | None = None
    """None for a named snapshot."""


class Pins:
    """The pins of a lake."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def name(self, name: str, versions: Mapping[str, int]) -> Pin:
        """Name a snapshot; see `Lake.name_snapshot`."""
        path = self._path(name)
        pin = Pin(name=name, versions=dict(versions), created_at=self._store.clock())
        if not self._store.objects.create(path, msgspec.json.encode(pin)):
            raise UsageError(f"there is a snapshot {name!r} already; choose another name, or drop it first")
        if missing := self.unsafe(versions):
            self._store.objects.delete([path])
            raise LakeAccessError(f"the snapshot cannot be kept: {missing}; take a newer one")
        return pin

    def find(self, name: str) -> Pin:
        """The snapshot of that name. Raises UsageError: there is none. Raises LakeAccessError: its entry is damaged."""
        data = self._store.objects.get(self._path(name))
        if data is None:
            names = ", ".join(pin.name for pin in self.snapshots()) or "none yet"
            raise UsageError(f"there is no snapshot {name!r}; there are: {names}")
        return self._decoded(data, self._path(name), Pin)

    def versions_at(self, when: str | datetime | int) -> dict[str, int]:
        """Versions of a named snapshot, of a moment, or of when `episodes` came to a version.

        Raises:
            UsageError: no such snapshot, and no time either; a moment before the lake; no such version.
        """
        if isinstance(when, str) and when.isdecimal():
            when = int(when)
        if isinstance(name := when, str):
            try:
                when = datetime.fromisoformat(name)
            except ValueError:
                return self.find(name).versions
        if isinstance(when, datetime):
            return versions_at_time(self._store, when if when.tzinfo else when.replace(tzinfo=UTC))
        if not isinstance(when, int):
            raise UsageError(
                f"{when!r} is no time of a lake; valid: a datetime, a name, a version of `episodes`, versions of tables"
            )
        return versions_at_episodes(self._store, when)

    def drop(self, name: str) -> None:
        """Take a name back; the versions stay readable until a vacuum. Raises UsageError: there is no such snapshot."""
        self.find(name)
        self._store.objects.delete([self._path(name)])

    def snapshots(self) -> list[Pin]:
        """Named snapshots, by age."""
        return sorted(self._all(_SNAPSHOTS), key=lambda pin: pin.created_at)

    def active(self) -> list[Pin]:
        """Named snapshots and live leases. Raises LakeAccessError: one is damaged, so nothing may be deleted."""
        now = self._store.clock()
        leases = self._all(_LEASES)
        return self.snapshots() + [pin for pin in leases if pin.expires_at is None or pin.expires_at > now]

    def missing(self, versions: Mapping[str, int]) -> str | None:
        """What these versions need and is not there, in words; None if all is there."""
        for name in TABLES:
            try:
                _, entries = self._store.files(name, versions.get(name, -1))
            except TrajlakeError as error:
                return str(error)
            have = {found.path for found in self._store.objects.list(name)} if entries else set()
            if gone := [entry.name for entry in entries if f"{name}/{entry.name}" not in have]:
                return f"{len(gone)} files of `{name}` at version {versions[name]} are gone, for example {gone[0]}"
        return None

    @contextmanager
    def vacuuming(self) -> Iterator[None]:
        """Let those who pin older versions know that a vacuum, which may have read the pins already, is at work."""
        path = f"{_VACUUMS}/{ids.to_text(ids.fresh_id())}.json"
        self._store.objects.put(path, msgspec.json.encode(self._store.clock()))
        try:
            yield
        finally:
            self._store.objects.delete([path])

    def unsafe(self, versions: Mapping[str, int]) -> str | None:
        """Why versions that were just pinned may not stay, in words; None if they will.

        Files that are live now are never deleted by a vacuum that is under way; older ones may be.
        """
        objects, now = self._store.objects, self._store.clock()
        begun = ((entry.path, objects.get(entry.path)) for entry in objects.list(_VACUUMS))
        moments = [self._decoded(data, path, Moment) for path, data in begun if data is not None]
        is_vacuumed = any(now - moment < _LONGEST_VACUUM for moment in moments)
        if is_vacuumed and not all(
            {entry.name for entry in self._store.files(name, version)[1]}
            <= {entry.name for entry in self._store.files(name)[1]}
            for name, version in versions.items()
        ):
            return "a vacuum is running that may not have seen its pin; try again when it is done"
        return self.missing(versions)

    def _all(self, folder: str) -> list[Pin]:
        objects = self._store.objects
        found = ((entry.path, objects.get(entry.path)) for entry in objects.list(folder))
        return [self._decoded(data, path, Pin) for path, data in found if data is not None]

    def _decoded(self, data: bytes, path: str, kind: type[T]) -> T:
        where, remedy = self._store.objects.uri(path), "restore it or delete it to give its pin up"
        value = decode_document(data, kind, where, remedy)
        if isinstance(value, Pin) and (unknown := sorted(value.versions.keys() - TABLES.keys())):
            raise LakeAccessError(f"{where} names tables that are not known ({', '.join(unknown)}); {remedy}")
        return value

    def _path(self, name: str) -> str:
        is_time = name.isdecimal()  # `Lake.at` would read it as a version or a moment
        with suppress(ValueError):
            is_time = bool(datetime.fromisoformat(name)) or is_time
        if not _NAME.fullmatch(name) or is_time:
            raise UsageError(
                f"{name!r} cannot name a snapshot; valid: letters, digits, `.`, `_` and `-`, at most 100, and neither "
                "a number nor a time"
            )
        return f"{_SNAPSHOTS}/{name}.json"


class Lease:
    """Versions kept readable while a process works on them; a thread renews it four times in its duration.

    A failed renewal is not an error: the lease lasts on, and the next renewal may succeed.
    """

    def __init__(
        self, store: Store, holder: str, versions: Mapping[str, int], duration: timedelta, job_id: int | None = None
    ) -> None:
        self._store = store
        self._pin = Pin(name=holder, versions=dict(versions), created_at=store.clock())
        self._duration = duration
        self._path = f"{_LEASES}/{ids.to_text(ids.fresh_id() if job_id is None else job_id)}.json"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="trajlake-lease", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        if missing := Pins(self._store).unsafe(self._pin.versions):
            self._store.objects.delete([self._path])
            raise LakeAccessError(f"the snapshot cannot be read: {missing}; a vacuum removed them")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._store.objects.delete([self._path])

    def _write(self) -> None:
        self._pin.expires_at = self._store.clock() + self._duration
        self._store.objects.put(self._path, msgspec.json.encode(self._pin))

    def _renew(self) -> None:
        while not self._ended.wait(self._duration.total_seconds() / 4):
            try:
                self._write()
            except TrajlakeError:
                continue
