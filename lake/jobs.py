"""Jobs: everything that writes to a lake does so as a job, with lineage.

A job writes a started row with its fixed plan, then data under write_ids, then exactly one terminal row. Judgements
and rendered tokens exist for readers only once the terminal row of a succeeded job names their write_id, so a killed
job leaves nothing visible and is simply run again.
"""

import inspect
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from types import FunctionType, ModuleType, TracebackType
from typing import Any, Self

import msgspec
import polars as pl

from lake import ids
from lake.contracts import conform
from lake.errors import ContractError, TrajlakeError
from lake.frames import json_text
from lake.records import EpisodeRecord, Reject, check, printable, retyped, shown
from lake.store import Store
from lake.tables import TABLES
from lake.writer import EpisodeWriter

_WRITTEN_OTHERWISE = {"episodes", "steps", "jobs"}
"""Exactly once by `Job.record`, and by the job's start and end."""
Code = ModuleType | FunctionType | type
"""Something whose source can be read."""


class Counts(msgspec.Struct):
    """What became of recorded episodes."""

    new: int = 0
    steps: int = 0
    """Steps of the new episodes."""
    present: int = 0
    rejected: int = 0


class Job:
    """A running job. Use as a context: leaving it writes the terminal row.

    Args:
        store: the lake's tables.
        writer: the lake's episode writer.
        kind: ingest, collect, score, credit, render, train, ...
        parameters: resolved configuration, JSON-able.
        series: the part of the parameters that decides whether two results are comparable; all of them unless given.
        run_id: the run the job produces, if it does.
        code: modules, functions or classes whose source decides the result.
        fingerprint: hash of everything the job reads (`Snapshot.fingerprint`).
        snapshot: table versions the job reads.
        job_id: of an earlier attempt that is resumed; no second started row is written.
        attempt: number of this attempt.
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
    ) -> None:
        self._store = store
        self._writer = writer
        self._resumed = job_id is not None
        self._accepted: list[int] = []
        self._began = time.monotonic()
        self.job_id = ids.fresh_id() if job_id is None else job_id
        self.attempt = attempt
        self.kind = kind
        self.run_id = run_id
        self.code_hash = code_hash(code)
        self.series_id = series_id(kind, (parameters or {}) if series is None else series, code)
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
            self._append_event("started")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._append_event("succeeded")
            return
        text = printable(str(error) if isinstance(error, TrajlakeError) else f"{type(error).__name__}: {error}")
        try:
            self._append_event("failed", error=text)
        except TrajlakeError as second:
            # A full disk fails the job and its terminal row alike: the first error is the one to show.
            error.add_note(f"the job's terminal row could not be written either: {second}")

    def record(self, records: Sequence[EpisodeRecord]) -> Counts:
        """Record episodes exactly once. Records that are wrong, and conflicts, go to `rejects`.

        Args:
            records: episodes; those without a run_id get the job's.
        """
        good: list[EpisodeRecord] = []
        positions: list[int] = []
        bad: list[Reject] = []
        for position, record in enumerate(records):
            try:
                copy = retyped(record)
                problem = check(copy)
            except ValueError as error:
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
        return counts

    def record_checked(self, records: Sequence[EpisodeRecord], positions: Sequence[int]) -> Counts:
        """Record episodes that passed `lake.records.check`.

        Args:
            records: episodes; those without a run_id get the job's.
            positions: where each stands in its source, for rejects.
        """
        for record in records:
            if record.run_id is None:
                record.run_id = self.run_id
        outcome = self._writer.write(records)
        self._accepted += outcome.write_ids
        if outcome.conflicts:
            first = records[outcome.conflicts[0]]
            rejects = [self._conflict(records[i], positions[i]) for i in outcome.conflicts]
            self.reject(rejects, first.source_uri or "recorder", first.source_format)
        return Counts(
            new=outcome.new, steps=outcome.new_steps, present=outcome.present, rejected=len(outcome.conflicts)
        )

    def reject(self, rejects: Sequence[Reject], source_uri: str, source_format: str) -> None:
        """Record input that could not be taken. The same reject twice is one row for readers."""
        now = datetime.now(UTC)
        rows = [
            {
                "reject_id": ids.key_hash("reject", self.run_id, source_uri, r.position, r.reason, r.raw),
                "run_id": self.run_id,
                "source_uri": source_uri,
                "source_format": source_format,
                "position": r.position,
                "reason": r.reason,
                "message": printable(r.message),
                "raw": printable(r.raw),
                "at": now,
            }
            for r in rejects
        ]
        self.write("rejects", pl.DataFrame(rows, schema_overrides={"run_id": pl.String}))

    def write(self, name: str, frame: pl.DataFrame) -> None:
        """Append rows to a table under a fresh write_id, stamped with the job.

        Args:
            name: a judgement or lineage table, or `tokens`.
            frame: the table's columns without write_id, job_id, series_id and attempt, which are filled in.

        Raises:
            ContractError: the frame breaks the table's contract, or the table is not written this way.
        """
        if name not in TABLES or name in _WRITTEN_OTHERWISE:
            valid = ", ".join(other for other in TABLES if other not in _WRITTEN_OTHERWISE)
            msg = f"`write` has no table `{name}`; valid: {valid}. Episodes are written by `record`"
            raise ContractError(msg)
        if frame.is_empty():
            return
        table = TABLES[name]
        write_id = ids.fresh_id()
        stamps = {"write_id": write_id, "job_id": self.job_id, "series_id": self.series_id}
        if "attempt" in table.key or name in ("batches", "metrics"):
            stamps["attempt"] = self.attempt
        stamped = frame.with_columns(pl.lit(v).alias(k) for k, v in stamps.items() if k in table.names)
        self._store.append(name, conform(stamped, table))
        self._accepted.append(write_id)

    def _append_event(self, event: str, error: str | None = None) -> None:
        counts = dict(self.counts)
        terminal = event != "started"
        row = self._fixed | {
            "write_id": ids.fresh_id(),
            "event": event,
            "at": datetime.now(UTC),
            "seconds": time.monotonic() - self._began if terminal else None,
            "rows_in": counts.pop("rows_in", None),
            "rows_out": counts.pop("rows_out", None),
            "rows_dropped": counts.pop("rows_dropped", None),
            "accepted_write_ids": self._accepted if event == "succeeded" else [],
            "counts": json_text(counts) if terminal else None,
            "error": error,
        }
        schema = TABLES["jobs"].polars()
        self._store.append("jobs", conform(pl.DataFrame([row], schema=schema), TABLES["jobs"]))

    def _conflict(self, record: EpisodeRecord, position: int) -> Reject:
        return Reject(
            position=position,
            reason="conflict",
            message=(
                f"run {record.run_id!r}, task {record.task_id!r}, rollout {record.rollout_index}, attempt "
                f"{record.attempt} is present with other content; give it another --run or a higher attempt"
            ),
            raw=msgspec.json.encode(record).decode(),
        )


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
