"""Which episodes a lake holds, and which were forgotten: what a writer looks up before it commits.

Brought up to date from the files added since the last look, and kept as a few sorted runs that are merged when they
grow alike (a log-structured merge), so a batch costs what it brings, not what is there: 100 bytes an episode in
memory, logarithmic time a lookup.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

from lake.errors import LakeAccessError
from lake.read.parquet import collected, scan
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


_COLUMNS = ("episode_id", "content_hash", "group_id", "rollout_index", "agent_id", "attempt")


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

    def _add(self, version: int) -> None:
        """Take in the files since the last look, or all of them."""
        if self._version is None:
            entries = self._store.files(EPISODES.name, version)[1]
        else:
            entries = self._store.added(EPISODES.name, self._version, version)
        if paths := [entry.path for entry in entries if entry.path not in self._seen]:
            rows = scan(paths, EPISODES, self._store.objects.polars_options).select(_COLUMNS)
            self._runs.append(_Run.of(collected(rows)))
            # Every run stays at least twice as long as the next.
            while len(self._runs) > 1 and self._runs[-2].rows_E.height < 2 * self._runs[-1].rows_E.height:
                last, before = self._runs.pop(), self._runs.pop()
                self._runs.append(_Run.of(pl.concat([before.rows_E, last.rows_E])))
            self._seen.update(paths)

    def contents(self, episode_ids: Iterable[int]) -> dict[int, int]:
        """Content hash of those that are present."""
        wanted = np.unique(np.fromiter(episode_ids, np.int64))
        found = pl.concat([self._nothing, *(run.episodes(wanted) for run in self._runs)])
        return dict(zip(found["episode_id"], found["content_hash"], strict=True))

    def of_groups(self, group_ids: Iterable[int]) -> pl.DataFrame:
        """Episodes of some groups: episode_id, content_hash, group_id, rollout_index, agent_id, attempt."""
        wanted = np.unique(np.fromiter(group_ids, np.int64))
        found = pl.concat([self._nothing, *(run.groups(wanted) for run in self._runs)]).unique("episode_id")
        return found.filter(~pl.col("episode_id").is_in(list(self._forgotten))) if self._forgotten else found

    def is_forgotten(self, episode_id: int) -> bool:
        """Whether the episode was erased and must not come back."""
        return episode_id in self._forgotten
