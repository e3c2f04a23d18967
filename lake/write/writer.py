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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.read.parquet import collected, scan
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, Identity, identify
from lake.storage.store import Store
from lake.tables import EPISODES, RETRACTIONS, TABLES
from lake.tables.contracts import conform
from lake.write.index import EpisodeIndex, Known, Slot
from lake.write.ledger import Attempt, Claim, Deferred, Ledger, superseded
from lake.write.rows import blobs_frame, episodes_frame, moved_out, spans_frame, steps_frame, tokens_frame
from lake.write.secret_columns import episodes_without_keys

if TYPE_CHECKING:
    from lake.write.fleet.client import Committer, Fleet
    from lake.write.jobs import Job

_Extent = tuple[int, datetime]
"""How far a session is: its steps and its end; the longer one is the greater."""


_PATIENCE = 3
"""Lost races after which a batch goes to the committer instead, once: who loses again and again would wait for long."""


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
    """Appends records to a lake's fact tables exactly once.

    Args:
        fleet: the way to the committer of this machine, which commits what its writers bring together; None always
            commits in this process.
        ledger: who decides; `Deferred` leaves that to another process.
    """

    def __init__(self, store: Store, fleet: "Fleet | None" = None, ledger: "Ledger | Deferred | None" = None) -> None:
        self._store = store
        self._ledger = ledger or Ledger(store)
        self._fleet = fleet
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
        own: set[int] = set()
        with self._lock:
            while True:
                # What a session is that goes on is asked of the index again and again: it has to be this process's.
                fleet = self._fleet if records and not growing else None
                is_accepted = False
                with nullcontext() if fleet is None else fleet.committer(self._ledger.lost) as far:
                    known = self._look(identities, far)
                    todo, outcome = self._sort_out(records, identities, first, known, own)
                    if not todo:
                        return outcome
                    batch = _Batch([records[i] for i in todo], [identities[i] for i in todo], ids.fresh_id(), job_id)
                    losses = _PATIENCE if fleet is not None and not own else None
                    own.add(batch.write_id)
                    is_accepted = self._accepted(self._staged(batch, known), known, far, losses)
                if is_accepted:
                    outcome.new += len(todo)
                    outcome.new_steps += sum(len(records[i].steps) for i in todo)
                    outcome.write_ids.append(batch.write_id)
                    return outcome

    def accept(self, attempt: Attempt) -> bool:
        """Commit an attempt that another writer staged; False if it is not what the lake calls for by now."""
        with self._lock:
            return bool(self._ledger.accept([attempt]))

    def index(self) -> EpisodeIndex:
        """The episodes that there are now, retracted ones among them; it stays as it is."""
        with self._lock:
            return self._ledger.index()

    def _look(self, identities: Sequence[Identity], far: "Committer | None") -> Known:
        episode_ids, group_ids = ({i.episode_id for i in identities}, {i.group_id for i in identities})
        return (far or self._ledger).look(episode_ids, group_ids)

    def _staged(self, batch: "_Batch", known: Known) -> Attempt:
        """The files of a batch, written and not committed."""
        rows = (batch.records, batch.identities, batch.write_id)
        claims = [
            Claim(i.episode_id, i.content_hash, i.group_id, record.rollout_index, record.agent_id, record.attempt)
            for record, i in zip(batch.records, batch.identities, strict=True)
        ]
        replaced = superseded(known.newest, claims)
        tables = (TABLES["episodes"], TABLES["steps"])
        made = {"episodes": episodes_frame, "steps": steps_frame, "spans": spans_frame, "tokens": tokens_frame}
        found = episodes_without_keys({name: frame(*rows) for name, frame in made.items()})
        episodes, steps, blobs = moved_out(found["episodes"], found["steps"], tables)
        pairs = {"episode_id": list(replaced), "superseded_by": list(replaced.values())}
        retractions = pl.DataFrame(pairs, schema=dict.fromkeys(pairs, pl.Int64)).with_columns(
            write_id=pl.lit(batch.write_id), kind=pl.lit("superseded"), at=pl.lit(self._store.clock())
        )
        frames = {
            "blobs": blobs_frame(blobs, batch.write_id),
            "spans": found["spans"],
            "tokens": found["tokens"],
            "steps": steps,
            "retractions": retractions,
            "episodes": episodes,
        }
        staged = {
            name: self._store.stage(name, conform(frame, TABLES[name]), job_id=batch.job_id)
            for name, frame in frames.items()
            if frame.height
        }
        return Attempt(batch.write_id, claims, replaced, staged, staged.pop("episodes"))

    def _accepted(self, attempt: Attempt, known: Known, far: "Committer | None", losses: int | None) -> bool:
        """Commit an attempt, here or elsewhere; False if it was abandoned, or nobody can say whether it was."""
        if far is None:
            return bool(self._ledger.accept([attempt], known.version, losses=losses))
        if is_accepted := far.accept(attempt):
            for name, staged in attempt.staged.items():
                self._store.keep(name, [staged])
        return is_accepted

    def _sort_out(
        self,
        records: Sequence[EpisodeRecord],
        identities: list[Identity],
        first: Mapping[int, int],
        known: Known,
        own: Collection[int],
    ) -> tuple[list[int], Outcome]:
        """Positions of the records that are new, and the others counted.

        A key's second record in the batch counts as if its first were in the lake: batching changes nothing. `first` is
        the attempt that each growing record was read as; their identities are replaced by those of the attempts that
        they are. `own` are write attempts of this batch of which it was not known whether they were accepted: what they
        brought is new.
        """
        content = {episode_id: found for episode_id, (found, _) in known.contents.items()}
        brought = {episode_id: by for episode_id, (_, by) in known.contents.items() if by in own}
        sessions = self._sessions(records, identities, first, known) if first else {}

        def known_of(of: Collection[Identity]) -> list[int | None]:
            """The content that is known of earlier attempts."""
            found = self._ledger.remembered((identity.episode_id for identity in of), ()).contents
            there = {episode_id: one for episode_id, (one, _) in found.items()} | content
            return [there.get(identity.episode_id) for identity in of]

        def extent_of(newest: _Reading) -> _Extent:
            if newest.extent is None:
                self._measure(sessions.values(), known.version)
            return newest.extent or _extent(0, None)

        content |= {newest.identity.episode_id: newest.identity.content_hash for newest in sessions.values()}
        todo: list[int] = []
        outcome = Outcome(write_ids=sorted(set(brought.values())))
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
            there = content.get(identity.episode_id)
            if identity.episode_id in known.forgotten:
                outcome.forgotten.append(position)
            elif there is None:
                content[identity.episode_id] = identity.content_hash
                todo.append(position)
                if position in first:
                    outcome.replaced += newest is not None
                    sessions[slot] = _Reading(record.attempt, identity, _extent(len(record.steps), record.ended_at))
            elif there != identity.content_hash:
                outcome.conflicts.append(position)
            elif brought.pop(identity.episode_id, None) is not None:
                outcome.new += 1
                outcome.new_steps += len(record.steps)
            else:
                outcome.present += 1
        return todo, outcome

    @staticmethod
    def _sessions(
        records: Sequence[EpisodeRecord], identities: Sequence[Identity], places: Collection[int], known: Known
    ) -> dict[Slot, "_Reading"]:
        """The reading that counts of each session that the lake holds."""
        wanted = {_slot(records[place], identities[place]) for place in places}
        return {
            slot: _Reading(last.attempt, Identity(last.episode_id, slot[0], last.content_hash, ""))
            for slot, last in known.newest.items()
            if slot in wanted
        }

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


def _slot(record: EpisodeRecord, identity: Identity) -> Slot:
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
