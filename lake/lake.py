"""The Lake: read it through snapshots, write it through jobs, look after it. `lake.opening` opens one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lake import ids
from lake.care import compaction, vacuum
from lake.care.claims import Claim
from lake.care.pins import LEASE, Lease, Pin, Pins
from lake.errors import LakeAccessError, UsageError
from lake.read.snapshot import Snapshot, consistent
from lake.records import EpisodeRecord
from lake.storage.store import Store
from lake.tables import TABLES

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from lake.care import erasure
    from lake.execution.executor import Executor
    from lake.read.history import Difference
    from lake.write.jobs import Code, Job
    from lake.write.plan import Report
    from lake.write.recording import Counts
    from lake.write.score_import import ScoresReport
    from lake.write.writer import EpisodeWriter


class Lake:
    """Delta tables that hold trajectories and what was made of them.

    Get one from `lake.open`. Reading goes through snapshots, writing through jobs; several processes may do both at
    once. Usable as a context.
    """

    def __init__(
        self, store: Store, *, compact_above: int = compaction.FEW_FILES, commits_in_groups: bool = False
    ) -> None:
        self._store = store
        self._pins = Pins(store)
        self._compact_above = compact_above
        self._commits_in_groups = commits_in_groups

    @cached_property
    def _writer(self) -> EpisodeWriter:
        from lake.write.fleet.client import Fleet
        from lake.write.writer import EpisodeWriter

        return EpisodeWriter(self._store, Fleet(self._store.objects) if self._commits_in_groups else None)

    @property
    def uri(self) -> str:
        """The lake's folder, or its address in a bucket."""
        return self._store.root

    @property
    def identity(self) -> str:
        """Id that the lake keeps wherever it is moved; a copy has it too, one that is made anew at its place has not.

        Raises:
            LakeAccessError: the lake cannot be reached.
        """
        from lake.storage.identity import reserve

        return reserve(self._store.objects)

    @property
    def members(self) -> tuple[Lake, ...]:
        """The lakes that are read as one (`lake.joined`); this one alone unless several were opened."""
        return (self,)

    def home(self, episode_id: int) -> Lake:
        """The lake that shows an episode, to write what is said of it. Raises UsageError: none of several does."""
        del episode_id  # here is no choice
        return self

    def __repr__(self) -> str:
        return f"Lake({self.uri!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held open: every write is committed when its call returns."""

    # ------------------------------------------------------------ reading

    def snapshot(self) -> Snapshot:
        """All tables at their newest versions, consistently."""
        return Snapshot(self._store)

    def at(self, when: Mapping[str, int] | str | datetime | int) -> Snapshot:
        """All tables as they were.

        Args:
            when: versions of the tables (`Snapshot.versions` of an earlier time), the name of a snapshot, a moment
                (a datetime, or ISO 8601 text; UTC unless it says otherwise), or a version of `episodes`.

        Raises:
            ContractError: an unknown table.
            UsageError: no such snapshot, and no time either.
            LakeAccessError: versions that are no longer there.
        """
        if isinstance(when, Mapping):
            return Snapshot(self._store, when)
        versions = self._pins.versions_at(when)
        if missing := self._pins.missing(versions):
            why = "A vacuum removed them, or they are damaged; name what is to be kept"
            raise LakeAccessError(f"{self.uri} at {when}: {missing}. {why}")
        return Snapshot(self._store, consistent(self._store, versions))

    def sql(self, query: str, params: list[Any] | dict[str, Any] | None = None) -> pl.DataFrame:
        """Rows of one SELECT over a fresh snapshot; see `Snapshot.sql`."""
        return self.snapshot().sql(query, params)

    def stream(self, query: str, params: list[Any] | dict[str, Any] | None = None) -> pa.RecordBatchReader:
        """Rows of one SELECT over a fresh snapshot, as they come; see `Snapshot.stream`."""
        return self.snapshot().stream(query, params)

    def scan(self, name: str) -> pl.LazyFrame:
        """A table's visible rows on a fresh snapshot, lazily; see `Snapshot.scan`."""
        return self.snapshot().scan(name)

    def history(self, name: str, limit: int | None = None) -> list[dict[str, Any]]:
        """Commits of a table, newest first: version, timestamp, operation, and `note`, what this package says of it.

        Raises:
            UsageError: no such table.
        """
        if name not in TABLES:
            raise UsageError(f"there is no table `{name}`; the tables are {', '.join(TABLES)}")
        return self._store.history(name, limit)

    def diff(self, before: Snapshot, after: Snapshot) -> Difference:
        """What changed between two snapshots: episodes that came and went, scores, signs of advantages."""
        from lake.read.history import difference

        return difference(before, after)

    # ------------------------------------------------------------ snapshots that stay

    def name_snapshot(self, name: str, snapshot: Snapshot | None = None) -> Pin:
        """Keep a snapshot (the newest unless given) readable under a name until it is dropped.

        Raises:
            UsageError: no usable name, or one that is taken.
            LakeAccessError: a vacuum has removed files of it.
        """
        return self._pins.name(name, (snapshot or self.snapshot()).versions)

    def snapshots(self) -> list[Pin]:
        """Named snapshots, oldest first."""
        return self._pins.snapshots()

    def drop_snapshot(self, name: str) -> None:
        """Take a snapshot's name back; what only it needs goes with the next vacuum. Raises UsageError: no such one."""
        self._pins.drop(name)

    def lease(
        self, snapshot: Snapshot, holder: str, duration: timedelta = LEASE, *, job_id: int | None = None
    ) -> AbstractContextManager[object]:
        """Keep a snapshot readable while the caller works on it; a context, renewed by a thread.

        Args:
            holder: who, for whoever looks at the lease.
            duration: how long it outlives a holder that is killed.
            job_id: of a job that one process at a time works on: its next attempt takes over what a killed one left.

        Raises:
            LakeAccessError: on entering it, files of the snapshot are gone.
        """
        return Lease(self._store, holder, snapshot.versions, duration, job_id)

    def claim(self, what: str, place: str) -> Claim:
        """The right to do something that one process at a time may do, wherever it runs; a context. See `Claim`.

        Args:
            what: in words, `run 'r' is being collected into this lake`.
            place: where one process at a time makes this claim: it takes over at once what a killed one left.

        Raises:
            UsageError: on entering it, a process elsewhere holds the claim.
        """
        return Claim(self._store, what, place)

    def missing(self, versions: Mapping[str, int]) -> str | None:
        """What these versions of the tables need and is not there, in words; None if all is there."""
        return self._pins.missing(versions)

    # ------------------------------------------------------------ writing

    def append(self, records: Iterable[EpisodeRecord | Mapping[str, Any]], *, run_id: str | None = None) -> Counts:
        """Record episodes exactly once: those present with the same content are skipped.

        Args:
            records: as `EpisodeRecord` or as the mappings of the JSONL format; wrong ones go to the table `rejects`.
        """
        if isinstance(records, Mapping | EpisodeRecord | str | bytes):
            raise UsageError(f"`append` takes a list of episodes, not one {type(records).__name__}: put it in brackets")
        from lake.write.scores import RECORDED, add_scores

        batch = list(records)
        with self.job(kind="record", run_id=run_id) as job:
            counts = job.record(batch)
            job.counts |= {"rows_in": len(batch), "rows_out": counts.new, "rows_dropped": counts.rejected}
            job.counts["already_present"] = counts.present
        add_scores(self, job.scores.taken(), version=RECORDED, source="recorder")
        return counts

    def ingest(
        self,
        path: str | Path,
        *,
        run_id: str | None = None,
        format_name: str | None = None,
        batch_size: int = 4096,
        executor: Executor | None = None,
        follow_links: bool = False,
    ) -> Report:
        """Read a file, folder, glob or URI of trajectories; what is present is skipped, what is wrong in `rejects`.

        Args:
            path: what to read; its format is recognised unless it is named.
            run_id: run of records that name none; called by the file or its folder unless given.
            batch_size: episodes a commit at most.
            executor: where files are read and their rows written; in this process unless given.
            follow_links: whether links in a folder to files outside of it are followed.

        Raises:
            FormatError: missing, empty, of no known format, or without trajectories.
        """
        from lake.write.ingest import ingest

        return ingest(
            self,
            path,
            run_id=run_id,
            format_name=format_name,
            batch_size=batch_size,
            executor=executor,
            follow_links=follow_links,
        )

    def ingest_frame(self, frame: object, *, shape: str | None = None, run_id: str | None = None) -> Report:
        """Take the rows of a frame as episodes, steps or messages; `lake.formats.shapes` says what they may hold.

        Args:
            frame: of Polars or pandas, or an Arrow table.
            shape: episodes, steps or messages; told from the columns unless given.
            run_id: run of rows that name none; `frame` unless given.

        Raises:
            UsageError: no frame, or columns of none of the shapes.
        """
        from lake.write.frames import ingest_frame

        return ingest_frame(self, frame, shape=shape, run_id=run_id)

    def add_scores(self, frame: object, *, name: str | None = None) -> ScoresReport:
        """Take rewards or labels that came after their episodes, each once; see `lake.write.score_import`.

        Args:
            frame: of Polars or pandas, or an Arrow table: episode_id, or task_id with run_id and rollout_index;
                step_index, value, reason, and scorer unless `name` is given.
            name: the scorer's.

        Raises:
            UsageError: no frame, or columns that name no episode or no value.
        """
        from lake.write.score_import import add_frame

        return add_frame(self, frame, name=name)

    def retract(self, episode_ids: Iterable[int | str], reason: str | None = None) -> int:
        """Hide episodes from all readers of later snapshots; the rows stay, and `restore` takes it back.

        Args:
            episode_ids: which (int64 ids; `lake.ids.from_text` reads the 13 characters).

        Raises:
            UsageError: no ids, or ids that the lake does not hold; nothing is changed.
        """
        from lake.care import retraction

        return len(retraction.retract(self, episode_ids, reason).changed)

    def restore(self, episode_ids: Iterable[int | str], reason: str | None = None) -> int:
        """Show retracted episodes to readers of later snapshots again; what a retry replaced stays hidden.

        Raises:
            UsageError: no ids, ids that the lake does not hold, or that were forgotten; nothing is changed.
        """
        from lake.care import retraction

        return len(retraction.restore(self, episode_ids, reason).changed)

    def forget(self, episode_ids: Iterable[int | str], reason: str | None = None) -> erasure.Forgotten:
        """Erase episodes from every table and from the disk, old snapshots included. There is no way back.

        Earlier snapshots keep the rest of what they held, and say how many episodes were forgotten
        (`Snapshot.forgotten`); `cuts` tells beforehand which named ones that will be.

        Raises:
            UsageError: no ids, or ids that the lake does not hold; nothing is changed.
            ConflictError: other processes rewrote a table again and again; run it again.
        """
        from lake.care import erasure

        episode_ids = ids.as_ids(episode_ids)
        with self.job(kind="retract", parameters={"reason": reason, "forget": True}) as job:
            erasure.tombstones(job, self.snapshot(), episode_ids, reason)
        with self.job(kind="forget", parameters={"reason": reason}) as job:
            done = erasure.erase(self._store, episode_ids, job_id=job.job_id)
            job.counts |= {"rows_dropped": sum(done.rows.values()), "deleted_files": done.deleted_files}
        return done

    def cuts(self, episode_ids: Iterable[int | str]) -> list[erasure.Cut]:
        """The named snapshots, running readers and interrupted jobs that would lose episodes to a `forget`."""
        from lake.care import erasure

        return erasure.cuts(self._store, ids.as_ids(episode_ids))

    def contents_of(self, episode_ids: Iterable[int]) -> dict[int, int]:
        """Content hash of those of the episodes that the lake has, retracted ones among them."""
        found = self._writer.index().known(episode_ids, ()).contents
        return {episode_id: content for episode_id, (content, _) in found.items()}

    def job(
        self,
        *,
        kind: str,
        parameters: dict[str, Any] | None = None,
        series: dict[str, Any] | None = None,
        run_id: str | None = None,
        code: Sequence[Code] = (),
        fingerprint: int | None = None,
        snapshot: Snapshot | None = None,
        job_id: int | None = None,
        attempt: int = 0,
        guard: Callable[[], None] = lambda: None,
    ) -> Job:
        """A job that writes to this lake; see `lake.write.jobs.Job`."""
        from lake.write.jobs import Job

        return Job(
            self._store,
            self._writer,
            kind=kind,
            parameters=parameters,
            series=series,
            run_id=run_id,
            code=code,
            fingerprint=fingerprint,
            snapshot=None if snapshot is None else snapshot.versions,
            job_id=job_id,
            attempt=attempt,
            guard=guard,
            after=partial(compaction.compact_if_many, self._store, few=self._compact_above),
        )

    def find_job(self, kind: str, series_id: int, fingerprint: int) -> int | None:
        """The newest succeeded job with that series and input, if there is one and none of its rows are lost.

        Args:
            series_id: `Job.series_id` of a job with the same parameters and code.
            fingerprint: `Snapshot.fingerprint` of what it would read.
        """
        from lake.read.lost_rows import lost_jobs

        snapshot = self.snapshot()
        mine = {"kind": kind, "series_id": series_id, "input_fingerprint": fingerprint}
        jobs = snapshot.scan("jobs").filter(event="succeeded", **mine)
        found = jobs.sort("sequence", "at", descending=True, nulls_last=True).select("job_id").head(1).collect()
        if found.is_empty() or found["job_id"].item() in lost_jobs(snapshot)["job_id"]:
            return None
        return int(found.item())

    # ------------------------------------------------------------ looking after it

    def compact(
        self,
        name: str,
        *,
        z_order: Sequence[str] = (),
        target_bytes: int = compaction.TARGET_BYTES,
        executor: Executor | None = None,
    ) -> compaction.Compaction:
        """Merge a table's small files into sorted ones; no reader, old or new, sees a difference.

        Args:
            z_order: key columns to interleave instead of the table's own order; takes all files, not the small ones.
            executor: where files are merged; in this process, one merged file after another, unless given.

        Raises:
            UsageError: no such table, or columns it cannot be ordered by.
            ConflictError: another process rewrote the table meanwhile; run it again.
        """
        return compaction.compact(self._store, name, z_order=z_order, target_bytes=target_bytes, executor=executor)

    def vacuum(self, *, retention: timedelta = vacuum.RETENTION, dry_run: bool = False) -> list[vacuum.Vacuumed]:
        """Drop dead writes and delete files that nobody needs: no pin, no version of the last week, no writer.

        Args:
            retention: how long what is not needed stays; at least an hour.

        Raises:
            UsageError: a retention below an hour.
            LakeAccessError: a pin is damaged, so what it needs is not known; nothing is deleted.
        """
        return vacuum.vacuum(self._store, retention=retention, dry_run=dry_run)
