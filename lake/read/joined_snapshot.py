"""Several lakes as one snapshot: the same tables over the files of all lakes.

Each lake alone decides which of its rows are visible, by its log, its jobs and its retractions. The joined snapshot
concatenates the visible rows. An id is a hash of the names of an episode (run, task, rollout; `lake.ids`), so one id in
two lakes means one rollout that was recorded twice. The snapshot shows it once, from the first lake that has it. If its
content differs, two rollouts share a name and their judgements could be confused. Then reading it raises an error.

A judgement may be in another lake than its episode. It is shown while any of the lakes shows the episode.

Within one lake, jobs are ordered by the version of `jobs` at which they ended. Versions of two lakes cannot be
compared, so a joined snapshot uses the end times of jobs in microseconds, by their writers' clocks. It keeps the order
of jobs within each lake, so wrong clocks can change only the order of jobs of different lakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.read.parquet import DataFile, collect_rows
from lake.read.snapshot import Snapshot, join_versions
from lake.read.text_table import count_noun
from lake.storage.objects import JoinedObjects
from lake.tables import JOBS, TABLES
from lake.tables.definitions import JUDGEMENTS

if TYPE_CHECKING:
    from lake.read.column_cache import ColumnCache
    from lake.read.query import QueryLimits, QuerySession
    from lake.storage.data_files import FileEntry

_JUDGEMENT_TABLES = frozenset(table.name for table in JUDGEMENTS)


class JoinedSnapshot(Snapshot):
    """Snapshots of several lakes, read as one; see the module.

    Args:
        members: snapshots of different lakes; jobs write into the first lake.
    """

    def __init__(self, members: Sequence[Snapshot]) -> None:
        self.members = tuple(members)
        self.root = " and ".join(member.root for member in self.members)
        self.versions = join_versions([(member.root, member.versions) for member in self.members])
        self.forgotten = sum(member.forgotten for member in self.members)
        self._joined = JoinedObjects([member.objects for member in self.members])
        self._hidden_sets: dict[int, pl.Series] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the member snapshots."""
        return JoinedSnapshot, (self.members,)

    @property
    def objects(self) -> JoinedObjects:
        """Location of the files."""
        return self._joined

    def newest(self) -> JoinedSnapshot:
        """Open the same lakes at their newest versions."""
        return JoinedSnapshot([member.newest() for member in self.members])

    def entries(self, name: str) -> list[FileEntry]:
        """Return all files of a table, visible or not."""
        return [entry for member in self.members for entry in member.entries(name)]

    def files(self, name: str) -> list[DataFile]:
        """Return the Parquet files of a table that hold visible rows, grouped by lake."""
        judged = len(self.members)
        return [
            replace(file, hidden_set=judged if name in _JUDGEMENT_TABLES else number)
            for number, member in enumerate(self.members)
            for file in member.files(name)
        ]

    def scan(self, name: str) -> pl.LazyFrame:
        """See `Snapshot.scan`."""
        return self._scan(name, hides=TABLES[name].hides_retracted)

    def scan_all(self, name: str) -> pl.LazyFrame:
        """See `Snapshot.scan_all`; an episode that two lakes hold has the rows of both."""
        return self._scan(name, hides=False)

    def _scan(self, name: str, *, hides: bool) -> pl.LazyFrame:
        if name == JOBS.name:
            return self.sql("SELECT * FROM jobs").lazy()
        frames = []
        for number, member in enumerate(self.members):
            frame = member.scan_all(name)
            hidden_set = len(self.members) if name in _JUDGEMENT_TABLES else number
            if hides and len(hidden := self.hidden(hidden_set)):
                frame = frame.filter(~pl.col("episode_id").is_in(hidden.implode()))
            frames.append(frame)
        table, frame = TABLES[name], pl.concat(frames)
        if table.distinct:
            return frame.sort("write_id").unique(list(table.key), keep="first", maintain_order=True)
        return frame

    def hidden(self, hidden_set: int = 0) -> pl.Series:
        """Return the episodes that readers do not see: int64 [E].

        Args:
            hidden_set: number of a lake, for its facts; the number of lakes, for judgements.

        Raises:
            UsageError: two lakes hold different rollouts under one id.
        """
        if hidden_set not in self._hidden_sets:
            episodes = [self.retracted]
            if hidden_set < len(self.members):
                episodes += [self.members[hidden_set].retracted, self._copies[hidden_set]]
            self._hidden_sets[hidden_set] = pl.concat(episodes).unique().sort()
        return self._hidden_sets[hidden_set]

    @cached_property
    def retracted(self) -> pl.Series:
        """Episodes that some lake has retracted and no lake shows: int64 [E], sorted."""
        retracted = pl.concat([member.retracted for member in self.members]).unique()
        if retracted.is_empty():
            return retracted
        is_retracted = pl.col("episode_id").is_in(retracted.implode())
        visible = [collect_rows(m.scan("episodes").filter(is_retracted).select("episode_id")) for m in self.members]
        return retracted.filter(~retracted.is_in(pl.concat(visible)["episode_id"].implode())).sort()

    @cached_property
    def _copies(self) -> list[pl.Series]:
        """Episodes of each lake that an earlier lake shows too. Raises UsageError: their content differs."""
        runs = [set(collect_rows(m.scan("episodes").select(pl.col("run_id").unique()))["run_id"]) for m in self.members]
        earlier = pl.DataFrame(schema={"episode_id": pl.Int64, "content_hash": pl.Int64, "lake": pl.String})
        copies_of_members = []
        for number, member in enumerate(self.members):
            # The run is part of an episode's name, so only runs that another lake has can hold copies.
            shared = runs[number] & set().union(*(of_lake for lake, of_lake in enumerate(runs) if lake != number))
            rows = member.scan("episodes").filter(pl.col("run_id").is_in(sorted(shared)))
            mine = collect_rows(rows.select("episode_id", "content_hash")) if shared else earlier.clear().drop("lake")
            copies = mine.join(earlier, on="episode_id", suffix="_there")
            differing = copies.filter(pl.col("content_hash") != pl.col("content_hash_there"))
            if not differing.is_empty():
                examples = ", ".join(ids.to_text(value) for value in differing["episode_id"].head(3))
                raise UsageError(
                    f"{differing['lake'][0]} and {member.root} hold different rollouts under the same names: "
                    f"{count_noun(differing.height, 'episode')}, for example {examples}. Read the lakes one by one, "
                    "take the wrong ones back in one of them (`trajlake retract --lake THAT`), or ingest them again "
                    "under another --run"
                )
            copies_of_members.append(copies["episode_id"])
            fresh = mine.join(copies, on="episode_id", how="anti")
            earlier = pl.concat([earlier, fresh.with_columns(lake=pl.lit(member.root))])
        return copies_of_members

    def session(
        self, limits: QueryLimits | None = None, *, retracted_too: bool = False, cache: ColumnCache | None = None
    ) -> QuerySession:
        """See `Snapshot.session`."""
        from lake.read.query import QuerySession

        def copies(hidden_set: int) -> pl.Series | None:
            return self._copies[hidden_set] if hidden_set < len(self.members) else None

        hidden = copies if retracted_too else self.hidden
        return QuerySession(self.files, self.objects, hidden, limits, by_clock=True, cache=cache)

    def size(self, name: str) -> tuple[int, int, int]:
        """See `Snapshot.size`; the sums over the lakes."""
        files, rows, size = (sum(figures) for figures in zip(*(m.size(name) for m in self.members), strict=True))
        return files, rows, size
