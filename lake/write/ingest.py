"""Ingest: files of trajectories into the lake, in batches, exactly once, with every record accounted for.

Records in = new + already present + rejects; the figures stand in the job's terminal row. Killed and started again, a
job skips what is present. The batch size changes nothing but speed. What scorers said of episodes is committed after
them: `lake.write.scores`.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lake.errors import FormatError, UsageError
from lake.formats import choose, query
from lake.formats.base.format import Format
from lake.formats.base.rows import Item
from lake.formats.base.source import Input, Source
from lake.records import EpisodeRecord, Reject, printable
from lake.write.copies import Copies
from lake.write.jobs import Job
from lake.write.runs import COMPARED, KnownRuns, run_of
from lake.write.scores import RECORDED, add_scores
from lake.write.sources import Argument, File, located

if TYPE_CHECKING:
    from lake.lake import Lake

BATCH_EPISODES = 4096
BATCH_STEPS = 65_536
BATCH_BYTES = 32 << 20
"""Of text. A batch closes at whichever comes first; all three bound memory and the size of a column."""
BATCH_SCORES = 200_000
"""Scores that are committed at once."""
PROGRESS_SECONDS = 10.0


class Taken(msgspec.Struct):
    """What became of one file."""

    format: str
    episodes: int = 0
    """New or present."""
    rejected: int = 0
    runs: set[str] = msgspec.field(default_factory=set)

    def take(self, run_id: str) -> None:
        """Count an episode."""
        self.episodes += 1
        self.runs.add(run_id)


class Report(msgspec.Struct):
    """What became of what a person named: a file, or the files of a folder."""

    source: str
    format: str
    """The formats, comma-separated, that its files have."""
    run_id: str | None
    """The run of records that name none; None if that depends on the file."""
    files: int = 1
    """Those that were read."""
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Files of a folder that hold no trajectory or are of no known format -> why they were left out."""
    records: int = 0
    new: int = 0
    present: int = 0
    replaced: int = 0
    """New episodes that replace an earlier reading: a session that has gone on since."""
    rejected: int = 0
    steps: int = 0
    """Steps of the new episodes."""
    scores: int = 0
    """Scores that are new, of new episodes and of those that were present."""
    runs: set[str] = msgspec.field(default_factory=set)
    """The runs that the records name."""
    first_fault: tuple[str, int, str] | None = None
    """File, position and message of the first record that was not taken."""
    copies: str = ""
    """What there is to know of episodes that repeat a sibling, as a sentence."""
    columns: str = ""
    """Columns of a query or a frame that mean nothing, where they are kept and what they might mean, as a sentence."""
    by_file: dict[str, Taken] = msgspec.field(default_factory=dict)
    """Each file that was read -> what became of it."""


class Progress(msgspec.Struct, frozen=True):
    """How far an ingest is."""

    records: int
    done: int
    """Bytes of text."""
    size: int | None
    """Bytes of the files; None if one is packed."""


class Reading(msgspec.Struct):
    """A file, its format, and what its reader needs."""

    file: File
    format: Format
    input: Input
    is_run_given: bool = True
    """Whether the run was named by a person, or is settled: see `lake.write.runs`."""
    columns: str = ""
    """See `Report.columns`."""


class Plan(msgspec.Struct):
    """What an argument stands for, before any record is read."""

    report: Report
    readings: list[Reading]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(reading.file.path.stat().st_size for reading in self.readings)

    @property
    def text_size(self) -> int | None:
        """Bytes of text that the files hold; None if that is not known before all is read."""
        return None if any(map(_is_unlike_its_text, self.readings)) else self.size

    @property
    def done(self) -> int:
        """Bytes of text that were read."""
        return sum(reading.input.meter.done for reading in self.readings)

    def parameters(self) -> dict[str, Any]:
        """Of the job: nothing that depends on the machine."""
        report = self.report
        several = {} if len(self.readings) == 1 else {"files": len(self.readings)}
        named = {"source": report.source, "bytes": self.size, "format": report.format, "run_id": report.run_id}
        return named | several


def _is_unlike_its_text(reading: Reading) -> bool:
    """Whether a file is packed, or has its text from elsewhere."""
    if reading.format.name == query.NAME:
        return True
    with Source(reading.file.path) as file:
        return file.is_packed


def plan(argument: Argument, *, run_id: str | None = None, format_name: str | None = None) -> Plan:
    """Which files will be read as what; needs no lake. Nothing is read of an argument whose files were named before.

    A file's records belong to the run that `lake.write.runs` says, unless they or `run_id` name another.

    Raises:
        FormatError: a file that was named is missing, empty, of no known format or without trajectories; a folder has
            none that is not.
        UsageError: an empty run.
    """
    readings: list[Reading] = []
    skipped = dict(argument.left_out)
    for file in argument.files:
        try:
            readings.append(reading_of(file, run_id=run_id, format_name=format_name))
        except FormatError as error:
            if not argument.label:
                raise FormatError(str(error).replace(str(file.path), argument.name)) from error
            skipped[file.name] = reason_of(error, file)
    if argument.files and not readings:
        name, why = next((file.name, skipped[file.name]) for file in argument.files)
        more = f" (and {len(skipped) - 1} more files)" if len(skipped) > 1 else ""
        raise FormatError(f"{argument.name} holds no trajectories: {name} {why}{more}")
    return planned(argument, readings, skipped, run_id)


def reading_of(file: File, *, run_id: str | None, format_name: str | None) -> Reading:
    """How a file will be read. Raises FormatError, UsageError: see `plan`; QueryError: a query that cannot be run."""
    fmt = choose(file.path, format_name)
    columns = query.check(file.path) if fmt.name == query.NAME else ""
    run = run_of(file, fmt) if run_id is None else printable(run_id)
    if not run.strip():
        raise UsageError("the run's name is empty; give --run NAME")
    return Reading(file, fmt, Input(file.path, run), is_run_given=run_id is not None, columns=columns)


def reason_of(error: FormatError, file: File) -> str:
    """Why a file is left out, without its path."""
    return str(error).removeprefix(str(file.path)).lstrip(": ")


def planned(argument: Argument, readings: list[Reading], skipped: dict[str, str], run_id: str | None) -> Plan:
    """The plan of an argument. The job of a folder has no run of its own: that would depend on what is in it today."""
    formats = ", ".join(dict.fromkeys(reading.format.name for reading in readings))
    run = readings[0].input.run_id if readings and not argument.label else run_id
    report = Report(argument.source, formats, run, files=len(readings), skipped=skipped)
    report.columns = "; ".join(dict.fromkeys(reading.columns for reading in readings if reading.columns))
    report.by_file = {reading.file.name: Taken(reading.format.name) for reading in readings}
    return Plan(report, readings)


def ingest(
    lake: "Lake",
    path: str | Path,
    *,
    run_id: str | None = None,
    format_name: str | None = None,
    batch_size: int = BATCH_EPISODES,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Read a file, a folder, a glob or a URI into a lake; the counts are of records, and of the new episodes' steps.

    Args:
        run_id: run of records that name none; what `lake.write.runs` says unless given.
        batch_size: episodes a commit at most.
        progress: called between batches, at most every 10 seconds.

    Raises:
        FormatError: see `plan`.
        UsageError: a batch size below 1, or an empty run.
    """
    with located([str(path)], getattr(sys.stdin, "buffer", BytesIO())) as (argument,):
        planned = plan(argument, run_id=run_id, format_name=format_name)
        return run_plan(lake, planned, batch_size=batch_size, progress=progress)


def run_plan(
    lake: "Lake",
    plan: Plan,
    *,
    batch_size: int = BATCH_EPISODES,
    progress: Callable[[Progress], None] | None = None,
    only_if_any: bool = False,
) -> Report:
    """Read what was planned into a lake, as one job; see `ingest`. `only_if_any`: no job if there is no record."""
    if batch_size < 1:
        raise UsageError(f"the batch size is {batch_size}; valid: 1 or more")
    report = plan.report
    size = plan.text_size
    shown = time.monotonic()
    batches = _batches(plan, batch_size, KnownRuns(lake))
    with _without_collector():
        first = next(batches, None)
    if first is None and only_if_any:
        return report

    def commit_scores() -> None:
        report.scores += add_scores(lake, job.scores.taken(), version=RECORDED, source=report.source).new

    with lake.job(kind="ingest", run_id=report.run_id, parameters=plan.parameters()) as job, _without_collector():
        copies = Copies()
        for batch in chain([first] if first else [], batches):
            _record(job, batch, report, copies)
            batch.clear()
            gc.collect(1)
            if len(job.scores) >= BATCH_SCORES:
                commit_scores()
            if progress is not None and time.monotonic() - shown >= PROGRESS_SECONDS:
                progress(Progress(report.records, plan.done, size))
                shown = time.monotonic()
        commit_scores()
        job.counts |= {
            "rows_in": report.records,
            "rows_out": report.new,
            "rows_dropped": report.rejected,
            "already_present": report.present,
            "steps": report.steps,
            "copies": copies.count,
        }
    report.copies = copies.in_words()
    return report


@contextmanager
def _without_collector() -> Iterator[None]:
    """Decoding makes millions of containers and no cycles; the collector would walk them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def items(plan: Plan, known: KnownRuns | None = None) -> Iterator[tuple[Reading, Item]]:
    """Every record and reject of the files, in order; each with its run, file and format.

    `known`: the runs that there are; a file whose first records are in one of them belongs to it.
    """
    for reading in plan.readings:
        for item in _read(reading, known):
            found = item if isinstance(item, Reject) else item[1]
            found.source_uri = reading.file.name
            if isinstance(found, EpisodeRecord):
                found.run_id = found.run_id or reading.input.run_id
            else:
                found.run_id = reading.input.run_id
                found.source_format = reading.format.name
            yield reading, item


def _read(reading: Reading, known: KnownRuns | None) -> Iterator[Item]:
    """A file's records and rejects, in the run that they belong to."""
    found = reading.format.reader(reading.input)
    if known is None or reading.is_run_given:
        return found
    reading.is_run_given = True
    own, before = reading.input.run_id, []
    for item in found:
        before.append(item)
        if not isinstance(item, Reject):
            others = [] if item[1].run_id is not None else known.others(item[1], own, reading.format)
            if others and (run := _run_among(others, reading, known)) != own:
                last = reading.input
                last.meter.done = 0
                reading.input = Input(last.path, run, last.meter, may_grow=last.may_grow)
                return reading.format.reader(reading.input)
            break
    return chain(before, found)


def _run_among(others: list[str], reading: Reading, known: KnownRuns) -> str:
    """That of some runs which has the first records of a file; the file's own if none has."""
    again = reading.format.reader(Input(reading.file.path, reading.input.run_id))
    first = [item[1] for item in islice(again, COMPARED) if not isinstance(item, Reject)]
    return next((run for run in others if known.has(first, run, reading.format)), reading.input.run_id)


def _batches(plan: Plan, batch_size: int, known: KnownRuns) -> Iterator[list[tuple[Reading, Item]]]:
    batch: list[tuple[Reading, Item]] = []
    steps = before = begun = 0
    last: Reading | None = None
    for reading, item in items(plan, known):
        if reading is not last:
            before += last.input.meter.done if last else 0
            last = reading
        batch.append((reading, item))
        steps += 0 if isinstance(item, Reject) else len(item[1].steps)
        done = before + reading.input.meter.done
        if len(batch) >= batch_size or steps >= BATCH_STEPS or done - begun >= BATCH_BYTES:
            yield batch
            batch, steps, begun = [], 0, done
    if batch:
        yield batch


def _record(job: Job, batch: list[tuple[Reading, Item]], report: Report, copies: Copies) -> None:
    rejects: list[Reject] = []
    records: list[EpisodeRecord] = []
    positions: list[int] = []
    growing: set[int] = set()
    files: list[Taken] = []
    for reading, item in batch:
        file = report.by_file.setdefault(reading.file.name, Taken(reading.format.name))
        if isinstance(item, Reject):
            rejects.append(item)
            file.rejected += 1
            continue
        position, record = item
        report.runs.add(record.run_id or "")
        file.take(record.run_id or "")
        files.append(file)
        copies.add(record)
        if reading.format.is_whole:
            growing.add(len(records))
        records.append(record)
        positions.append(position)
    if rejects:
        job.reject(rejects, report.source, report.format)
    counts = job.record_checked(records, positions, growing=growing)
    if report.first_fault is None and (first := next(iter(rejects), counts.first_reject)) is not None:
        report.first_fault = first.source_uri or report.source, first.position, first.message
    for place in counts.refused:
        files[place].episodes -= 1
        files[place].rejected += 1
    report.records += len(batch)
    report.new += counts.new
    report.replaced += counts.replaced
    report.steps += counts.steps
    report.present += counts.present
    report.rejected += len(rejects) + counts.rejected
