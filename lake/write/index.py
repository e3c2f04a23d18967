"""Which episodes a lake holds, and which were forgotten: what a writer looks up before it commits.

Brought up to date from the files added since the last look, and kept as a few sorted runs that are merged when they
grow alike (a log-structured merge), so a batch costs what it brings, not what is there: 110 bytes an episode in
memory, logarithmic time a lookup.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import polars as pl

from lake.errors import LakeAccessError
from lake.read.parquet import collected, scan
from lake.records import Index, Int64
from lake.storage.store import Store
from lake.tables import EPISODES, JOBS, RETRACTIONS


class Tombstones:
    """The forgotten episodes of a lake, brought up to date from the files added since the last look.

    A tombstone counts once the job that set it has succeeded, as it does for readers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[str] = set()
        self._announced = pl.DataFrame(schema={"episode_id": pl.Int64, "write_id": pl.Int64})
        self._forgotten: set[int] = set()

    def refresh(self) -> set[int]:
        """The episode_ids of all forgotten episodes. Raises LakeAccessError: a file is missing or damaged."""
        options = self._store.objects.polars_options
        _, entries = self._store.files(RETRACTIONS.name)
        if fresh := [entry.path for entry in entries if entry.path not in self._seen]:
            rows = scan(fresh, RETRACTIONS, options).filter(pl.col("kind") == "forgotten")
            self._announced.extend(collected(rows.select("episode_id", "write_id")))
            self._seen.update(fresh)
        if len(self._announced):
            self._confirm()
        return self._forgotten

    def _confirm(self) -> None:
        """Move announced erasures that a job has accepted to the forgotten ones."""
        _, entries = self._store.files(JOBS.name)
        ended = (pl.col("event") == "succeeded") & (pl.col("kind") == "retract")
        jobs = scan([entry.path for entry in entries], JOBS, self._store.objects.polars_options).filter(ended)
        accepted = collected(jobs.select("accepted_write_ids"))["accepted_write_ids"].explode()
        real = pl.col("write_id").is_in(accepted.implode())
        self._forgotten.update(self._announced.filter(real)["episode_id"])
        self._announced = self._announced.filter(~real)


_COLUMNS = ("episode_id", "content_hash", "group_id", "rollout_index", "agent_id", "attempt", "write_id")

Slot = tuple[Int64, Index, str | None]
"""group_id, rollout_index and agent_id: what a retry shares with its predecessor."""


class Newest(msgspec.Struct, frozen=True, array_like=True):
    """The last attempt at a rollout."""

    attempt: Index
    episode_id: Int64
    content_hash: Int64


class Known(msgspec.Struct, frozen=True):
    """What a lake holds, at a version of `episodes`, of what was asked about."""

    version: Int64
    contents: dict[Int64, tuple[Int64, Int64]]
    """Episode -> its content_hash and its write_id."""
    newest: dict[Slot, Newest]
    forgotten: set[Int64]
    """Episodes that were erased and must not come back, those among them that were asked about."""


@dataclass(slots=True)
class _Run:
    """Rows sorted by episode_id, and their order by group_id."""

    rows_E: pl.DataFrame
    by_group_E: np.ndarray

    @classmethod
    def of(cls, rows: pl.DataFrame) -> "_Run":
        rows_E = rows.unique("episode_id").sort("episode_id")
        return cls(rows_E, rows_E["group_id"].to_numpy().argsort(kind="stable"))

    def episodes(self, ids: np.ndarray) -> pl.DataFrame:
        have_E = self.rows_E["episode_id"].to_numpy()
        place = np.searchsorted(have_E, ids)
        place = place[place < len(have_E)]
        return self.rows_E[np.unique(place)].filter(pl.col("episode_id").is_in(ids))

    def groups(self, ids: np.ndarray) -> pl.DataFrame:
        sorted_E = self.rows_E["group_id"].to_numpy()[self.by_group_E]
        low, high = np.searchsorted(sorted_E, ids, "left"), np.searchsorted(sorted_E, ids, "right")
        places = [self.by_group_E[a:b] for a, b in zip(low, high, strict=True) if b > a]
        return self.rows_E[np.concatenate(places)] if places else self.rows_E.clear()


class EpisodeIndex:
    """The episodes of a lake by id and by group, and the ids that were forgotten."""

    def __init__(self, store: Store) -> None:
        self._store = store
        schema = EPISODES.polars()
        self._nothing = pl.DataFrame(schema={name: schema[name] for name in _COLUMNS})
        self._runs: list[_Run] = []
        self._seen: set[str] = set()
        self._version: int | None = None
        self._tombstones = Tombstones(store)
        self._forgotten: set[int] = set()

    def refresh(self) -> int:
        """Come to the newest version of `episodes`, and return it. Raises LakeAccessError: a damaged file."""
        while True:
            version = self._store.refresh(EPISODES.name)
            try:
                self._add(version)
            except LakeAccessError:
                # Erased, or compacted and deleted, while it was being read? Then there is a version without it.
                if self._version is None and self._store.refresh(EPISODES.name) == version:
                    raise
                self._version = None
                continue
            self._version = version
            # Second: whoever forgets an episode says so here before it is gone there.
            self._forgotten = self._tombstones.refresh()
            return version

    def refresh_to(self, version: int) -> None:
        """Come to a version of `episodes`, from none. Raises LakeAccessError: a damaged file, or one that is gone."""
        self._add(version)
        self._version = version
        self._forgotten = self._tombstones.refresh()

    def frozen(self) -> "EpisodeIndex":
        """What it holds now; the rows are shared, and stay as they are."""
        copy = EpisodeIndex(self._store)
        copy._runs, copy._version, copy._forgotten = list(self._runs), self._version, set(self._forgotten)
        return copy

    @property
    def version(self) -> int:
        """The version of `episodes` that it is at; -1 if nobody has looked yet."""
        return -1 if self._version is None else self._version

    def _add(self, version: int) -> None:
        """Take in the files since the last look, or all of them."""
        if self._version is None:
            entries = self._store.files(EPISODES.name, version)[1]
        else:
            entries = self._store.added(EPISODES.name, self._version, version)
        if paths := [entry.path for entry in entries if entry.path not in self._seen]:
            rows = scan(paths, EPISODES, self._store.objects.polars_options).select(_COLUMNS)
            self._merge(collected(rows))
            self._seen.update(paths)

    def _merge(self, rows: pl.DataFrame) -> None:
        self._runs.append(_Run.of(rows))
        # Every run stays at least twice as long as the next.
        while len(self._runs) > 1 and self._runs[-2].rows_E.height < 2 * self._runs[-1].rows_E.height:
            last, before = self._runs.pop(), self._runs.pop()
            self._runs.append(_Run.of(pl.concat([before.rows_E, last.rows_E])))

    def known(self, episode_ids: Iterable[int], group_ids: Iterable[int]) -> Known:
        """What was there at the last look of some episodes, and of the attempts in some groups."""
        wanted = np.unique(np.fromiter(episode_ids, np.int64))
        found = pl.concat([self._nothing, *(run.episodes(wanted) for run in self._runs)])
        contents = zip(found["content_hash"], found["write_id"], strict=True)
        groups = np.unique(np.fromiter(group_ids, np.int64))
        of_groups = pl.concat([self._nothing, *(run.groups(groups) for run in self._runs)])
        newest: dict[Slot, Newest] = {}
        for episode_id, content, group, rollout, agent, attempt, _ in of_groups.iter_rows():
            last = newest.get((group, rollout, agent))
            is_newer = last is None or (attempt, episode_id) > (last.attempt, last.episode_id)
            if is_newer and episode_id not in self._forgotten:
                newest[group, rollout, agent] = Newest(attempt, episode_id, content)
        return Known(self.version, dict(zip(found["episode_id"], contents, strict=True)), newest, self._forgotten)

    def take(self, paths: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
        """Take in files that this process committed itself, by their rows: they need not be read."""
        self._merge(pl.DataFrame(rows, schema=self._nothing.schema, orient="row"))
        self._seen.update(paths)
