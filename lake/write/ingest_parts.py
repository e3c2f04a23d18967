"""Ingest by the parts of an executor: workers read files and write rows, one process decides and commits, in order.

A part is some files, or lines of a large one. A worker records it as every ingest does, but commits nothing: it goes
by what the lake held when the ingest began, and hands on what it made of each batch, as counts and names of files. The
job's process takes that in the order of the records. A write attempt that the lake still calls for, which its ledger
says, is committed; what else a worker found (present, a conflict, forgotten) stays true whatever comes in between. A
batch whose attempt is not accepted is read again and recorded here: where a key is there twice, a session goes on from
part to part, or another ingest has the same files.

What a lost worker wrote is in files that no commit names, and a part runs again; a lost job is run again as ever.
"""

import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from lake.errors import FormatError
from lake.execution.executor import Executor, with_items
from lake.execution.held import held
from lake.formats import FORMATS
from lake.formats.base.lines import cuts
from lake.formats.base.source import Input, is_packed
from lake.read.snapshot import Snapshot
from lake.storage.data_files import Staged, Told, Written
from lake.write.batches import BATCH_BYTES, batches, collect_garbage, record_batch, settle, without_collector
from lake.write.copies import Copies, Decisions
from lake.write.fleet.messages import Bring
from lake.write.index import EpisodeIndex
from lake.write.jobs import Job
from lake.write.ledger import Deferred
from lake.write.parts import JobPart, put_aside, take_back
from lake.write.plan import Plan, Reading, Report
from lake.write.recording import JobRecorder
from lake.write.runs import KnownRuns
from lake.write.sources import File
from lake.write.writer import EpisodeWriter

if TYPE_CHECKING:
    from lake.lake import Lake

PART_BYTES = BATCH_BYTES
"""Of files: a part has as many, or one more file or line. A file whose lines do not stand alone is in one part."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A file, or its lines from a place up to another, as it travels to a worker."""

    file: File
    format: str
    run_id: str
    is_run_given: bool
    from_line: int = 0
    from_byte: int = 0
    until_byte: int | None = None

    @classmethod
    def of(cls, reading: Reading, place: tuple[int, int] = (0, 0), until: int | None = None) -> "Slice":
        """The lines of a file that has not been read yet from a place (`cuts`) on."""
        file = replace(reading.file, path=reading.file.path.absolute())  # a worker may be in another folder
        return cls(file, reading.format.name, reading.input.run_id, reading.is_run_given, *place, until)

    def reading(self) -> Reading:
        """What it takes to read it, from its beginning. Raises FormatError: the file is not on this machine."""
        if not self.file.path.exists():
            raise FormatError(
                f"{self.file.path} is not there on {platform.node()}, and each machine reads its parts of the files "
                "itself. Put them into a folder that all machines mount at the same path, or read them on this "
                "machine alone with --executor processes"
            )
        lines = Input(
            *(self.file.path, self.run_id),
            from_line=self.from_line,
            from_byte=self.from_byte,
            until_byte=self.until_byte,
        )
        return Reading(self.file, FORMATS[self.format], lines, self.is_run_given)


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker is given."""

    job: JobPart
    version: int
    """Of `episodes`: what the lake held when the ingest began."""
    source: str
    formats: str
    run_id: str | None
    slices: tuple[Slice, ...]
    batch_size: int
    given_at: datetime
    """By the lake's clock in the job's process: no file of the part is older."""

    def readings(self) -> list[Reading]:
        """What to read, from the beginning."""
        return [one.reading() for one in self.slices]


class Handed(msgspec.Struct):
    """What a worker made of a batch."""

    report: Report
    """Its counts, if all of it is accepted."""
    attempt: Bring | None
    """Its new episodes; None if there are none."""
    beside: list[tuple[str, int, Told]]
    """Its rejects: their table, write_id and file."""
    scores: str | None
    """Where those that came with its episodes were put aside."""
    decisions: list[Decisions]
    done: int
    """Bytes of text."""


def record_parts(
    lake: "Lake",
    job: Job,
    plan: Plan,
    executor: Executor,
    *,
    known: KnownRuns,
    batch_size: int,
    copies: Copies,
) -> Iterator[int]:
    """Record what was planned, and count it in the plan's report; after each batch, the bytes of text that are done.

    Raises:
        FormatError: a file is not there on a worker's machine.
        WorkerLostError: worker processes died again and again; what was committed before stands.
    """
    report, done = plan.report, 0
    first, version = lake.members[0], known.index.version

    def parts() -> Iterator[Part]:
        for slices in _parts(plan.readings, known):
            named = (report.source, report.format, report.run_id)
            yield Part(job.part(), version, *named, slices, batch_size, job.now())

    task = partial(_handed_on, known=known) if executor.is_here else handed_on
    # Workers open this version whenever they begin, and look into its files.
    with first.lease(first.at({"episodes": version}), "ingest"):
        for part, found in with_items(executor, task, parts()):
            again = enumerate(batches(part.readings(), batch_size, known))
            for place, handed in enumerate(found):
                if _is_adopted(job, part, handed):
                    report.add(handed.report)
                    for decisions in handed.decisions:
                        copies.add(decisions)
                elif (batch := next((batch for number, batch in again if number == place), None)) is not None:
                    record_batch(job, batch, report, copies.add)
                    collect_garbage()
                done += handed.done
                yield done


def _is_adopted(job: Job, part: Part, handed: Handed) -> bool:
    """Accept a batch as a worker made it; False if it has to be recorded again."""
    attempt = None if handed.attempt is None else handed.attempt.attempt()
    beside = [(name, write_id, Staged(None, Written.of(told), job.job_id)) for name, write_id, told in handed.beside]
    for staged in (*(attempt.staged.values() if attempt else ()), *(file for _, _, file in beside)):
        staged.written.at = part.given_at  # the clock of a worker may be another
    try:
        scores = None if handed.scores is None else take_back(part.job.objects, handed.scores)
    except FileNotFoundError:
        return False  # it was away for so long that vacuum took it
    if not job.adopt(attempt, beside):
        return False
    if scores is not None:
        job.scores.extend(scores)
    return True


def handed_on(part: Part) -> list[Handed]:
    """Record a part in a process of an executor."""
    store = part.job.store

    def known() -> KnownRuns:
        index = EpisodeIndex(store)
        index.refresh_to(part.version)
        return KnownRuns(index, partial(Snapshot, store))

    with without_collector():
        return _handed_on(part, held("ingest", (store.root, part.version), known))


def _handed_on(part: Part, known: KnownRuns) -> list[Handed]:
    found: list[Handed] = []
    readings = part.readings()
    before = 0
    for batch in batches(readings, part.batch_size, known):
        ledger, decisions = Deferred(known.index), list[Decisions]()
        recorder = _PartRecorder(part.job, EpisodeWriter(part.job.store, ledger=ledger), part.run_id)
        report = Report(part.source, part.formats, part.run_id)
        record_batch(recorder, batch, report, decisions.append)
        done = sum(reading.input.meter.done for reading in readings)
        scores = put_aside(part.job.objects, "scores", _last(recorder.scores.taken()))
        attempt = Bring.of(ledger.attempts[0]) if ledger.attempts else None
        found.append(Handed(report, attempt, recorder.beside, scores, decisions, done - before))
        before = done
        batch.clear()
        collect_garbage()
    return found


class _PartRecorder(JobRecorder):
    """Commits nothing: what it writes beside episodes stays in files, too."""

    def __init__(self, part: JobPart, writer: EpisodeWriter, run_id: str | None) -> None:
        super().__init__(part, writer, run_id)
        self.beside: list[tuple[str, int, Told]] = []

    def write(self, name: str, frame: pl.DataFrame) -> None:
        """See `JobRecorder.write`."""
        if (found := self._part.stage(name, frame)) is not None:
            write_id, staged = found
            self.beside.append((name, write_id, staged.written.told()))


def _last(scores: pl.DataFrame) -> pl.DataFrame:
    """One row of each score, as `add_scores` counts them: a file may lose their order."""
    return scores.unique(("episode_id", "step_index", "scorer"), keep="last", maintain_order=True)


def _parts(readings: list[Reading], known: KnownRuns) -> Iterator[tuple[Slice, ...]]:
    """Files of about a part's size together, in order; large ones in pieces, where that can be."""
    gathered: list[Slice] = []
    size = 0
    for reading in readings:
        for piece, piece_bytes in _pieces(reading, known):
            gathered.append(piece)
            size += piece_bytes
            if size >= PART_BYTES:
                yield tuple(gathered)
                gathered, size = [], 0
    if gathered:
        yield tuple(gathered)


def _pieces(reading: Reading, known: KnownRuns) -> Iterator[tuple[Slice, int]]:
    """A file in pieces with their bytes, if each of its lines stands alone and it is large; else the file."""
    path = reading.file.path
    size = path.stat().st_size
    if size < 2 * PART_BYTES or not reading.format.any_line or is_packed(path):
        yield Slice.of(reading), size
        return
    settle(reading, known)
    place = (0, 0)
    for end in cuts(path, PART_BYTES):
        yield Slice.of(reading, place, end[1]), end[1] - place[1]
        place = end
    yield Slice.of(reading, place), size - place[1]
