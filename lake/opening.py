"""Open a lake, create one, or open several as one.

Several lakes are read together and written into the first (`JoinedLake`). A team's runs stay in separate lakes, each
with its log, and are queried, credited and trained on together. Jobs that read all lakes write their results into the
first; `lake.read.joined_snapshot` defines the visible rows.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lake import ids
from lake.care import maintenance
from lake.care.pins import LEASE, Pin
from lake.errors import LakeAccessError, NotALakeError, TrajlakeError, UsageError
from lake.lake import Lake
from lake.read.snapshot import Snapshot, join_versions, list_other_roots, select_versions
from lake.storage.commits import utc_now
from lake.storage.objects import LAKE_FOLDER, RESERVED, Objects
from lake.storage.store import Store, describe_missing_table
from lake.tables import TABLES

if TYPE_CHECKING:
    from lake.read.joined_snapshot import JoinedSnapshot

GROUP_COMMIT = "TRAJLAKE_GROUP_COMMIT"


def open(  # noqa: A001 - `lake.open` is the name people guess
    uri: str | Path | Sequence[str | Path],
    *,
    create: bool = False,
    storage_options: Mapping[str, str] | None = None,
    clock: Callable[[], datetime] = utc_now,
    compact_above: int = maintenance.FEW_FILES,
    group_commit: bool | None = None,
) -> Lake:
    """Open a lake, or several as one.

    Args:
        uri: folder, or s3://bucket/prefix, gs://..., az://...; several are read as one lake, and jobs write into the
            first.
        create: whether to create a lake if the folder is missing or empty.
        storage_options: options of the object store, with the names of delta-rs and Polars; missing ones come from the
            environment (AWS_*, GOOGLE_*, AZURE_*). They are never stored.
        clock: returns the time with a timezone.
        compact_above: number of small files in a table above which a job merges them; 0 never merges.
        group_commit: whether writers of this machine that lose races let one process commit for all of them
            (`lake.write.group_commit`); default: TRAJLAKE_GROUP_COMMIT (on, off), or else on.

    Raises:
        NotALakeError: the folder is missing, or is not a lake.
        LakeVersionError: the lake has a newer format.
        LakeAccessError: no permission, damaged tables, or no network.
        UsageError: an unsupported URI scheme, an invalid path, or lakes that cannot be read together.
    """
    if not isinstance(uri, str | Path):
        options = {"storage_options": storage_options, "clock": clock, "compact_above": compact_above}
        return _open_several(uri, create=create, group_commit=group_commit, **options)
    objects = Objects(uri, storage_options)
    store = Store(objects, clock)
    if not store.exists():
        require_room(objects, create=create)
        if objects.folder is not None:
            try:
                objects.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror or error
                msg = f"{objects.folder}: {reason}; choose another --lake or change the folder's permissions"
                raise LakeAccessError(msg) from error
        names = objects.names()
        has_own = LAKE_FOLDER in names and any(entry.path != RESERVED for entry in objects.list(LAKE_FOLDER))
        was_written = has_own or any(store.files(name)[1] for name in TABLES if name in names)
        if was_written and not store.exists():
            # The lake is neither half created nor new: without `episodes` all of its rows would be dead.
            raise LakeAccessError(describe_missing_table(objects.root, "episodes"))
        store.create()
    store.check_format()
    if group_commit is None:
        setting = os.environ.get(GROUP_COMMIT, "on")
        if setting not in ("on", "off"):
            raise UsageError(f"{GROUP_COMMIT} is {setting!r}; valid: on, off")
        group_commit = setting == "on"
    # A committer uses the clock of its machine, and POSIX sockets and locks.
    group_commit = group_commit and clock is utc_now and os.name == "posix"
    return Lake(store, compact_above=compact_above, commits_in_groups=group_commit)


def _open_several(uris: Sequence[str | Path], *, create: bool, **options: Any) -> Lake:
    """Open several lakes as one; a single one as itself. Only the first one may be created."""
    if not isinstance(uris, Sequence) or not all(isinstance(uri, str | Path) for uri in uris):
        msg = f"{uris!r} is not an address of a lake; give a text or a path, or a list of them, the first to write to"
        raise UsageError(msg)
    if not uris:
        raise UsageError("no lake is named; give one or more")
    pass

    first, *further = (open(uri, create=create and not number, **options) for number, uri in enumerate(uris))
    return JoinedLake([first, *further]) if further else first


def require_room(objects: Objects, *, create: bool) -> None:
    """Raise NotALakeError unless a lake can be created at an address."""
    commands = "`trajlake ingest FILE --lake URI` or `trajlake demo --lake URI` makes one"
    advice = f"{commands}, and so does lake.open(URI, create=True)"
    path = objects.folder
    if path is not None and path.exists() and not path.is_dir():
        raise NotALakeError(f"{path} is a file, and a lake is a folder; {advice}")
    if create:
        # Another process may be creating the lake, or an older package was killed while it created all tables.
        if not objects.names() <= TABLES.keys() | {LAKE_FOLDER}:
            raise NotALakeError(f"{objects.root} is not a lake and not empty; name a new or an empty folder")
    elif path is not None and not path.exists():
        raise NotALakeError(f"{path} does not exist; {advice}")
    else:
        raise NotALakeError(f"{objects.root} is not a lake: it holds no `episodes` table; {advice}")


class JoinedLake(Lake):
    """Lakes that are read as one. All writes go to the first lake; see `open`.

    Raises:
        UsageError: a lake is named twice, or they cannot be read together (`lake.storage.objects`).
    """

    def __init__(self, members: Sequence[Lake]) -> None:
        first = members[0]
        groups = first._commits_in_groups
        super().__init__(first._store, compact_above=first._compact_above, commits_in_groups=groups)
        self._members = tuple(members)
        uris = [member.uri for member in members]
        if twice := {uri for uri in uris if uris.count(uri) > 1}:
            raise UsageError(f"{', '.join(sorted(twice))} is named twice; name each lake once")

    @property
    def members(self) -> tuple[Lake, ...]:
        """The lakes, in the order of their addresses."""
        return self._members

    def home(self, episode_id: int) -> Lake:
        """Return the first lake that shows an episode; see `Lake.home`."""
        query = "SELECT 1 FROM episodes WHERE episode_id = ?"
        for member in self.members:
            if member.sql(query, [episode_id]).height:
                return member
        uris = ", ".join(member.uri for member in self.members)
        raise UsageError(f"none of {uris} shows episode {ids.to_text(episode_id)} now; nothing was written")

    def __repr__(self) -> str:
        return f"Lake({[member.uri for member in self.members]!r})"

    def snapshot(self) -> "JoinedSnapshot":
        """Return all tables of all lakes at their newest versions, consistent within each lake."""
        return join_snapshots([member.snapshot() for member in self.members])

    def at(self, when: Mapping[str, int] | str | datetime | int) -> "JoinedSnapshot":
        """Return all lakes in an earlier state, by versions of a joined snapshot, a common name, or a time.

        Raises:
            UsageError: a version of `episodes`, which applies to one lake only; a name or a time that a lake does not
                have; versions of other lakes than these.
        """
        if isinstance(when, int):
            raise UsageError(
                f"{when} is a version of one lake, and {len(self.members)} are open; name a time or a snapshot"
            )
        if not isinstance(when, Mapping):
            return join_snapshots([member.at(when) for member in self.members])
        open_uris, snapshot_uris = [member.uri for member in self.members[1:]], list_other_roots(when)
        if set(open_uris) != set(snapshot_uris):
            raise UsageError(
                f"the snapshot is of {', '.join([self.uri, *snapshot_uris])}, "
                f"and open are {', '.join([self.uri, *open_uris])}; "
                "open exactly the lakes of the snapshot, the first of them first"
            )
        return join_snapshots(
            [m.at(select_versions(when, None if m is self.members[0] else m.uri)) for m in self.members]
        )

    def name_snapshot(self, name: str, snapshot: Snapshot | None = None) -> Pin:
        """Keep a snapshot of all lakes readable, under the same name in each lake."""
        pins: list[Pin] = []
        try:
            for member, part in self._split(snapshot or self.snapshot()):
                pins.append(member.name_snapshot(name, part))
        except TrajlakeError:
            for member, _ in zip(self.members, pins, strict=False):
                member.drop_snapshot(name)
            raise
        return msgspec.structs.replace(pins[0], versions=self._join_versions(pins))

    def snapshots(self) -> list[Pin]:
        """Return the named snapshots that every lake has, oldest first."""
        first, *further = ({pin.name: pin for pin in member.snapshots()} for member in self.members)
        return [
            msgspec.structs.replace(pin, versions=self._join_versions([pin, *(names[name] for names in further)]))
            for name, pin in first.items()
            if all(name in names for names in further)
        ]

    def drop_snapshot(self, name: str) -> None:
        """Drop a snapshot's name in every lake."""
        for member in self.members:
            member.drop_snapshot(name)

    def lease(
        self, snapshot: Snapshot, holder: str, duration: timedelta = LEASE, *, job_id: int | None = None
    ) -> AbstractContextManager[object]:
        """Return a context with a lease in each of the lakes; see `Lake.lease`."""
        leases = [member.lease(part, holder, duration, job_id=job_id) for member, part in self._split(snapshot)]

        @contextmanager
        def hold_all() -> Iterator[None]:
            with ExitStack() as stack:
                for lease in leases:
                    stack.enter_context(lease)
                yield

        return hold_all()

    def missing(self, versions: Mapping[str, int]) -> str | None:
        """See `Lake.missing`."""
        member_versions = (
            (m, select_versions(versions, None if m is self.members[0] else m.uri)) for m in self.members
        )
        return next(
            (text for member, versions in member_versions if (text := member.missing(versions)) is not None), None
        )

    def _join_versions(self, pins: Sequence[Pin]) -> dict[str, int]:
        return join_versions([(m.uri, pin.versions) for m, pin in zip(self.members, pins, strict=True)])

    def _split(self, snapshot: Snapshot) -> list[tuple[Lake, Snapshot]]:
        """Return each lake with its part of a snapshot of all lakes."""
        from lake.read.joined_snapshot import JoinedSnapshot

        if not isinstance(snapshot, JoinedSnapshot):
            raise UsageError(f"the snapshot is of {snapshot.root} alone; take one with all lakes open")
        return list(zip(self.members, snapshot.members, strict=True))


def join_snapshots(members: Sequence[Snapshot]) -> "JoinedSnapshot":
    """Return snapshots of several lakes as one. Polars loads here, so that a command on one lake starts without it."""
    from lake.read.joined_snapshot import JoinedSnapshot

    return JoinedSnapshot(members)
