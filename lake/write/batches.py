"""The records of planned files, in batches, and a batch into a job: what an ingest is, wherever its parts run."""

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, islice

from lake.formats.base.rows import Item
from lake.formats.base.secrets import redacted, without_keys
from lake.formats.base.source import Input
from lake.records import EpisodeRecord, Reject
from lake.write.copies import Decisions, decisions_of
from lake.write.plan import Reading, Report, Taken
from lake.write.recording import JobRecorder
from lake.write.runs import COMPARED, KnownRuns

BATCH_EPISODES = 4096
BATCH_STEPS = 65_536
BATCH_BYTES = 32 << 20
"""Of text. A batch closes at whichever comes first; all three bound memory and the size of a column."""


_FULL_SECONDS = 30.0
"""Between two collections of everything while the collector is off."""


class _Collector:
    """Python's collector, which the whole process shares: off while any thread wants it so, then as it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wishes = 0
        self._was_on = True
        self._full = 0.0
        """Time of the last collection of everything."""

    def switch_off(self) -> None:
        """Note one more wish that it be off."""
        with self._lock:
            if not self._wishes:
                self._was_on, self._full = gc.isenabled(), time.monotonic()
            self._wishes += 1
            gc.disable()

    def give_back(self) -> None:
        """Take a wish back; after the last one the collector is as it was."""
        with self._lock:
            self._wishes -= 1
            if not self._wishes and self._was_on:
                gc.enable()

    def collect(self) -> None:
        """Take back what a batch left, and now and then the cycles that the rest of the process made meanwhile."""
        with self._lock:
            is_full = self._was_on and time.monotonic() - self._full >= _FULL_SECONDS
            if is_full:
                self._full = time.monotonic()
        gc.collect(2 if is_full else 1)


_collector = _Collector()


@contextmanager
def without_collector() -> Iterator[None]:
    """Decoding makes millions of containers and no cycles; the collector would walk them again and again.

    With it, an ingest takes a third more processor time. Threads may be in this block at the same time.
    """
    _collector.switch_off()
    try:
        yield
    finally:
        _collector.give_back()


def collect_garbage() -> None:
    """Collect between two batches, where the collector is off."""
    _collector.collect()


def items(readings: Iterable[Reading], known: KnownRuns | None = None) -> Iterator[tuple[Reading, Item]]:
    """Every record and reject of files, in order; each with its run, file and format.

    `known`: the runs that there are; a file whose first records are in one of them belongs to it.
    """
    for reading in readings:
        for item in _read(reading, known):
            found = item if isinstance(item, Reject) else item[1]
            found.source_uri = reading.file.name
            if isinstance(found, EpisodeRecord):
                found.run_id = found.run_id or reading.input.run_id
            else:
                found.run_id = reading.input.run_id
                found.source_format = reading.format.name
            yield reading, item


def settle(reading: Reading, known: KnownRuns) -> None:
    """Find the run that a file's records belong to, by the first of them; its input is as it was."""
    last = reading.input
    next(_read(reading, known), None)
    reading.input = Input(last.path, reading.input.run_id)


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


Batch = list[tuple[Reading, Item]]


def batches(readings: Iterable[Reading], batch_size: int, known: KnownRuns) -> Iterator[Batch]:
    """Everything that files hold, in order, in batches of bounded size."""
    batch: Batch = []
    steps = before = begun = 0
    last: Reading | None = None
    for reading, item in items(readings, known):
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


@lru_cache(1000)
def run_shown(run_id: str) -> str:
    """A run's name as a report has it: a file may name it by a key."""
    return str(without_keys(run_id, "run_id"))


def record_batch(recorder: JobRecorder, batch: Batch, report: Report, see: Callable[[Decisions], None]) -> None:
    """Record a batch, and count what became of it. `see` hears of what each episode decided."""
    rejects: list[Reject] = []
    records: list[EpisodeRecord] = []
    positions: list[int] = []
    growing: set[int] = set()
    files: list[Taken] = []
    faults: list[tuple[int, Reject]] = []
    places: list[int] = []
    for place, (reading, item) in enumerate(batch):
        file = report.by_file.setdefault(reading.file.name, Taken(reading.format.name))
        if isinstance(item, Reject):
            rejects.append(item)
            faults += [] if faults else [(place, item)]
            file.rejected += 1
            continue
        position, record = item
        run = run_shown(record.run_id or "")
        report.runs.add(run)
        file.take(run)
        files.append(file)
        see(decisions_of(record))
        if reading.format.is_whole:
            growing.add(len(records))
        records.append(record)
        positions.append(position)
        places.append(place)
    if rejects:
        recorder.reject(rejects, report.source, report.format)
    counts = recorder.record_checked(records, positions, growing=growing)
    if counts.first_reject is not None:
        faults.append((places[min(counts.refused)], counts.first_reject))
    if report.first_fault is None and faults:
        first = min(faults, key=lambda fault: fault[0])[1]
        report.first_fault = first.source_uri or report.source, first.position, redacted(first.message)
    for place in counts.refused:
        files[place].episodes -= 1
        files[place].rejected += 1
    report.records += len(batch)
    report.new += counts.new
    report.replaced += counts.replaced
    report.steps += counts.steps
    report.present += counts.present
    report.rejected += len(rejects) + counts.rejected
