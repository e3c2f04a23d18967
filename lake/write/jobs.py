"""Jobs: every write to a lake belongs to a job, which records its lineage.

A job writes a started row with its fixed plan, then data under write_ids, then exactly one terminal row. Readers see
judgements and rendered tokens only if the terminal row of a succeeded job names their write_id. So a killed job leaves
nothing visible, and you run it again. A part of a job may write its rows in another process (`JobPart`).
"""

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import metadata
from io import BytesIO
from types import FunctionType, ModuleType
from typing import Any, Literal, Protocol, Self

import msgspec
import polars as pl

from lake import ids
from lake.errors import ConflictError, ContractError, TrajlakeError, UsageError
from lake.read.parquet import collect_rows, scan_files
from lake.read.snapshot import Snapshot
from lake.records import (
    EpisodeRecord,
    Reject,
    check,
    excerpt,
    fill_sampling,
    format_record,
    identify,
    printable,
    retype,
)
from lake.storage.commits import CommitLostError, read_revoked, until_committed
from lake.storage.data_files import StagedRows
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import RETRACTIONS, TABLES, WRITTEN_BY_JOBS
from lake.tables.columns import Visibility
from lake.tables.contracts import conform
from lake.write.ledger import Attempt, EpisodeIndex, Tombstones, are_fresh
from lake.write.rows import ScoreRows, encode_json, remove_table_keys
from lake.write.tokenizers import store_tokenizer
from lake.write.writer import EpisodeWriter

Code = ModuleType | FunctionType | type
"""Something whose source can be read."""
EPISODE_TABLES = ("episodes", "steps", "tokens")
"""The tables of new episodes that are compacted."""


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The rows that one append of a job added to a table."""

    table: str
    write_id: int
    file: str
    """Name of the data file below the table's folder."""
    rows: int


class JobPart:
    """Writes rows of a running job from another thread, process or machine.

    A part appends under a new write_id. If the part's process dies, or its answer is lost, its rows stay invisible and
    the part runs again: a job accepts only the rows that `Job.take` received.
    """

    def __init__(self, store: Store, stamps: Mapping[str, int]) -> None:
        self.store = store
        self.objects: Objects = store.objects
        self.job_id = stamps["job_id"]
        self._stamps = dict(stamps)

    def now(self) -> datetime:
        """Return the time by the lake's clock."""
        return self.store.clock()

    def write(self, name: str, frame: pl.DataFrame) -> WrittenRows | None:
        """Append rows to a table under a new write_id, stamped with the job; None for an empty frame.

        Args:
            name: a judgement or lineage table, or `tokens`.
            frame: the table's columns without write_id, job_id, series_id and attempt, which are filled in.

        Raises:
            ContractError: the frame breaks the table's contract, or the table is not written this way.
        """
        if (batch := self.stage(name, frame)) is None:
            return None
        write_id, staged = batch
        return self.commit(name, write_id, staged)

    def stage(self, name: str, frame: pl.DataFrame) -> tuple[int, StagedRows] | None:
        """Write rows to a file that no commit names yet, and return it with its write_id: the first half of `write`."""
        if name not in WRITTEN_BY_JOBS:
            valid = ", ".join(WRITTEN_BY_JOBS)
            raise ContractError(f"`write` has no table `{name}`; valid: {valid}. Episodes are written by `record`")
        if frame.is_empty():
            return None
        table = TABLES[name]
        stamps = {"write_id": ids.fresh_id(), **self._stamps}
        stamped = frame.with_columns(pl.lit(v).alias(k) for k, v in stamps.items() if k in table.names)
        rows = remove_table_keys(name, conform(stamped, table))
        return stamps["write_id"], self.store.stage(name, rows, job_id=self.job_id)

    def commit(self, name: str, write_id: int, staged: StagedRows) -> WrittenRows:
        """Commit staged rows, in this or another process: the second half of `write`."""
        self.store.append_staged(name, [staged])
        return WrittenRows(name, write_id, staged.written.add.path, staged.written.rows)


def put_aside(objects: Objects, table: str, rows: pl.DataFrame) -> str | None:
    """Write rows to a temporary object for `take_back` and return its path; None for an empty frame.

    No commit names the object, so readers do not see it, and `vacuum` removes it if the job does not take it back.
    """
    if rows.is_empty():
        return None
    path, buffer = f"{table}/{ids.to_text(ids.fresh_id())}.parquet", BytesIO()
    rows.write_parquet(buffer)
    objects.put(path, buffer.getvalue())
    return path


def take_back(objects: Objects, path: str) -> pl.DataFrame:
    """Read rows that were put aside, and delete the object. Raises FileNotFoundError: vacuum has deleted it."""
    if (parquet := objects.get(path)) is None:
        raise FileNotFoundError(path)
    objects.delete([path])
    return pl.read_parquet(parquet)


def read_back(objects: Objects, written: WrittenRows) -> pl.DataFrame:
    """Read the rows of an append, without the stamps. Raises FileNotFoundError: `forget` has replaced the file."""
    path = f"{written.table}/{written.file}"
    if not objects.exists(path):
        raise FileNotFoundError(path)
    rows = collect_rows(scan_files([objects.uri(path)], TABLES[written.table], objects.polars_options))
    return rows.drop("write_id", "job_id", "series_id", "attempt", strict=False)


class RecordCounts(msgspec.Struct):
    """Counts of recorded episodes."""

    new: int = 0
    steps: int = 0
    """Steps of the new episodes."""
    present: int = 0
    replaced: int = 0
    """New episodes that replace an earlier reading of the same document (`lake.write.growth`)."""
    siblings: int = 0
    """New episodes whose document shares its key with another rollout."""
    shorter: int = 0
    """Documents that hold less than was read of them before."""
    rejected: int = 0
    refused_positions: Sequence[int] = ()
    """Positions of well-formed episodes that became rejects, such as conflicts."""
    first_reject: Reject | None = None


class JobRecorder:
    """Records episodes exactly once, rejects and other rows, in a job's own process or in that of a part.

    Args:
        run_id: the run of records without one.
    """

    def __init__(self, part: JobPart, writer: EpisodeWriter, run_id: str | None) -> None:
        self._part = part
        self._writer = writer
        self._touched: set[str] = set()
        self.run_id = run_id
        self.written: list[WrittenRows] = []
        """Rows of tables other than the episodes'; they become visible when the job succeeds."""
        self.scores = ScoreRows()
        """Scores of the recorded episodes. The caller of the job writes them with `lake.write.scores.add_scores`."""
        self.rounds: set[int] = set()
        """Collection rounds of the recorded episodes; an episode's row does not name its job."""

    def copy_index(self) -> EpisodeIndex:
        """Return an index of the current episodes, retracted ones included, that later commits do not change."""
        return self._writer.copy_index()

    def record_checked(
        self, records: Sequence[EpisodeRecord], positions: Sequence[int], *, session_positions: Collection[int] = ()
    ) -> RecordCounts:
        """Record episodes that passed `lake.records.check`.

        Args:
            positions: position of each record in its source.
            session_positions: see `EpisodeWriter.write`.
        """
        for record in records:
            if record.run_id is None:
                record.run_id = self.run_id
        outcome = self._writer.write(records, job_id=self._part.job_id, session_positions=session_positions)
        if outcome.new:
            self._touched.update(EPISODE_TABLES)
        rejects = {i: _build_reject(records[i], positions[i], "conflict") for i in outcome.conflicts}
        rejects |= {i: _build_reject(records[i], positions[i], "forgotten") for i in outcome.forgotten}
        if rejects:
            first = records[min(rejects)]
            self.reject(list(rejects.values()), first.source_uri or "recorder", first.source_format)
        for index, record in enumerate(records):
            if record.collection_round is not None and index not in rejects:
                self.rounds.add(record.collection_round)
            if record.scores and index not in rejects:
                self.scores.add(record)
        first_reject = rejects[min(rejects)] if rejects else None
        return RecordCounts(
            *(outcome.new, outcome.new_steps, outcome.present),
            *(outcome.replaced, outcome.siblings, outcome.shorter),
            *(len(rejects), tuple(rejects), first_reject),
        )

    def reject(self, rejects: Sequence[Reject], source_uri: str, source_format: str) -> None:
        """Record input that could not be read. Readers see the same reject once, even if it is recorded twice."""
        now = self._part.now()
        rows = [
            {
                "reject_id": ids.key_hash("reject", r.run_id or self.run_id, uri, r.position, r.reason, r.raw),
                "run_id": r.run_id or self.run_id,
                "episode_id": r.episode_id,
                "source_uri": uri,
                "source_format": r.source_format or source_format,
                "position": r.position,
                "reason": r.reason,
                "message": printable(r.message),
                "raw": printable(r.raw),
                "at": now,
            }
            for r in rejects
            for uri in [r.source_uri or source_uri]
        ]
        self.write("rejects", pl.DataFrame(rows, schema_overrides={"run_id": pl.String, "episode_id": pl.Int64}))

    def write(self, name: str, frame: pl.DataFrame) -> None:
        """Append rows to a table under a new write_id, stamped with the job; see `JobPart.write`."""
        if (written := self._part.write(name, frame)) is not None:
            self.take(written)

    def take(self, written: WrittenRows) -> None:
        """Accept rows that a part of this job wrote; they become visible when the job succeeds."""
        self._touched.add(written.table)
        self.written.append(written)


def explain_refusal(record: EpisodeRecord, reason: Literal["conflict", "forgotten"]) -> str:
    """Return why a well-formed record is refused, and what to do. For an erased episode it repeats only the id."""
    if reason == "forgotten":
        name = ids.to_text(identify(record, record.run_id or "").episode_id)
        return f"episode {name} was erased with `trajlake forget` and cannot be recorded again"
    key = f"run {record.run_id!r}, task {record.task_id!r}, rollout {record.rollout_index}, attempt {record.attempt}"
    return f"{key} is present with other content; give it another --run or a higher attempt"


def _build_reject(record: EpisodeRecord, position: int, reason: Literal["conflict", "forgotten"]) -> Reject:
    # A reject of a forgotten episode holds no text of it: the episode was erased for a reason.
    raw = excerpt(msgspec.json.encode(record).decode()) if reason == "conflict" else ""
    episode_id = identify(record, record.run_id or "").episode_id
    return Reject(
        position=position,
        reason=reason,
        message=explain_refusal(record, reason),
        raw=raw,
        run_id=record.run_id,
        episode_id=episode_id,
        source_uri=record.source_uri,
        source_format=record.source_format,
    )


class Job(JobRecorder):
    """A running job. Use as a context: leaving it writes the terminal row.

    Args:
        kind: ingest, collect, score, credit, render, train, ...
        parameters: resolved configuration, JSON-able.
        series: the parameters that decide whether two results are comparable; default: all.
        run_id: the run that the job produces, if any.
        code: modules, functions or classes whose source decides the result.
        fingerprint: hash of everything the job reads (`Snapshot.fingerprint`).
        snapshot: table versions the job reads.
        job_id: id of a job to resume; the job then writes no second started row.
        guard: called before the terminal row of a success. No other terminal row can be committed between the two. It
            raises ConflictError if the job's result conflicts with the current content of the lake.
        after: called with the tables that the job wrote to, after it has succeeded.
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
        self.series_id = hash_series(kind, (parameters or {}) if series is None else series, code)
        stamps = {"job_id": self.job_id, "series_id": self.series_id, "attempt": attempt}
        super().__init__(JobPart(store, stamps), writer, run_id)
        self._touched.add("jobs")
        self._store = store
        self._resumed = job_id is not None
        self._guard = guard
        self._after = after
        self._other_write_ids: list[int] = []
        self._began = time.monotonic()
        self.kind = kind
        self.code_hash = hash_code(code)
        self.counts: dict[str, Any] = {}
        """Figures for the terminal row; rows_in, rows_out and rows_dropped have separate columns."""
        self._fixed = {
            "job_id": self.job_id,
            "series_id": self.series_id,
            "kind": kind,
            "run_id": run_id,
            "input_fingerprint": fingerprint,
            "code_hash": self.code_hash,
            "package_version": get_package_version(),
            "parameters": encode_json(parameters or {}),
            "input_snapshot": encode_json(snapshot or {}),
        }

    def __enter__(self) -> Self:
        if not self._resumed:
            row = self._build_row("started") | {"accepted_write_ids": []}
            self._store.append("jobs", _build_jobs_frame(row), job_id=self.job_id)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                self._end("succeeded")
            except ConflictError as conflict:
                self._end("failed", error=str(conflict))
                raise
            self._after(self._touched)
            return
        text = printable(str(error) if isinstance(error, TrajlakeError) else f"{type(error).__name__}: {error}")
        try:
            self._end("failed", error=text)
        except TrajlakeError as second:
            # A full disk fails the job and its terminal row alike; the first error is the useful one.
            error.add_note(f"the job's terminal row could not be written either: {second}")

    def record(self, records: Sequence[EpisodeRecord | Mapping[str, Any]]) -> RecordCounts:
        """Record episodes exactly once. Invalid records and conflicts go to `rejects`."""
        good: list[EpisodeRecord] = []
        positions: list[int] = []
        bad: list[Reject] = []
        for position, record in enumerate(records):
            try:
                copy = retype(record) if isinstance(record, EpisodeRecord) else msgspec.convert(record, EpisodeRecord)
                copy.run_id = copy.run_id or self.run_id
                fill_sampling(copy)
                problem = check(copy) if copy.run_id else "`run_id` is missing; name the run here, or when recording"
            except (ValueError, msgspec.ValidationError) as error:
                problem = str(error)
            if problem is None:
                good.append(copy)
                positions.append(position)
            else:
                bad.append(Reject(position=position, reason="invalid", message=problem, raw=format_record(record)))
        if bad:
            self.reject(bad, "recorder", "recorder")
        counts = self.record_checked(good, positions)
        counts.rejected += len(bad)
        counts.refused_positions = tuple(positions[index] for index in counts.refused_positions)
        counts.first_reject = next(iter(bad), counts.first_reject)
        return counts

    def part(self) -> JobPart:
        """Return the object with which another thread or process writes rows of this job; `take` what it returns."""
        return self._part

    def adopt(self, attempt: Attempt | None, other_rows: Sequence[tuple[str, int, StagedRows]]) -> bool:
        """Commit the staged rows of a part of this job.

        Args:
            attempt: the part's new episodes; None if it has none.
            other_rows: table, write_id and staged rows of other tables (`JobPart.stage`).

        Returns:
            False if the lake no longer accepts the attempt, or files may have been deleted. Then nothing is committed,
            and the caller has to record the part's records again.
        """
        if not are_fresh((staged for _, _, staged in other_rows), self.now()):
            return False
        if attempt is not None:
            if not self._writer.accept(attempt):
                return False
            self._touched.update(EPISODE_TABLES)
        # Readers see rejects even if the job fails, so only those of an accepted batch are committed.
        for name, write_id, staged in other_rows:
            self.take(self._part.commit(name, write_id, staged))
        return True

    def accept(self, write_ids: Sequence[int]) -> None:
        """Make rows of other write attempts visible with this job, even if their own job fails."""
        self._other_write_ids += write_ids

    def store_tokenizer(self, definition: str, encoding_ids: Sequence[int]) -> None:
        """Store a tokenizer's definition in the lake (`lake.write.tokenizers`), under the encodings that it makes."""
        store_tokenizer(self._store.objects, definition, encoding_ids)

    def now(self) -> datetime:
        """Return the time by the lake's clock."""
        return self._store.clock()

    def _end(self, event: str, error: str | None = None) -> None:
        """Write the terminal row, after all others. Raises ConflictError: rows were deleted, or the guard refuses."""
        spans = {"first_round": min(self.rounds), "last_round": max(self.rounds)} if self.rounds else {}
        counts = spans | self.counts
        row = self._build_row(event) | {
            "seconds": time.monotonic() - self._began,
            "rows_in": counts.pop("rows_in", None),
            "rows_out": counts.pop("rows_out", None),
            "rows_dropped": counts.pop("rows_dropped", None),
            "accepted_write_ids": self._list_write_ids() if event == "succeeded" else [],
            "counts": encode_json(counts),
            "error": error,
        }

        def commit() -> None:
            version = self._store.refresh("jobs")
            if event == "succeeded":
                self._require_live()
                self._guard()
            staged = self._store.stage("jobs", _build_jobs_frame(row | {"sequence": version}), job_id=self.job_id)
            try:
                self._store.append_terminal([staged], version)
            except CommitLostError:
                if not self._store.holds("jobs", row["write_id"], version):
                    raise

        until_committed(commit)

    def _require_live(self) -> None:
        """Raise ConflictError if rows of the job must not become visible.

        Maintenance may have dropped them as dead writes, or they may belong to an episode that was forgotten since.
        """
        if not read_revoked(self._store.objects).isdisjoint(self._list_write_ids()):
            raise ConflictError(
                f"rows of job {ids.to_text(self.job_id)} were dropped as dead before it ended: it was stopped for "
                "longer than vacuum waits. Nothing of it is visible; run it again"
            )
        forgotten = Tombstones(self._store).refresh()
        if forgotten and any(self._has_rows_of(rows, forgotten) for rows in self.written):
            raise ConflictError(
                f"job {ids.to_text(self.job_id)} wrote rows of episodes that were forgotten while it ran. Nothing of "
                "it is visible; run it again"
            )

    def _list_write_ids(self) -> list[int]:
        """Return the write attempts that become visible with this job."""
        return [rows.write_id for rows in self.written] + self._other_write_ids

    def _has_rows_of(self, written: WrittenRows, episode_ids: Collection[int]) -> bool:
        """Return whether a file of this job has rows of some episodes; False if `forget` has replaced the file."""
        objects, name, file = self._store.objects, written.table, written.file
        if TABLES[name].visibility is not Visibility.ACCEPTED:
            return False
        if "episode_id" not in TABLES[name].names or name == "retractions" or not objects.exists(f"{name}/{file}"):
            return False
        rows = scan_files([objects.uri(f"{name}/{file}")], TABLES[name], objects.polars_options)
        match = rows.filter(pl.col("episode_id").is_in(list(episode_ids))).select("episode_id").head(1)
        return not collect_rows(match).is_empty()

    def _build_row(self, event: str) -> dict[str, Any]:
        return self._fixed | {"write_id": ids.fresh_id(), "event": event, "at": self._store.clock()}


class WritableLake(Protocol):
    """A lake as the functions that write to it use it; `lake.lake.Lake` is one."""

    @property
    def members(self) -> Sequence["WritableLake"]:
        """The lakes that are open together; the first one is written to."""

    def snapshot(self) -> Snapshot:
        """Return all tables at their newest versions."""

    def at(self, when: Mapping[str, int]) -> Snapshot:
        """Return the tables at given versions."""

    def lease(self, snapshot: Snapshot, holder: str) -> AbstractContextManager[object]:
        """Keep a snapshot readable while the context is open."""

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
        guard: Callable[[], None] = ...,
    ) -> Job:
        """Return a job that writes to the lake; see `Job`."""


def _build_jobs_frame(row: dict[str, Any]) -> pl.DataFrame:
    rows = pl.DataFrame([row], schema=TABLES["jobs"].polars())
    return remove_table_keys("jobs", conform(rows, TABLES["jobs"]))


def hash_code(code: Sequence[Code]) -> str:
    """Hash the source code that decides a result; 13 characters."""
    return ids.to_text(ids.key_hash("code", *(inspect.getsource(source) for source in code)))


def hash_series(kind: str, parameters: dict[str, Any], code: Sequence[Code]) -> int:
    """Hash a job's kind, parameters and code; two results are comparable if their hashes are equal."""
    canonical = msgspec.json.encode(parameters, order="deterministic").decode()
    return ids.key_hash("series", kind, canonical, hash_code(code))


@cache
def get_package_version() -> str:
    """Return the version of the installed trajlake; `source` in a checkout without installation."""
    try:
        return metadata.version("trajlake")
    except metadata.PackageNotFoundError:
        return "source"


def require_episodes(snapshot: Snapshot, episode_ids: Sequence[int]) -> pl.DataFrame:
    """Return episode_id, group_id, run_id and write_id of episodes, retracted ones included.

    Raises UsageError: no ids, or an id that the lake does not hold.
    """
    if not episode_ids:
        raise UsageError("no episodes are named; give ids, or a condition that some episodes meet")
    requested = pl.Series("episode_id", sorted(set(episode_ids)), dtype=pl.Int64)
    columns = ["episode_id", "group_id", "run_id", "write_id"]
    rows = snapshot.scan_all("episodes").filter(pl.col("episode_id").is_in(requested.implode()))
    episodes = rows.select(columns).collect()
    if unknown := sorted(set(requested) - set(episodes["episode_id"])):
        suffix = f" (+{len(unknown) - 3} more)" if len(unknown) > 3 else ""
        msg = f"the lake holds no episode {', '.join(map(ids.to_text, unknown[:3]))}{suffix}; nothing was changed"
        raise UsageError(msg)
    return episodes


def write_retractions(job: "Job", episode_ids: Sequence[int], kind: str, reason: str | None) -> None:
    """Hide episodes from readers.

    The rows stay, and old snapshots still show them, so the training data of an update stays readable.

    Args:
        kind: `retracted`, or `forgotten` for episodes that the caller will erase.
    """
    at = job.now()
    frame = pl.DataFrame({"episode_id": sorted(set(episode_ids))}, schema={"episode_id": pl.Int64})
    job.write(RETRACTIONS.name, frame.with_columns(kind=pl.lit(kind), at=pl.lit(at), reason=pl.lit(reason, pl.String)))
