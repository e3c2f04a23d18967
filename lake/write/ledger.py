"""Which episodes a lake holds, and which write attempts it accepts.

A writer looks episodes up in an `EpisodeIndex` before it commits. The index reads only the data files added since its
last refresh. It keeps the rows as a few sorted runs and merges runs of similar size (a log-structured merge). So the
cost of a batch depends on the batch: 110 bytes of memory per episode, and logarithmic time per lookup.

A write attempt is complete when all of its data files are written and none is committed. A `Ledger` commits several
attempts together, one commit per table: the children first, unconditionally, then `episodes` as a compare-and-swap on a
version in which none of their episodes existed. An `EpisodeWriter` commits its own attempts one at a time; the
committer of a machine commits those of many processes (`lake.write.group_commit`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import polars as pl

from lake.errors import LakeAccessError
from lake.read.parquet import collect_rows, scan_files
from lake.records import Index, Int64
from lake.storage.commits import CommitLostError, read_revoked, until_committed
from lake.storage.data_files import StagedRows
from lake.storage.store import SOON, Store
from lake.tables import EPISODES, JOBS, RETRACTIONS


class Tombstones:
    """The forgotten episodes of a lake; each refresh reads only the files added since the last one.

    A tombstone counts once the job that wrote it has succeeded, as it does for readers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read_paths: set[str] = set()
        self._pending = pl.DataFrame(schema={"episode_id": pl.Int64, "write_id": pl.Int64})
        """Tombstones whose job has not succeeded yet."""
        self._forgotten: set[int] = set()

    def refresh(self) -> set[int]:
        """Return the episode_ids of all forgotten episodes. Raises LakeAccessError: a file is missing or damaged."""
        options = self._store.objects.polars_options
        _, entries = self._store.files(RETRACTIONS.name)
        if new_paths := [entry.path for entry in entries if entry.path not in self._read_paths]:
            rows = scan_files(new_paths, RETRACTIONS, options).filter(pl.col("kind") == "forgotten")
            self._pending.extend(collect_rows(rows.select("episode_id", "write_id")))
            self._read_paths.update(new_paths)
        if len(self._pending):
            _, entries = self._store.files(JOBS.name)
            has_succeeded = (pl.col("event") == "succeeded") & (pl.col("kind") == "retract")
            jobs = scan_files([entry.path for entry in entries], JOBS, options).filter(has_succeeded)
            accepted = collect_rows(jobs.select("accepted_write_ids"))["accepted_write_ids"].explode()
            is_accepted = pl.col("write_id").is_in(accepted.implode())
            self._forgotten.update(self._pending.filter(is_accepted)["episode_id"])
            self._pending = self._pending.filter(~is_accepted)
        return self._forgotten


_COLUMNS = ("episode_id", "content_hash", "group_id", "rollout_index", "agent_id", "attempt", "write_id")

Slot = tuple[Int64, Index, str | None]
"""group_id, rollout_index and agent_id: what a retry shares with its predecessor."""


class LatestAttempt(msgspec.Struct, frozen=True, array_like=True):
    """The last attempt at a rollout."""

    attempt: Index
    episode_id: Int64
    content_hash: Int64


class EpisodeLookup(msgspec.Struct, frozen=True):
    """The episodes of a request that a lake holds at a version of `episodes`."""

    version: Int64
    contents: dict[Int64, tuple[Int64, Int64]]
    """Episode -> its content_hash and its write_id."""
    newest: dict[Slot, LatestAttempt]
    forgotten: set[Int64]
    """Erased episodes, which must not come back. A committer sends only those of the request."""


@dataclass(slots=True)
class _SortedRun:
    """Rows sorted by episode_id, and their order by group_id."""

    rows_E: pl.DataFrame
    by_group_E: np.ndarray

    @classmethod
    def from_rows(cls, rows: pl.DataFrame) -> "_SortedRun":
        rows_E = rows.unique("episode_id").sort("episode_id")
        return cls(rows_E, rows_E["group_id"].to_numpy().argsort(kind="stable"))

    def select_episodes(self, ids: np.ndarray) -> pl.DataFrame:
        ids_E = self.rows_E["episode_id"].to_numpy()
        positions = np.searchsorted(ids_E, ids)
        positions = positions[positions < len(ids_E)]
        return self.rows_E[np.unique(positions)].filter(pl.col("episode_id").is_in(ids))

    def select_groups(self, ids: np.ndarray) -> pl.DataFrame:
        sorted_E = self.rows_E["group_id"].to_numpy()[self.by_group_E]
        starts, ends = np.searchsorted(sorted_E, ids, "left"), np.searchsorted(sorted_E, ids, "right")
        positions = [self.by_group_E[start:end] for start, end in zip(starts, ends, strict=True) if end > start]
        return self.rows_E[np.concatenate(positions)] if positions else self.rows_E.clear()


class EpisodeIndex:
    """The episodes of a lake by id and by group, and the ids that were forgotten."""

    def __init__(self, store: Store) -> None:
        self._store = store
        schema = EPISODES.polars()
        self._no_rows = pl.DataFrame(schema={name: schema[name] for name in _COLUMNS})
        self._runs: list[_SortedRun] = []
        self._read_paths: set[str] = set()
        self._version: int | None = None
        self._tombstones = Tombstones(store)
        self._forgotten: set[int] = set()

    def refresh(self) -> int:
        """Read the newest version of `episodes` and return it. Raises LakeAccessError: a damaged file."""
        while True:
            version = self._store.refresh(EPISODES.name)
            try:
                self._read(version)
            except LakeAccessError:
                # A file may have been erased, or compacted and deleted, during the read. A later version lacks it.
                if self._version is None and self._store.refresh(EPISODES.name) == version:
                    raise
                self._version = None
                continue
            self._version = version
            # Tombstones come second: `forget` writes them before it removes the episode's rows.
            self._forgotten = self._tombstones.refresh()
            return version

    def refresh_to(self, version: int) -> None:
        """Read a version of `episodes` into an empty index. Raises LakeAccessError: a file is damaged or missing."""
        self._read(version)
        self._version = version
        self._forgotten = self._tombstones.refresh()

    def copy(self) -> "EpisodeIndex":
        """Return an index that later refreshes of this one do not change; both share the rows."""
        index = EpisodeIndex(self._store)
        index._runs, index._version, index._forgotten = list(self._runs), self._version, set(self._forgotten)
        return index

    @property
    def version(self) -> int:
        """The version of `episodes` that was read; -1 before the first refresh."""
        return -1 if self._version is None else self._version

    def _read(self, version: int) -> None:
        """Read the files added since the last refresh, or all of them."""
        if self._version is None:
            entries = self._store.files(EPISODES.name, version)[1]
        else:
            entries = self._store.added(EPISODES.name, self._version, version)
        if paths := [entry.path for entry in entries if entry.path not in self._read_paths]:
            rows = scan_files(paths, EPISODES, self._store.objects.polars_options).select(_COLUMNS)
            self._merge(collect_rows(rows))
            self._read_paths.update(paths)

    def _merge(self, rows: pl.DataFrame) -> None:
        self._runs.append(_SortedRun.from_rows(rows))
        # Every run stays at least twice as long as the next.
        while len(self._runs) > 1 and self._runs[-2].rows_E.height < 2 * self._runs[-1].rows_E.height:
            last, previous = self._runs.pop(), self._runs.pop()
            self._runs.append(_SortedRun.from_rows(pl.concat([previous.rows_E, last.rows_E])))

    def look_up(self, episode_ids: Iterable[int], group_ids: Iterable[int]) -> EpisodeLookup:
        """Return those of the episodes, and the latest attempts of those groups, that the last refresh read."""
        ids = np.unique(np.fromiter(episode_ids, np.int64))
        episodes = pl.concat([self._no_rows, *(run.select_episodes(ids) for run in self._runs)])
        contents = zip(episodes["content_hash"], episodes["write_id"], strict=True)
        groups = np.unique(np.fromiter(group_ids, np.int64))
        of_groups = pl.concat([self._no_rows, *(run.select_groups(groups) for run in self._runs)])
        newest: dict[Slot, LatestAttempt] = {}
        for episode_id, content, group, rollout, agent, attempt, _ in of_groups.iter_rows():
            last = newest.get((group, rollout, agent))
            is_newer = last is None or (attempt, episode_id) > (last.attempt, last.episode_id)
            if is_newer and episode_id not in self._forgotten:
                newest[group, rollout, agent] = LatestAttempt(attempt, episode_id, content)
        return EpisodeLookup(
            self.version, dict(zip(episodes["episode_id"], contents, strict=True)), newest, self._forgotten
        )

    def add_committed(self, paths: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add the rows of files that this process committed, so that a refresh need not read these files."""
        self._merge(pl.DataFrame(rows, schema=self._no_rows.schema, orient="row"))
        self._read_paths.update(paths)


CHILDREN = ("blobs", "spans", "tokens", "steps", "retractions")
"""Tables in the order of their commits; `episodes` comes after them."""


class NewEpisode(msgspec.Struct, frozen=True, array_like=True):
    """An episode of a write attempt: its columns in an `EpisodeIndex`, without the write_id."""

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
    new_episodes: list[NewEpisode]
    successors: dict[int, int]
    """Predecessor -> successor, as the attempt's file of `retractions` says."""
    children: dict[str, StagedRows]
    episodes: StagedRows

    @property
    def staged(self) -> dict[str, StagedRows]:
        """Table -> its file, in the order of the commits."""
        return self.children | {"episodes": self.episodes}


def find_successors(newest: Mapping[Slot, LatestAttempt], new_episodes: Iterable[NewEpisode]) -> dict[int, int]:
    """Return the episodes that retries replace -> their successors; both may be new or in the lake."""
    best = {slot: (last.attempt, last.episode_id) for slot, last in newest.items()}
    successors: dict[int, int] = {}
    for episode in sorted(new_episodes, key=lambda episode: episode.attempt):
        attempt, best_id = best.get(episode.slot, (-1, 0))
        if attempt > episode.attempt:
            successors[episode.episode_id] = best_id
        else:
            if attempt >= 0:
                successors[best_id] = episode.episode_id
            best[episode.slot] = (episode.attempt, episode.episode_id)
    return successors


def select_acceptable(attempts: Iterable[Attempt], lookup: EpisodeLookup, revoked: Collection[int]) -> list[Attempt]:
    """Return the attempts that can be accepted together on top of what the lake holds; earlier ones win.

    An attempt is not acceptable if one of its episodes is in the lake, was forgotten, or belongs to an earlier attempt.
    Neither is a revoked attempt, nor one whose retractions no longer match its retries.
    """
    acceptable: list[Attempt] = []
    present_ids, slots = set(lookup.contents), set[Slot]()
    for attempt in attempts:
        attempt_ids = {episode.episode_id for episode in attempt.new_episodes}
        attempt_slots = {episode.slot for episode in attempt.new_episodes}
        is_new = attempt_ids.isdisjoint(present_ids) and attempt_ids.isdisjoint(lookup.forgotten)
        is_new = is_new and attempt_slots.isdisjoint(slots) and attempt.write_id not in revoked
        newest = {slot: lookup.newest[slot] for slot in attempt_slots if slot in lookup.newest}
        if is_new and find_successors(newest, attempt.new_episodes) == attempt.successors:
            acceptable.append(attempt)
            present_ids |= attempt_ids
            slots |= attempt_slots
    return acceptable


def are_fresh(files: Iterable[StagedRows], now: datetime) -> bool:
    """Return whether vacuum cannot have deleted any of the files yet.

    Only files without their rows count: another process wrote those, and only that process can write them again.
    """
    return all(timedelta(0) <= now - staged.written.at < SOON / 2 for staged in files if staged.rows is None)


class Ledger:
    """The episodes of a lake as one process knows them, and the commits that add to them. Not thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = EpisodeIndex(store)
        self.lost_races = 0
        """How often another process committed first."""

    def look_up(self, episode_ids: Iterable[int], group_ids: Iterable[int]) -> EpisodeLookup:
        """Return the episodes, and the latest attempts in the groups, that the lake holds now."""
        self._index.refresh()
        return self.recall(episode_ids, group_ids)

    def recall(self, episode_ids: Iterable[int], group_ids: Iterable[int]) -> EpisodeLookup:
        """Return the same as `look_up`, as of the last refresh."""
        return self._index.look_up(episode_ids, group_ids)

    def copy_index(self) -> EpisodeIndex:
        """Return an index of the lake's newest version that later commits do not change."""
        self._index.refresh()
        return self._index.copy()

    def accept(
        self, attempts: Sequence[Attempt], checked_version: int | None = None, *, max_losses: int | None = None
    ) -> set[int]:
        """Commit write attempts, each of them completely or not at all.

        Args:
            attempts: in the order of their arrival.
            checked_version: version of `episodes` at which all of them were acceptable; None looks it up.
            max_losses: number of lost races after which all attempts are abandoned; None is no limit.

        Returns:
            The write_ids that were accepted. The others are abandoned permanently; look up their episodes again.
        """
        now = self._store.clock()
        waiting = [attempt for attempt in attempts if are_fresh(attempt.staged.values(), now)]
        version = -1 if checked_version is None else checked_version
        if checked_version is None:
            lookup = self._look_up_attempts(waiting)
            waiting, version = select_acceptable(waiting, lookup, ()), lookup.version
        for name in CHILDREN:
            if staged := [attempt.children[name] for attempt in waiting if name in attempt.children]:
                self._store.append_staged(name, staged)

        last_race = None if max_losses is None else self.lost_races + max_losses

        def commit() -> None:
            nonlocal waiting, version
            if not waiting:
                return
            try:
                self._store.append_episodes([attempt.episodes for attempt in waiting], version)
            except CommitLostError:
                self.lost_races += 1
                lost_version, lookup = version, self._look_up_attempts(waiting)
                if self._store.holds("episodes", waiting[0].write_id, lost_version):
                    return
                version = lookup.version
                if self.lost_races == last_race:
                    waiting = []
                else:
                    # Vacuum revokes an attempt before it drops its children, if its writer stopped long ago.
                    waiting = select_acceptable(waiting, lookup, read_revoked(self._store.objects))
                if waiting:
                    raise

        until_committed(commit)
        objects = self._store.objects
        rows = [
            (*msgspec.structs.astuple(episode), attempt.write_id)
            for attempt in waiting
            for episode in attempt.new_episodes
        ]
        if rows:
            paths = [objects.uri(f"episodes/{attempt.episodes.written.add.path}") for attempt in waiting]
            self._index.add_committed(paths, rows)
        return {attempt.write_id for attempt in waiting}

    def _look_up_attempts(self, attempts: Sequence[Attempt]) -> EpisodeLookup:
        episodes = [episode for attempt in attempts for episode in attempt.new_episodes]
        return self.look_up((episode.episode_id for episode in episodes), (episode.group_id for episode in episodes))


class AttemptCollector:
    """Stands in for a `Ledger` in a process that stages attempts for another process to accept. It commits nothing.

    Args:
        index: an earlier state of the lake; the accepting process looks the episodes up again.
    """

    lost_races = 0

    def __init__(self, index: EpisodeIndex) -> None:
        self._index = index
        self.attempts: list[Attempt] = []
        """The attempts to accept."""

    def copy_index(self) -> EpisodeIndex:
        """Return the index."""
        return self._index

    def look_up(self, episode_ids: Iterable[int], group_ids: Iterable[int]) -> EpisodeLookup:
        """Look episodes up in the index; see `Ledger.look_up`."""
        return self._index.look_up(episode_ids, group_ids)

    recall = look_up

    def accept(
        self, attempts: Sequence[Attempt], checked_version: int | None = None, *, max_losses: int | None = None
    ) -> set[int]:
        """Collect attempts."""
        del checked_version, max_losses  # the accepting process has its own
        self.attempts += attempts
        return {attempt.write_id for attempt in attempts}
