"""Write attempts: what one consists of, which may be accepted, and how they are.

A write attempt is complete when all of its data files are written and none is committed. Attempts that come together
are committed together, one commit a table: children first, unconditionally, then `episodes` as a compare-and-swap on a
version at which none of their episodes existed. `EpisodeWriter` brings its own, one at a time; the committer of a
machine those of many processes (`lake.write.fleet`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from lake.records import Index, Int64
from lake.storage.commits import CommitLostError, revoked, until_committed
from lake.storage.data_files import Staged
from lake.storage.store import SOON, Store
from lake.write.index import EpisodeIndex, Known, Newest, Slot

CHILDREN = ("blobs", "spans", "tokens", "steps", "retractions")
"""Tables in the order of their commits; `episodes` comes after them."""


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """An episode that an attempt brings: its columns in the index of a writer, without the write_id."""

    episode_id: Int64
    content_hash: Int64
    group_id: Int64
    rollout_index: Index
    agent_id: str | None
    attempt: Index

    @property
    def slot(self) -> Slot:
        """What a retry shares with its predecessor."""
        return self.group_id, self.rollout_index, self.agent_id


@dataclass(slots=True)
class Attempt:
    """A batch of episodes under one write_id, in files that no commit names yet."""

    write_id: int
    claims: list[Claim]
    superseded: dict[int, int]
    """Predecessor -> successor, as its file of `retractions` says."""
    children: dict[str, Staged]
    episodes: Staged

    @property
    def staged(self) -> dict[str, Staged]:
        """Table -> its file, in the order of the commits."""
        return self.children | {"episodes": self.episodes}


def superseded(newest: Mapping[Slot, Newest], claims: Iterable[Claim]) -> dict[int, int]:
    """Episodes that retries among some replace, or that retries already there replace -> their successors."""
    best = {slot: (last.attempt, last.episode_id) for slot, last in newest.items()}
    replaced: dict[int, int] = {}
    for claim in sorted(claims, key=lambda claim: claim.attempt):
        attempt, other = best.get(claim.slot, (-1, 0))
        if attempt > claim.attempt:
            replaced[claim.episode_id] = other
        else:
            if attempt >= 0:
                replaced[other] = claim.episode_id
            best[claim.slot] = (claim.attempt, claim.episode_id)
    return replaced


def acceptable(attempts: Iterable[Attempt], known: Known, revoked: Collection[int]) -> list[Attempt]:
    """Those that may be accepted together on top of what is known: first come, first served.

    None that brings an episode that is there, was forgotten, or comes with one before it; that was revoked; or whose
    retractions are no longer those that its retries call for.
    """
    found: list[Attempt] = []
    taken, slots = set(known.contents), set[Slot]()
    for attempt in attempts:
        episodes, own = ({claim.episode_id for claim in attempt.claims}, {claim.slot for claim in attempt.claims})
        is_new = episodes.isdisjoint(taken) and episodes.isdisjoint(known.forgotten) and own.isdisjoint(slots)
        newest = {slot: known.newest[slot] for slot in own if slot in known.newest}
        is_new = is_new and attempt.write_id not in revoked
        if is_new and superseded(newest, attempt.claims) == attempt.superseded:
            found.append(attempt)
            taken |= episodes
            slots |= own
    return found


def are_there(files: Iterable[Staged], now: datetime) -> bool:
    """Whether files can be relied on: vacuum may have taken one that only another process, its writer, can replace."""
    return all(timedelta(0) <= now - staged.written.at < SOON / 2 for staged in files if staged.rows is None)


class Ledger:
    """The episodes of a lake as one process knows them, and the way to add to them. Not thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = EpisodeIndex(store)
        self.lost = 0
        """How often another process was quicker."""

    def look(self, episode_ids: Iterable[int], group_ids: Iterable[int]) -> Known:
        """What the lake holds now of some episodes, and of the attempts in some groups."""
        self._index.refresh()
        return self.remembered(episode_ids, group_ids)

    def remembered(self, episode_ids: Iterable[int], group_ids: Iterable[int]) -> Known:
        """As `look`, at the last look."""
        return self._index.known(episode_ids, group_ids)

    def index(self) -> EpisodeIndex:
        """What the lake holds now, as it stays known whatever comes."""
        self._index.refresh()
        return self._index.frozen()

    def accept(self, attempts: Sequence[Attempt], checked: int | None = None, *, losses: int | None = None) -> set[int]:
        """Commit write attempts, each as a whole or not at all.

        Args:
            attempts: in the order in which they came.
            checked: version at which all of them were acceptable; looked up unless given.
            losses: how many lost races are one too many: then all are abandoned. Without a limit unless given.

        Returns:
            The write_ids that were accepted; the others are abandoned, for good, and what they bring has to be looked
            at again.
        """
        now = self._store.clock()
        waiting = [attempt for attempt in attempts if are_there(attempt.staged.values(), now)]
        version = -1 if checked is None else checked
        if checked is None:
            known = self._look_for(waiting)
            waiting, version = acceptable(waiting, known, ()), known.version
        for name in CHILDREN:
            if staged := [attempt.children[name] for attempt in waiting if name in attempt.children]:
                self._store.append_staged(name, staged)

        most = None if losses is None else self.lost + losses

        def commit() -> None:
            nonlocal waiting, version
            if not waiting:
                return
            try:
                self._store.append_episodes([attempt.episodes for attempt in waiting], version)
            except CommitLostError:
                self.lost += 1
                lost, known = version, self._look_for(waiting)
                if self._store.holds("episodes", waiting[0].write_id, lost):
                    return
                version = known.version
                # Long after their writer stopped, children are dropped as dead; their attempt is revoked before.
                waiting = acceptable(waiting, known, revoked(self._store.objects)) if self.lost != most else []
                if waiting:
                    raise

        until_committed(commit)
        self._remember(waiting)
        return {attempt.write_id for attempt in waiting}

    def _look_for(self, attempts: Sequence[Attempt]) -> Known:
        claims = [claim for attempt in attempts for claim in attempt.claims]
        return self.look((claim.episode_id for claim in claims), (claim.group_id for claim in claims))

    def _remember(self, attempts: Sequence[Attempt]) -> None:
        objects = self._store.objects
        paths = [objects.uri(f"episodes/{attempt.episodes.written.add.path}") for attempt in attempts]
        rows = [(*msgspec.structs.astuple(claim), one.write_id) for one in attempts for claim in one.claims]
        if rows:
            self._index.take(paths, rows)


class Deferred:
    """Stands in for a `Ledger` in a process that makes attempts for another one to decide about: nothing is committed.

    Args:
        index: what the lake held when somebody looked. Whoever decides looks again.
    """

    lost = 0

    def __init__(self, index: EpisodeIndex) -> None:
        self._index = index
        self.attempts: list[Attempt] = []
        """Those that were made."""

    def index(self) -> EpisodeIndex:
        """What it goes by."""
        return self._index

    def look(self, episode_ids: Iterable[int], group_ids: Iterable[int]) -> Known:
        """As `Ledger.look`, at that time."""
        return self._index.known(episode_ids, group_ids)

    remembered = look

    def accept(self, attempts: Sequence[Attempt], checked: int | None = None, *, losses: int | None = None) -> set[int]:
        """Keep attempts for later."""
        del checked, losses  # whoever decides has its own
        self.attempts += attempts
        return {attempt.write_id for attempt in attempts}
