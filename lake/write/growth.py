"""Which episode a document is, if its format has one episode, or few, in a whole file.

Such a document grows: a session is read again and again, longer each time. A reading replaces an earlier one with the
same key only if it extends it: the earlier decisions are its first ones, action for action.

* As many decisions: the later end counts. With the same end, a reading counts unless it was taken before.
* Fewer decisions: an earlier state. It changes nothing.
* Different decisions: another rollout that shares the key, a sibling. It gets the first free rollout index of
  `derive_sibling_index`, so every process recognises it, in any order of reading.

The first record of a document decides for those that came out of it, such as sub-agents and forks. They follow it to
its rollout index, with the ids of their parents. A session that went back holds its abandoned turns as forks, so it
extends every reading with which one of its paths begins.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from itertools import count
from pathlib import PurePath
from typing import NamedTuple, TypeVar

import msgspec

from lake import ids
from lake.records import EpisodeRecord, Identity, StepRecord, derive_sibling_index, identify, make_episode_id
from lake.write.ledger import LatestAttempt, Slot

Decision = tuple[str, str | None]
"""Action and tool calls of a step."""
Key = TypeVar("Key")


class Placement(Enum):
    """How a reading relates to those before it."""

    NEW = auto()
    SAME = auto()
    FURTHER = auto()
    """It replaces the reading that it extends."""
    EARLIER = auto()
    SHORTER = auto()
    """An earlier state that was never read."""
    SIBLING = auto()
    """Another rollout with the same key."""


WRITTEN = (Placement.NEW, Placement.FURTHER, Placement.SIBLING)
"""Placements of records that are not in the lake."""


class Extent(NamedTuple):
    """How far a reading is."""

    paths: list[list[Decision]]
    """The decisions of the rollout, then those of its forks, each from the beginning."""
    ended_at: datetime
    source: str


def make_extent(paths: list[list[Decision]], ended_at: datetime | None, source: str | None) -> Extent:
    """Build an extent; a time without a zone is in UTC, as it is stored, and an unknown one precedes all others."""
    at = datetime.min if ended_at is None else ended_at
    return Extent(paths, at if at.tzinfo else at.replace(tzinfo=UTC), source or "")


def list_paths(
    rollout: Key, decisions: Callable[[Key], Sequence[Decision]], forks: Callable[[Key], Iterable[tuple[Key, int]]]
) -> list[list[Decision]]:
    """Return the decisions of a rollout, then those of its forks, each from the beginning.

    Args:
        rollout: what the functions take.
        decisions: returns the decisions of a rollout, or of a fork after its beginning.
        forks: returns forks with the steps after which they begin.
    """
    paths: list[list[Decision]] = []
    waiting: list[tuple[Key, list[Decision]]] = [(rollout, [])]
    while waiting:
        key, start = waiting.pop()
        paths.append([*start, *decisions(key)])
        waiting += [(fork, paths[-1][: len(start) + step + 1]) for fork, step in forks(key)]
    return paths


def is_extension(path: Sequence[Decision], earlier: Sequence[Decision], *, is_same_file: bool = False) -> bool:
    """Return whether a path begins with earlier decisions.

    In the same file, the last of them may have been incomplete: tools write the parts of an answer one after another.
    """
    if not earlier or list(path[: len(earlier)]) == earlier:
        return True
    if len(path) < len(earlier) or not is_same_file or list(path[: len(earlier) - 1]) != earlier[:-1]:
        return False
    (action, calls), (earlier_action, earlier_calls) = path[len(earlier) - 1], earlier[-1]
    first_calls = msgspec.json.decode(earlier_calls or "[]")
    all_calls = msgspec.json.decode(calls or "[]")
    return action.startswith(earlier_action) and all_calls[: len(first_calls)] == first_calls


def names_same_file(name: str, other: str) -> bool:
    """Return whether two names may be of one file: a name depends on the folder that an ingest was given."""
    parts, other_parts = sorted((PurePath(name).parts, PurePath(other).parts), key=len)
    return bool(parts) and other_parts[-len(parts) :] == parts


@dataclass(slots=True)
class Reading:
    """The current reading of a rollout."""

    number: int
    """Its number among the siblings with its key."""
    attempt: int
    episode_id: int
    content_hash: int
    extent: Extent | None = None
    """None until it is needed."""
    record: "_KeyedRecord | None" = None
    """Its record, if it is not in the lake."""


class _KeyedRecord(NamedTuple):
    """A record with the id that its reader gave it."""

    record: EpisodeRecord
    key: str


class _Head(NamedTuple):
    """A record for those of its document that name it as their parent."""

    placement: Placement
    number: int
    episode_id: str


class Placer:
    """Places the documents of a batch among the readings of a lake and among each other.

    Args:
        newest: the last attempts of the lake in the groups of the batch.
        forgotten: the erased episodes.
        measure: sets the extents of readings that are in the lake.
        look_up_contents: returns the stored contents of episodes; None for one that the lake does not hold.
        list_decisions: returns the decisions of steps, as `measure` does.
    """

    def __init__(
        self,
        newest: Mapping[Slot, LatestAttempt],
        forgotten: AbstractSet[int],
        measure: Callable[[Sequence[Reading]], None],
        look_up_contents: Callable[[Sequence[int]], Sequence[int | None]],
        list_decisions: Callable[[Sequence[StepRecord]], list[Decision]],
    ) -> None:
        self._newest = newest
        self._forgotten = forgotten
        self._measure_stored = measure
        self._look_up_contents = look_up_contents
        self._list_decisions = list_decisions
        self._readings: dict[Slot, Reading] = {}
        self._heads: dict[tuple[str | None, str | None], _Head] = {}
        self._forks: dict[tuple[str | None, str], list[tuple[_KeyedRecord, int]]] = {}

    def add_forks(self, records: Iterable[EpisodeRecord]) -> None:
        """Remember the forks of a batch, before its first record is placed."""
        for record in records:
            parent, step = record.parent_episode_id, record.parent_step_index
            if record.relation == "fork" and parent is not None and step is not None:
                fork = _KeyedRecord(record, ids.to_text(make_episode_id(record, record.run_id or "")))
                self._forks.setdefault((record.source_uri, parent), []).append((fork, step))

    def place(self, record: EpisodeRecord, identity: Identity) -> tuple[Placement, Identity]:
        """Place a record, and set its rollout index, its attempt and the ids of its parents.

        Args:
            identity: the record's identity, as its reader gave it.

        Returns:
            The placement and the record's new identity. A record to be written is a reading from now on.
        """
        file, keyed = record.source_uri, _KeyedRecord(record, ids.to_text(identity.episode_id))
        head = self._heads.get((file, record.parent_episode_id))
        document = _Document(record, identity, self._look_up_contents)
        if head is None:
            placement, number, attempt = self._place_head(document, keyed)
        else:
            top = self._heads.get((file, record.root_episode_id), head)
            record.parent_episode_id = head.episode_id
            record.root_episode_id = record.root_episode_id and top.episode_id
            document.has_changed |= head.number > 0
            number = head.number
            placement, attempt = self._place_derived(document, keyed, head)
        first_id = ids.to_text(document.identify_as(number, document.first_attempt).episode_id) if number else keyed.key
        self._heads[file, keyed.key] = _Head(placement, number, first_id)
        placed = document.identify_as(number, attempt)
        if placement in WRITTEN and placed.episode_id not in self._forgotten:
            slot = placed.group_id, record.rollout_index, record.agent_id
            self._readings[slot] = Reading(number, attempt, placed.episode_id, placed.content_hash, record=keyed)
        return placement, placed

    def _place_head(self, document: "_Document", keyed: _KeyedRecord) -> tuple[Placement, int, int]:
        """Return the placement, sibling number and attempt of a record that came out of no other."""
        family, free = self._list_family(document)
        first = document.first_attempt
        if not family:
            return Placement.NEW, free, first
        if family[0].number == 0 and first > family[0].attempt:
            return Placement.FURTHER, 0, first  # its source names it as a retry
        if document.is_in(family[0]):
            return Placement.SAME, family[0].number, family[0].attempt
        self._measure(family)
        mine = self._make_extent(keyed)
        extended = [(reading, extent) for reading in family if (extent := reading.extent) and _extends(mine, extent)]
        if extended:
            equal = [reading for reading, extent in extended if extent.paths[0] == mine.paths[0]]
            if (same := next(filter(document.is_in, equal), None)) is not None:
                return Placement.SAME, same.number, same.attempt
            reading, extent = max(extended, key=lambda pair: len(pair[1].paths[0]))
            is_further = not equal or mine.ended_at > extent.ended_at
            if not is_further and mine.ended_at == extent.ended_at:
                is_further = not document.was_in(reading)
            return (Placement.FURTHER if is_further else Placement.EARLIER), reading.number, reading.attempt + is_further
        for reading in family:
            if reading.extent and any(is_extension(path, mine.paths[0]) for path in reading.extent.paths):
                placement = Placement.EARLIER if document.was_in(reading) else Placement.SHORTER
                return placement, reading.number, reading.attempt
        return Placement.SIBLING, free, first

    def _place_derived(self, document: "_Document", keyed: _KeyedRecord, head: _Head) -> tuple[Placement, int]:
        """Return the placement and attempt of a record that came out of another of its document."""
        reading = self._get_reading(document.get_slot(head.number), head.number)
        if reading is None:
            return Placement.NEW, document.first_attempt
        if document.first_attempt > reading.attempt:
            return Placement.FURTHER, document.first_attempt
        if document.is_in(reading):
            return Placement.SAME, reading.attempt
        if head.placement in (Placement.EARLIER, Placement.SHORTER):
            return Placement.EARLIER, reading.attempt
        if head.placement is Placement.SAME:
            self._measure([reading])
            mine, extent = self._make_extent(keyed), reading.extent
            depths = [(len(e.paths[0]), e.ended_at) for e in (mine, extent) if e is not None]
            if depths[0] < depths[-1] or (depths[0] == depths[-1] and document.was_in(reading)):
                return Placement.EARLIER, reading.attempt
        return Placement.FURTHER, reading.attempt + 1

    def _list_family(self, document: "_Document") -> tuple[list[Reading], int]:
        """Return the readings that share a record's key, and the number that a further sibling gets.

        If one of them was erased, that is its number: the record may be the erased one, which must not come back.
        """
        family: list[Reading] = []
        erased: int | None = None
        for number in count():
            slot = document.get_slot(number)
            if (reading := self._get_reading(slot, number)) is not None:
                family.append(reading)
            elif self._forgotten and document.make_first_id(number) in self._forgotten:
                erased = number if erased is None else erased
            else:
                return family, number if erased is None else erased
        raise AssertionError  # count() is endless

    def _get_reading(self, slot: Slot, number: int) -> Reading | None:
        reading = self._readings.get(slot)
        if reading is None and (last := self._newest.get(slot)) is not None:
            reading = self._readings[slot] = Reading(number, last.attempt, last.episode_id, last.content_hash)
        return reading

    def _measure(self, readings: Iterable[Reading]) -> None:
        """Set the extents of readings."""
        unmeasured = [reading for reading in readings if reading.extent is None]
        for reading in unmeasured:
            if reading.record is not None:
                reading.extent = self._make_extent(reading.record)
        if stored := [reading for reading in unmeasured if reading.record is None]:
            self._measure_stored(stored)

    def _make_extent(self, keyed: _KeyedRecord) -> Extent:
        paths = list_paths(
            keyed,
            lambda rollout: self._list_decisions(rollout.record.steps),
            lambda rollout: self._forks.get((rollout.record.source_uri, rollout.key), ()),
        )
        return make_extent(paths, keyed.record.ended_at, keyed.record.source_uri)


class _Document:
    """A record under the rollout indices and attempts that it may get."""

    def __init__(
        self,
        record: EpisodeRecord,
        identity: Identity,
        look_up_contents: Callable[[Sequence[int]], Sequence[int | None]],
    ) -> None:
        self.first_attempt = record.attempt
        self.has_changed = False
        """Whether the identity is no longer that of the record, because the ids of its parents differ."""
        self._first_index = record.rollout_index
        self._record = record
        self._identity = identity
        self._look_up_contents = look_up_contents

    def identify_as(self, number: int, attempt: int) -> Identity:
        """Give the record a sibling number and an attempt, and return its identity."""
        self._record.rollout_index = derive_sibling_index(self._first_index, number)
        self._record.attempt = attempt
        if number == 0 and attempt == self.first_attempt and not self.has_changed:
            return self._identity
        return identify(self._record, self._record.run_id or "")

    def get_slot(self, number: int) -> Slot:
        """Return the slot of a sibling number."""
        return self._identity.group_id, derive_sibling_index(self._first_index, number), self._record.agent_id

    def make_first_id(self, number: int) -> int:
        """Return the id of the first attempt of a sibling number."""
        self._record.rollout_index = derive_sibling_index(self._first_index, number)
        self._record.attempt = self.first_attempt
        return make_episode_id(self._record, self._record.run_id or "")

    def is_in(self, reading: Reading) -> bool:
        """Return whether the record is a reading, word for word."""
        return self.identify_as(reading.number, reading.attempt).content_hash == reading.content_hash

    def was_in(self, reading: Reading) -> bool:
        """Return whether the record is one that a reading replaced."""
        earlier = [self.identify_as(reading.number, attempt) for attempt in range(self.first_attempt, reading.attempt)]
        stored = self._look_up_contents([identity.episode_id for identity in earlier])
        return any(identity.content_hash == content for identity, content in zip(earlier, stored, strict=True))


def _extends(mine: Extent, earlier: Extent) -> bool:
    """Return whether a path of a document begins with the decisions of an earlier reading."""
    is_same_file = names_same_file(mine.source, earlier.source)
    return any(is_extension(path, earlier.paths[0], is_same_file=is_same_file) for path in mine.paths)
