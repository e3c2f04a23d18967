"""Jobs: everything that writes to a lake does so as a job, with lineage.

A job writes a started row with its fixed plan, then data under write_ids, then exactly one terminal row. Judgements
and rendered tokens exist for readers only once the terminal row of a succeeded job names their write_id, so a killed
job leaves nothing visible and is simply run again.
"""

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any, Self

import msgspec
import polars as pl

from lake import ids
from lake.errors import ConflictError, TrajlakeError
from lake.read.parquet import collected, scan
from lake.records import EpisodeRecord, Reject, check, printable, retyped, shown, tell_sampling
from lake.storage.commits import CommitLostError, revoked, until_committed
from lake.storage.data_files import Staged
from lake.storage.store import Store
from lake.tables import TABLES
from lake.tables.columns import Visibility
from lake.tables.contracts import conform
from lake.write.index import Tombstones
from lake.write.ledger import Attempt, are_there
from lake.write.parts import JobPart, Written
from lake.write.recording import OF_EPISODES, Counts, JobRecorder
from lake.write.rows import json_text
from lake.write.secret_columns import without_keys_in
from lake.write.writer import EpisodeWriter

Code = ModuleType | FunctionType | type
"""Something whose source can be read."""


class Job(JobRecorder):
    """A running job. Use as a context: leaving it writes the terminal row.

    Args:
        kind: ingest, collect, score, credit, render, train, ...
        parameters: resolved configuration, JSON-able.
        series: the part of the parameters that decides whether two results are comparable; all of them unless given.
        run_id: the run the job produces, if it does.
        code: modules, functions or classes whose source decides the result.
        fingerprint: hash of everything the job reads (`Snapshot.fingerprint`).
        snapshot: table versions the job reads.
        job_id: of an earlier attempt that is resumed; no second started row is written.
        guard: called before the terminal row of a success, on a lake in which no other terminal row can come between;
            raises ConflictError where the job's result must not stand beside what is there by now.
        after: called with the tables that were written to, once the job has succeeded.
    """

    def __init__(
        self,
        store: Store,
        writer: EpisodeWriter,
        *,
        kind: str,
        parameters: dict[str, Any] | None = None,
        series: dict[str, Any] | None = None,
        run_id: str | None = None,
        code: Sequence[Code] = (),
        fingerprint: int | None = None,
        snapshot: dict[str, int] | None = None,
        job_id: int | None = None,
        attempt: int = 0,
        guard: Callable[[], None] = lambda: None,
        after: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        self.job_id = ids.fresh_id() if job_id is None else job_id
        self.attempt = attempt
        self.series_id = series_id(kind, (parameters or {}) if series is None else series, code)
        stamps = {"job_id": self.job_id, "series_id": self.series_id, "attempt": attempt}
        super().__init__(JobPart(store, stamps), writer, run_id)
        self._touched.add("jobs")
        self._store = store
        self._resumed = job_id is not None
        self._guard = guard
        self._after = after
        self._others: list[int] = []
        self._began = time.monotonic()
        self.kind = kind
        self.code_hash = code_hash(code)
        self.counts: dict[str, Any] = {}
        """Figures for the terminal row; rows_in, rows_out and rows_dropped go to their own columns."""
        self._fixed = {
            "job_id": self.job_id,
            "series_id": self.series_id,
            "kind": kind,
            "run_id": run_id,
            "input_fingerprint": fingerprint,
            "code_hash": self.code_hash,
            "package_version": package_version(),
            "parameters": json_text(parameters or {}),
            "input_snapshot": json_text(snapshot or {}),
        }

    def __enter__(self) -> Self:
        if not self._resumed:
            row = self._row("started") | {"accepted_write_ids": []}
            self._store.append("jobs", _jobs_frame(row), job_id=self.job_id)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                self._end("succeeded")
            except ConflictError as lost:
                self._end("failed", error=str(lost))
                raise
            self._after(self._touched)
            return
        text = printable(str(error) if isinstance(error, TrajlakeError) else f"{type(error).__name__}: {error}")
        try:
            self._end("failed", error=text)
        except TrajlakeError as second:
            # A full disk fails the job and its terminal row alike: the first error is the one to show.
            error.add_note(f"the job's terminal row could not be written either: {second}")

    def record(self, records: Sequence[EpisodeRecord | Mapping[str, Any]]) -> Counts:
        """Record episodes exactly once. Records that are wrong, and conflicts, go to `rejects`."""
        good: list[EpisodeRecord] = []
        positions: list[int] = []
        bad: list[Reject] = []
        for position, record in enumerate(records):
            try:
                copy = retyped(record) if isinstance(record, EpisodeRecord) else msgspec.convert(record, EpisodeRecord)
                copy.run_id = copy.run_id or self.run_id
                tell_sampling(copy)
                problem = check(copy) if copy.run_id else "`run_id` is missing; name the run here, or when recording"
            except (ValueError, msgspec.ValidationError) as error:
                problem = str(error)
            if problem is None:
                good.append(copy)
                positions.append(position)
            else:
                bad.append(Reject(position=position, reason="invalid", message=problem, raw=shown(record)))
        if bad:
            self.reject(bad, "recorder", "recorder")
        counts = self.record_checked(good, positions)
        counts.rejected += len(bad)
        counts.refused = tuple(positions[place] for place in counts.refused)
        counts.first_reject = next(iter(bad), counts.first_reject)
        return counts

    def part(self) -> JobPart:
        """What another thread or process needs to write rows of this job; `take` what it answers."""
        return self._part

    def adopt(self, attempt: Attempt | None, beside: Sequence[tuple[str, int, Staged]]) -> bool:
        """Commit what a part of this job recorded: an attempt, and rows beside it (`JobPart.stage`) with their tables.

        Returns:
            False if the attempt is not what the lake calls for by now, or files may be gone: then nothing is committed,
            and the records have to be recorded again.
        """
        if not are_there((staged for _, _, staged in beside), self.now()):
            return False
        if attempt is not None:
            if not self._writer.accept(attempt):
                return False
            self._touched.update(OF_EPISODES)
        # Readers see rejects whatever becomes of their job: only those of a batch that stands as its part saw it.
        for name, write_id, staged in beside:
            self.take(self._part.commit(name, write_id, staged))
        return True

    def accept(self, write_ids: Sequence[int]) -> None:
        """Make rows of other write attempts visible on this job's account, whatever becomes of their own."""
        self._others += write_ids

    def now(self) -> datetime:
        """The time by the lake's clock."""
        return self._store.clock()

    def _end(self, event: str, error: str | None = None) -> None:
        """Write the terminal row, after all others. Raises ConflictError: rows are gone, or the guard refuses."""
        counts = dict(self.counts)
        row = self._row(event) | {
            "seconds": time.monotonic() - self._began,
            "rows_in": counts.pop("rows_in", None),
            "rows_out": counts.pop("rows_out", None),
            "rows_dropped": counts.pop("rows_dropped", None),
            "accepted_write_ids": self._accepted() if event == "succeeded" else [],
            "counts": json_text(counts),
            "error": error,
        }

        def commit() -> None:
            version = self._store.refresh("jobs")
            if event == "succeeded":
                self._require_live()
                self._guard()
            staged = self._store.stage("jobs", _jobs_frame(row | {"sequence": version}), job_id=self.job_id)
            try:
                self._store.append_terminal([staged], version)
            except CommitLostError:
                if not self._store.holds("jobs", row["write_id"], version):
                    raise

        until_committed(commit)

    def _require_live(self) -> None:
        """Check that what the terminal row is going to accept may be seen.

        Maintenance drops old dead writes, and what a job made of an episode that was forgotten meanwhile must go too.
        """
        if not revoked(self._store.objects).isdisjoint(self._accepted()):
            raise ConflictError(
                f"rows of job {ids.to_text(self.job_id)} were dropped as dead before it ended: it was stopped for "
                "longer than vacuum waits. Nothing of it is visible; run it again"
            )
        forgotten = Tombstones(self._store).refresh()
        if forgotten and any(self._holds(one, forgotten) for one in self.written):
            raise ConflictError(
                f"job {ids.to_text(self.job_id)} wrote rows of episodes that were forgotten while it ran. Nothing of "
                "it is visible; run it again"
            )

    def _accepted(self) -> list[int]:
        """The write attempts that become visible with this job."""
        return [one.write_id for one in self.written] + self._others

    def _holds(self, written: Written, episode_ids: Collection[int]) -> bool:
        """Whether a file of ours has rows of some episodes; not if `forget` has replaced it by one without them."""
        objects, name, file = self._store.objects, written.table, written.file
        if TABLES[name].visibility is not Visibility.ACCEPTED:
            return False
        if "episode_id" not in TABLES[name].names or name == "retractions" or not objects.exists(f"{name}/{file}"):
            return False
        rows = scan([objects.uri(f"{name}/{file}")], TABLES[name], objects.polars_options)
        found = rows.filter(pl.col("episode_id").is_in(list(episode_ids))).select("episode_id").head(1)
        return not collected(found).is_empty()

    def _row(self, event: str) -> dict[str, Any]:
        return self._fixed | {"write_id": ids.fresh_id(), "event": event, "at": self._store.clock()}


def _jobs_frame(row: dict[str, Any]) -> pl.DataFrame:
    rows = pl.DataFrame([row], schema=TABLES["jobs"].polars())
    return without_keys_in("jobs", conform(rows, TABLES["jobs"]))


def code_hash(code: Sequence[Code]) -> str:
    """Hash of the source that decides a result, as 13 characters."""
    return ids.to_text(ids.key_hash("code", *(inspect.getsource(part) for part in code)))


def series_id(kind: str, parameters: dict[str, Any], code: Sequence[Code]) -> int:
    """Hash of a job's kind, parameters and code: what must be equal for two results to be comparable."""
    canonical = msgspec.json.encode(parameters, order="deterministic").decode()
    return ids.key_hash("series", kind, canonical, code_hash(code))


@cache
def package_version() -> str:
    """Version of the installed trajlake, or `source` in a bare checkout."""
    try:
        return metadata.version("trajlake")
    except metadata.PackageNotFoundError:
        return "source"
