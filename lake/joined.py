"""Several lakes as one: read together, written into the first.

A team's runs stay in lakes of their own, each with a log of its own, and are queried, credited and trained on together.
Jobs that read all of them write what they find into the first; `lake.read.joined_snapshot` says what is seen.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime, timedelta

import msgspec

from lake import ids
from lake.care.pins import LEASE, Pin
from lake.errors import TrajlakeError, UsageError
from lake.lake import Lake
from lake.read.joined_snapshot import JoinedSnapshot
from lake.read.snapshot import Snapshot
from lake.read.versions import joined_versions, other_roots, own_versions


class JoinedLake(Lake):
    """Lakes that are read as one. Whatever writes, writes into the first; see `lake.opening.open`.

    Raises:
        UsageError: a lake is named twice, or they cannot be read together (`lake.storage.joined_objects`).
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
        """The lakes, in the order in which they were named."""
        return self._members

    def home(self, episode_id: int) -> Lake:
        """See `Lake.home`: of lakes that hold copies of it the first."""
        shown = "SELECT 1 FROM episodes WHERE episode_id = ?"
        for member in self.members:
            if member.sql(shown, [episode_id]).height:
                return member
        uris = ", ".join(member.uri for member in self.members)
        raise UsageError(f"none of {uris} shows episode {ids.to_text(episode_id)} now; nothing was written")

    def __repr__(self) -> str:
        return f"Lake({[member.uri for member in self.members]!r})"

    def snapshot(self) -> JoinedSnapshot:
        """All tables of all lakes at their newest versions, those of each lake consistently."""
        return JoinedSnapshot([member.snapshot() for member in self.members])

    def at(self, when: Mapping[str, int] | str | datetime | int) -> JoinedSnapshot:
        """All lakes as they were: at versions of a joined snapshot, under a name that each has, or at a moment.

        Raises:
            UsageError: a version of `episodes`, which only one lake can have; a name or a moment that a lake does not
                know; versions of other lakes than these.
        """
        if isinstance(when, int):
            raise UsageError(
                f"{when} is a version of one lake, and {len(self.members)} are open; name a time or a snapshot"
            )
        if not isinstance(when, Mapping):
            return JoinedSnapshot([member.at(when) for member in self.members])
        have, wanted = [member.uri for member in self.members[1:]], other_roots(when)
        if set(have) != set(wanted):
            raise UsageError(
                f"the snapshot is of {', '.join([self.uri, *wanted])}, and open are {', '.join([self.uri, *have])}; "
                "open exactly the lakes of the snapshot, the first of them first"
            )
        return JoinedSnapshot([m.at(own_versions(when, None if m is self.members[0] else m.uri)) for m in self.members])

    def name_snapshot(self, name: str, snapshot: Snapshot | None = None) -> Pin:
        """Keep a snapshot of all lakes readable: each lake has one of that name."""
        pins: list[Pin] = []
        try:
            for member, part in self._parts(snapshot or self.snapshot()):
                pins.append(member.name_snapshot(name, part))
        except TrajlakeError:
            for member, _ in zip(self.members, pins, strict=False):
                member.drop_snapshot(name)
            raise
        return msgspec.structs.replace(pins[0], versions=self._joined(pins))

    def snapshots(self) -> list[Pin]:
        """The named snapshots that every lake has, oldest first."""
        first, *others = ({pin.name: pin for pin in member.snapshots()} for member in self.members)
        return [
            msgspec.structs.replace(pin, versions=self._joined([pin, *(names[name] for names in others)]))
            for name, pin in first.items()
            if all(name in names for names in others)
        ]

    def drop_snapshot(self, name: str) -> None:
        """Take a snapshot's name back in every lake."""
        for member in self.members:
            member.drop_snapshot(name)

    def lease(
        self, snapshot: Snapshot, holder: str, duration: timedelta = LEASE, *, job_id: int | None = None
    ) -> AbstractContextManager[object]:
        """See `Lake.lease`: a lease in each of the lakes."""
        leases = [member.lease(part, holder, duration, job_id=job_id) for member, part in self._parts(snapshot)]

        @contextmanager
        def all_of_them() -> Iterator[None]:
            with ExitStack() as stack:
                for lease in leases:
                    stack.enter_context(lease)
                yield

        return all_of_them()

    def missing(self, versions: Mapping[str, int]) -> str | None:
        """See `Lake.missing`."""
        parts = ((m, own_versions(versions, None if m is self.members[0] else m.uri)) for m in self.members)
        return next((text for member, own in parts if (text := member.missing(own)) is not None), None)

    def _joined(self, pins: Sequence[Pin]) -> dict[str, int]:
        return joined_versions([(m.uri, pin.versions) for m, pin in zip(self.members, pins, strict=True)])

    def _parts(self, snapshot: Snapshot) -> list[tuple[Lake, Snapshot]]:
        """The lakes, each with its own part of a snapshot of all of them."""
        if not isinstance(snapshot, JoinedSnapshot):
            raise UsageError(f"the snapshot is of {snapshot.root} alone; take one with all lakes open")
        return list(zip(self.members, snapshot.members, strict=True))
