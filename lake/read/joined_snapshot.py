"""Several lakes as one snapshot: the same tables over the files of all of them.

Each lake decides alone which of its rows exist: its own log, its own jobs, its own retractions. What is left is put
side by side. An id is a hash of what names an episode (run, task, rollout; `lake.ids`), so the same id in two lakes is
the same rollout, recorded twice: it is shown once, as the first lake that has it holds it. If its content differs, two
rollouts go by one name, and nothing that is said about the one may be taken for the other: that is refused.

A judgement may stand in another lake than its episode. It is shown while any of the lakes shows the episode.

Which of several jobs is the newest is told by the version of `jobs` that each ended at. Versions of two lakes cannot be
compared, so here microseconds stand for them: those at which a job ended, by its writer's clock, kept in the order in
which its own lake has its jobs. Clocks that disagree can only change the order of jobs of different lakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.read.text_table import counted
from lake.read.versions import joined_versions
from lake.storage.joined_objects import JoinedObjects
from lake.tables import JOBS, TABLES
from lake.tables.judgements import JUDGEMENTS

if TYPE_CHECKING:
    from lake.read.kept import Kept
    from lake.read.query import Limits, Session
    from lake.read.visibility import DataFile
    from lake.storage.data_files import FileEntry

_JUDGED = frozenset(table.name for table in JUDGEMENTS)


class JoinedSnapshot(Snapshot):
    """Snapshots of several lakes, read as one; see the module.

    Args:
        members: of different lakes; the first is the one that jobs write into.
    """

    def __init__(self, members: Sequence[Snapshot]) -> None:
        self.members = tuple(members)
        self.root = " and ".join(member.root for member in self.members)
        self.versions = joined_versions([(member.root, member.versions) for member in self.members])
        self.forgotten = sum(member.forgotten for member in self.members)
        self._joined = JoinedObjects([member.objects for member in self.members])
        self._of_place: dict[int, pl.Series] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """By its members."""
        return JoinedSnapshot, (self.members,)

    @property
    def objects(self) -> JoinedObjects:
        """Where the files lie."""
        return self._joined

    def newest(self) -> JoinedSnapshot:
        """The same lakes as they are now."""
        return JoinedSnapshot([member.newest() for member in self.members])

    def entries(self, name: str) -> list[FileEntry]:
        """All files of a table, visible or not."""
        return [entry for member in self.members for entry in member.entries(name)]

    def files(self, name: str) -> list[DataFile]:
        """Parquet files of a table that hold visible rows, those of each lake together."""
        judged = len(self.members)
        return [
            replace(file, place=judged if name in _JUDGED else number)
            for number, member in enumerate(self.members)
            for file in member.files(name)
        ]

    def scan(self, name: str) -> pl.LazyFrame:
        """See `Snapshot.scan`."""
        return self._scan(name, hides=TABLES[name].hides_retracted)

    def scan_all(self, name: str) -> pl.LazyFrame:
        """See `Snapshot.scan_all`; an episode that two of the lakes hold has the rows of both."""
        return self._scan(name, hides=False)

    def _scan(self, name: str, *, hides: bool) -> pl.LazyFrame:
        if name == JOBS.name:
            return self.sql("SELECT * FROM jobs").lazy()
        frames = []
        for number, member in enumerate(self.members):
            frame = member.scan_all(name)
            if hides and len(hidden := self.hidden(len(self.members) if name in _JUDGED else number)):
                frame = frame.filter(~pl.col("episode_id").is_in(hidden.implode()))
            frames.append(frame)
        table, frame = TABLES[name], pl.concat(frames)
        return (
            frame.sort("write_id").unique(list(table.key), keep="first", maintain_order=True)
            if table.distinct
            else frame
        )

    def hidden(self, place: int = 0) -> pl.Series:
        """Episodes that readers do not see in the facts of a lake, or, after the last lake, in judgements: int64 [E].

        Raises:
            UsageError: two lakes hold different rollouts under one id.
        """
        if place not in self._of_place:
            found = [self.retracted]
            if place < len(self.members):
                found += [self.members[place].retracted, self._copies[place]]
            self._of_place[place] = pl.concat(found).unique().sort()
        return self._of_place[place]

    @cached_property
    def retracted(self) -> pl.Series:
        """Episodes that a lake has retracted and none shows: int64 [E], sorted."""
        taken_back = pl.concat([member.retracted for member in self.members]).unique()
        if taken_back.is_empty():
            return taken_back
        mine = pl.col("episode_id").is_in(taken_back.implode())
        shown = [collected(member.scan("episodes").filter(mine).select("episode_id")) for member in self.members]
        return taken_back.filter(~taken_back.is_in(pl.concat(shown)["episode_id"].implode())).sort()

    @cached_property
    def _copies(self) -> list[pl.Series]:
        """Of each lake, the episodes that an earlier one shows as well. Raises UsageError: their content differs."""
        runs = [set(collected(m.scan("episodes").select(pl.col("run_id").unique()))["run_id"]) for m in self.members]
        seen = pl.DataFrame(schema={"episode_id": pl.Int64, "content_hash": pl.Int64, "lake": pl.String})
        found = []
        for number, member in enumerate(self.members):
            # A run is part of an episode's name: only runs that another lake has can have copies.
            shared = runs[number] & set().union(*(of for other, of in enumerate(runs) if other != number))
            rows = member.scan("episodes").filter(pl.col("run_id").is_in(sorted(shared)))
            mine = collected(rows.select("episode_id", "content_hash")) if shared else seen.clear().drop("lake")
            copies = mine.join(seen, on="episode_id", suffix="_there")
            self._require_equal(copies, member)
            found.append(copies["episode_id"])
            fresh = mine.join(copies, on="episode_id", how="anti")
            seen = pl.concat([seen, fresh.with_columns(lake=pl.lit(member.root))])
        return found

    def _require_equal(self, copies: pl.DataFrame, member: Snapshot) -> None:
        differing = copies.filter(pl.col("content_hash") != pl.col("content_hash_there"))
        if differing.is_empty():
            return
        there = differing["lake"][0]
        named = ", ".join(ids.to_text(value) for value in differing["episode_id"].head(3))
        raise UsageError(
            f"{there} and {member.root} hold different rollouts under the same names: "
            f"{counted(differing.height, 'episode')}, for example {named}. Read the lakes one by one, take the wrong "
            "ones back in one of them (`trajlake retract --lake THAT`), or ingest them again under another --run"
        )

    def session(
        self, limits: Limits | None = None, *, retracted_too: bool = False, kept: Kept | None = None
    ) -> Session:
        """See `Snapshot.session`."""
        from lake.read.query import Session

        hidden = self._copies_alone if retracted_too else self.hidden
        return Session(self.files, self.objects, hidden, limits, by_clock=True, kept=kept)

    def _copies_alone(self, place: int) -> pl.Series | None:
        return self._copies[place] if place < len(self.members) else None

    def size(self, name: str) -> tuple[int, int, int]:
        """See `Snapshot.size`: the sums over the lakes."""
        files, rows, size = (sum(part) for part in zip(*(m.size(name) for m in self.members), strict=True))
        return files, rows, size
