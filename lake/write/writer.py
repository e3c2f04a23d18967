"""Recording facts exactly once: the write path of episodes and all that belongs to them.

1. Every batch attempt draws a fresh random write_id, stored in every row it writes. The children (blobs, spans,
   tokens, steps, retractions of the predecessors that retries replace) commit first, unconditionally.
2. `episodes` commits last, as a compare-and-swap on a version at which none of the batch's episode_ids exists. On a
   conflict: refresh, check again, retry. If that no longer holds, this write_id is abandoned (its children are dead)
   and the remainder is written under a new one.
3. Readers see a child row only if its write_id stands in `episodes`.

So a kill at any instruction leaves either all of a batch or nothing visible, and a replay of the same records, in any
batching, beside any number of writers, adds nothing twice.

A session that goes on is read again and again, each time longer. A reading replaces the one that counts if it has more
steps, or as many and ended later; of as many that ended at the same time, if it was not taken before. Any other is an
earlier state of what is there: it changes nothing.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.read.parquet import collected, scan
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, Identity, identify
from lake.storage.commits import CommitLostError, revoked, until_committed
from lake.storage.store import Store
from lake.tables import EPISODES, RETRACTIONS, TABLES
from lake.tables.contracts import conform
from lake.write.index import EpisodeIndex
from lake.write.rows import blobs_frame, episodes_frame, moved_out, spans_frame, steps_frame, tokens_frame

if TYPE_CHECKING:
    from lake.write.jobs import Job

_Slot = tuple[int, int, str | None]
"""group_id, rollout_index and agent_id: what a retry shares with its predecessor."""
_Extent = tuple[int, datetime]
"""How far a session is: its steps and its end; the longer one is the greater."""


@dataclass(slots=True)
class Outcome:
    """What became of a batch of records."""

    new: int = 0
    new_steps: int = 0
    present: int = 0
    replaced: int = 0
    """New ones that replace an earlier reading of themselves."""
    conflicts: list[int] = field(default_factory=list)
    """Positions in the batch of records whose key is present with other content."""
    forgotten: list[int] = field(default_factory=list)
    """Positions of records whose episode was erased."""
    write_ids: list[int] = field(default_factory=list)


class EpisodeWriter:
    """Appends records to a lake's fact tables exactly once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = EpisodeIndex(store)
        # Threads of one process take turns: a lost update of the index would let a duplicate through.
        self._lock = threading.Lock()

    def write(
        self, records: Sequence[EpisodeRecord], *, job_id: int | None = None, growing: Collection[int] = ()
    ) -> Outcome:
        """Record a batch; every record needs its run_id.

        Records already present with the same content are skipped, those present with other content reported.

        Args:
            growing: places of records of sessions that go on. One that is further than what is there becomes its next
                attempt, which replaces the one before; its record's `attempt` is set. One that is not so far is
                present, and its scores, which are older too, are dropped.
        """
        identities = [identify(record, record.run_id or "") for record in records]
        first = {place: records[place].attempt for place in growing}
        with self._lock:
            while True:
                version = self._index.refresh()
                todo, outcome = self._sort_out(records, identities, first, version)
                if not todo:
                    return outcome
                batch = _Batch([records[i] for i in todo], [identities[i] for i in todo], ids.fresh_id(), job_id)
                if self._attempt(batch, version):
                    outcome.new = len(todo)
                    outcome.new_steps = sum(len(records[i].steps) for i in todo)
                    outcome.write_ids.append(batch.write_id)
                    return outcome

    def contents_of(self, episode_ids: Iterable[int]) -> dict[int, int]:
        """Content hash of those that are present, retracted ones among them."""
        with self._lock:
            self._index.refresh()
            return self._index.contents(episode_ids)

    def _attempt(self, batch: "_Batch", version: int) -> bool:
        """Write a batch under its write_id; False if that had to be abandoned."""
        superseded = self._superseded(batch)
        rows = (batch.records, batch.identities, batch.write_id)
        tables = (TABLES["episodes"], TABLES["steps"])
        episodes, steps, blobs = moved_out(episodes_frame(*rows), steps_frame(*rows), tables)
        # Predecessor -> successor.
        pairs = {"episode_id": list(superseded), "superseded_by": list(superseded.values())}
        retractions = pl.DataFrame(pairs, schema=dict.fromkeys(pairs, pl.Int64)).with_columns(
            write_id=pl.lit(batch.write_id), kind=pl.lit("superseded"), at=pl.lit(self._store.clock())
        )
        for name, frame in (
            ("blobs", blobs_frame(blobs, batch.write_id)),
            ("spans", spans_frame(*rows)),
            ("tokens", tokens_frame(*rows)),
            ("steps", steps),
            ("retractions", retractions),
        ):
            if frame.height:
                self._store.append(name, conform(frame, TABLES[name]), job_id=batch.job_id)
        staged = self._store.stage("episodes", conform(episodes, TABLES["episodes"]))
        checked = version

        def commit() -> bool:
            nonlocal checked
            try:
                self._store.append_episodes(staged, checked, job_id=batch.job_id)
            except CommitLostError:
                lost, checked = checked, self._index.refresh()
                if self._store.holds("episodes", batch.write_id, lost):
                    return True
                # Long after their writer stopped, children are dropped as dead; their write attempt is revoked before.
                is_taken = self._index.contents(batch.episode_ids) or batch.write_id in revoked(self._store.objects)
                is_forgotten = any(map(self._index.is_forgotten, batch.episode_ids))
                if is_taken or is_forgotten or self._superseded(batch) != superseded:
                    return False
                raise
            return True

        return until_committed(commit)

    def _superseded(self, batch: "_Batch") -> dict[int, int]:
        """Episodes that the batch's retries replace, or that retries already there replace -> their successors."""
        known = self._index.of_groups({identity.group_id for identity in batch.identities})
        best: dict[_Slot, tuple[int, int]] = {}
        for row in known.iter_rows(named=True):
            slot = (row["group_id"], row["rollout_index"], row["agent_id"])
            best[slot] = max(best.get(slot, (-1, 0)), (row["attempt"], row["episode_id"]))
        replaced: dict[int, int] = {}
        pairs = zip(batch.records, batch.identities, strict=True)
        for record, identity in sorted(pairs, key=lambda pair: pair[0].attempt):
            slot = _slot(record, identity)
            attempt, other = best.get(slot, (-1, 0))
            if attempt > record.attempt:
                replaced[identity.episode_id] = other
            else:
                if attempt >= 0:
                    replaced[other] = identity.episode_id
                best[slot] = (record.attempt, identity.episode_id)
        return replaced

    def _sort_out(
        self, records: Sequence[EpisodeRecord], identities: list[Identity], first: Mapping[int, int], version: int
    ) -> tuple[list[int], Outcome]:
        """Positions of the records that are new, and the others counted.

        A key's second record in the batch counts as if its first were in the lake: batching changes nothing. `first` is
        the attempt that each growing record was read as; their identities are replaced by those of the attempts that
        they are.
        """
        content = self._index.contents(identity.episode_id for identity in identities)
        sessions = self._sessions(records, identities, first) if first else {}

        def known_of(of: Collection[Identity]) -> list[int | None]:
            """The content that is known of earlier attempts."""
            there = self._index.contents(identity.episode_id for identity in of) | content
            return [there.get(identity.episode_id) for identity in of]

        def extent_of(newest: _Reading) -> _Extent:
            if newest.extent is None:
                self._measure(sessions.values(), version)
            return newest.extent or _extent(0, None)

        content |= {newest.identity.episode_id: newest.identity.content_hash for newest in sessions.values()}
        todo: list[int] = []
        outcome = Outcome()
        for position, record in enumerate(records):
            slot = _slot(record, identities[position])
            newest = sessions.get(slot) if position in first else None
            if position in first:
                found = _of_session(record, first[position], newest, extent_of, known_of)
                if found is None:
                    outcome.present += 1
                    record.scores = []
                    continue
                identities[position] = found
            identity = identities[position]
            known = content.get(identity.episode_id)
            if self._index.is_forgotten(identity.episode_id):
                outcome.forgotten.append(position)
            elif known is None:
                content[identity.episode_id] = identity.content_hash
                todo.append(position)
                if position in first:
                    outcome.replaced += newest is not None
                    sessions[slot] = _Reading(record.attempt, identity, _extent(len(record.steps), record.ended_at))
            elif known == identity.content_hash:
                outcome.present += 1
            else:
                outcome.conflicts.append(position)
        return todo, outcome

    def _sessions(
        self, records: Sequence[EpisodeRecord], identities: Sequence[Identity], places: Collection[int]
    ) -> dict[_Slot, "_Reading"]:
        """The reading that counts of each session that the lake holds."""
        wanted = {_slot(records[place], identities[place]) for place in places}
        found: dict[_Slot, _Reading] = {}
        for row in self._index.of_groups({slot[0] for slot in wanted}).sort("attempt").iter_rows(named=True):
            if (slot := (row["group_id"], row["rollout_index"], row["agent_id"])) in wanted:
                identity = Identity(row["episode_id"], row["group_id"], row["content_hash"], "")
                found[slot] = _Reading(row["attempt"], identity)
        return found

    def _measure(self, sessions: Collection["_Reading"], version: int) -> None:
        """Look up how far readings are that came from the lake."""
        unknown = {reading.identity.episode_id: reading for reading in sessions if reading.extent is None}
        paths = [entry.path for entry in self._store.files(EPISODES.name, version)[1]]
        rows = scan(paths, EPISODES, self._store.objects.polars_options).select("episode_id", "num_steps", "ended_at")
        for episode_id, steps, at in collected(rows.filter(pl.col("episode_id").is_in(list(unknown)))).iter_rows():
            unknown[episode_id].extent = _extent(steps, at)


@dataclass(slots=True)
class _Reading:
    """A session as it was read last."""

    attempt: int
    identity: Identity
    extent: _Extent | None = None
    """None if nobody has asked yet."""


def _slot(record: EpisodeRecord, identity: Identity) -> _Slot:
    return identity.group_id, record.rollout_index, record.agent_id


def _of_session(
    record: EpisodeRecord,
    first: int,
    newest: _Reading | None,
    extent_of: Callable[[_Reading], _Extent],
    known_of: Callable[[Collection[Identity]], list[int | None]],
) -> Identity | None:
    """A record as the attempt of its session that it is, or becomes; None if it is an earlier state of the session."""

    def as_attempt(attempt: int) -> Identity:
        record.attempt = attempt
        return identify(record, record.run_id or "")

    if newest is None or first > newest.attempt:
        return as_attempt(first)
    same = as_attempt(newest.attempt)
    if same.content_hash == newest.identity.content_hash:
        return same
    extent, before = _extent(len(record.steps), record.ended_at), extent_of(newest)
    is_further = extent > before
    if extent == before:
        earlier = [as_attempt(attempt) for attempt in range(first, newest.attempt)]
        hashes = (identity.content_hash for identity in earlier)
        is_further = all(known != own for known, own in zip(known_of(earlier), hashes, strict=True))
    return as_attempt(newest.attempt + 1) if is_further else None


def _extent(steps: int, ended_at: datetime | None) -> _Extent:
    """A time without a zone is in UTC, as it is stored; an unknown one is before all others."""
    if ended_at is None:
        return steps, datetime.min.replace(tzinfo=UTC)
    return steps, ended_at if ended_at.tzinfo else ended_at.replace(tzinfo=UTC)


@dataclass(slots=True)
class _Batch:
    """Records that are new, and the write attempt that brings them."""

    records: list[EpisodeRecord]
    identities: list[Identity]
    write_id: int
    job_id: int | None

    @property
    def episode_ids(self) -> list[int]:
        return [identity.episode_id for identity in self.identities]


def known_episodes(snapshot: Snapshot, episode_ids: Sequence[int]) -> pl.DataFrame:
    """episode_id, group_id, run_id, write_id of episodes, also retracted ones. Raises UsageError: none, or unknown."""
    if not episode_ids:
        raise UsageError("no episodes are named; give ids, or a condition that some episodes meet")
    wanted = pl.Series("episode_id", sorted(set(episode_ids)), dtype=pl.Int64)
    columns = ["episode_id", "group_id", "run_id", "write_id"]
    found = snapshot.scan_all("episodes").filter(pl.col("episode_id").is_in(wanted.implode())).select(columns).collect()
    if unknown := sorted(set(wanted) - set(found["episode_id"])):
        more = f" (+{len(unknown) - 3} more)" if len(unknown) > 3 else ""
        msg = f"the lake holds no episode {', '.join(map(ids.to_text, unknown[:3]))}{more}; nothing was changed"
        raise UsageError(msg)
    return found


def write_retractions(job: "Job", episode_ids: Sequence[int], kind: str, reason: str | None) -> None:
    """Hide episodes from readers, in a job: kind `retracted`, or `forgotten` for what is going to be erased.

    The rows stay, and old snapshots still show them: what an update was trained on can always be looked at.
    """
    at = job.now()
    frame = pl.DataFrame({"episode_id": sorted(set(episode_ids))}, schema={"episode_id": pl.Int64})
    job.write(RETRACTIONS.name, frame.with_columns(kind=pl.lit(kind), at=pl.lit(at), reason=pl.lit(reason, pl.String)))
