"""Ingest: a file of trajectories into the lake, in batches, exactly once, with every record accounted for.

Records in = new + already present + rejects; the figures stand in the job's terminal row. Killed and started again, a
job skips what is present. The batch size changes nothing but speed. Standard input and named pipes are spooled to disk,
so that formats can be sniffed.
"""

import gc
import os
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from lake.errors import UsageError
from lake.formats import FORMATS, choose
from lake.formats.rows import Item
from lake.formats.source import Meter, Source, stem
from lake.lake import Lake
from lake.records import EpisodeRecord, Reject, StepRecord, printable
from lake.write.jobs import Job

PATIENCE_SECONDS = 1.0
"""How long a named pipe may stay silent before the user hears of it."""


@contextmanager
def spooled(name: str, stdin: BinaryIO, tell: Callable[[str], None] = lambda _: None) -> Iterator[Path]:
    """The path of a file; stdin (`-`) and pipes are held in a temporary one. `tell` hears of a pipe that waits."""
    source = Path(name)
    if name != "-" and not source.is_fifo():
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="trajlake-") as folder:
        path = Path(folder, "stdin" if name == "-" else source.name)
        with path.open("wb") as file, nullcontext(stdin) if name == "-" else _opened(source, tell) as pipe:
            shutil.copyfileobj(pipe, file)
        yield path


def _opened(fifo: Path, tell: Callable[[str], None]) -> BinaryIO:
    """A named pipe, once there is something to read, or a writer has come and gone."""
    # Opened as a blocking file it would wait for its writer inside open(), where nobody can say so.
    pipe = open(fifo, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        look = select.poll()
        look.register(pipe, select.POLLIN)
        if not look.poll(PATIENCE_SECONDS * 1000):
            tell(f"{fifo} is a named pipe into which nobody has written yet: waiting for a writer (Ctrl-C gives up)")
            look.poll()
        os.set_blocking(pipe.fileno(), True)
    except BaseException:
        pipe.close()
        raise
    return pipe


BATCH_EPISODES = 4096
BATCH_STEPS = 65_536
BATCH_BYTES = 32 << 20
"""Of text. A batch closes at whichever comes first; all three bound memory and the size of a column."""
PROGRESS_SECONDS = 10.0


class Report(msgspec.Struct):
    """What became of a file."""

    source: str
    format: str
    run_id: str
    records: int = 0
    new: int = 0
    present: int = 0
    rejected: int = 0
    steps: int = 0
    """Steps of the new episodes."""
    runs: set[str] = msgspec.field(default_factory=set)
    """The runs that the records name."""
    first_fault: tuple[int, str] | None = None
    """Position and message of the first record that could not be read."""
    copies: str = ""
    """What there is to know of episodes that repeat a sibling, as a sentence."""


class Copies:
    """Counts episodes that repeat a sibling, decision by decision: what a group learns from each of them is the same.

    Equal are the states, actions and tool calls (but for the ids of calls) of all active steps. An unknown state
    equals nothing. A retry of a rollout, or the same record again, is no sibling.
    """

    def __init__(self) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._groups: dict[int, tuple[int, int]] = {}
        self._seen: set[int] = set()

    def add(self, record: EpisodeRecord) -> None:
        """Count one more episode."""
        group = hash((record.run_id, record.collection_round, record.task_id, record.seed))
        rollout = hash(("rollout", group, record.rollout_index, record.agent_id))
        if rollout in self._seen:
            return
        decisions = self._decisions(record.steps)
        content = rollout if decisions is None else hash(("content", group, *decisions))
        size, repeated = self._groups.get(group, (0, 0))
        self._groups[group] = (size + 1, repeated + (content in self._seen))
        self._seen |= {rollout, content}

    def in_words(self) -> str:
        """What there is to know of them, as a sentence; empty if there are none."""
        shares = [repeated / size for size, repeated in self._groups.values() if repeated]
        if not shares:
            return ""
        episodes = sum(size for size, _ in self._groups.values())
        return (
            f"{self.count} of {episodes} episodes repeat a sibling step by step, in {len(shares)} of "
            f"{len(self._groups)} groups (on average {sum(shares) / len(shares):.0%} of such a group)"
        )

    @property
    def count(self) -> int:
        """Episodes that repeat an earlier one of their group."""
        return sum(repeated for _, repeated in self._groups.values())

    def _decisions(self, steps: list[StepRecord]) -> list[str | bytes] | None:
        """States, actions and tool calls of the active steps; None if a state is unknown."""
        texts: list[str | bytes] = []
        calls: list[Any] = []
        for step in steps:
            if not step.is_active:
                continue
            if step.state is None:
                return None
            texts += (step.state, step.action)
            if step.tool_calls:
                made = [{**call, "id": None} if isinstance(call, dict) else call for call in step.tool_calls]
                calls.append((len(texts), made))
        return [*texts, self._encode(calls)]


class Progress(msgspec.Struct, frozen=True):
    """How far an ingest is."""

    records: int
    done: int
    """Bytes of text."""
    size: int | None
    """Bytes of the file; None if it is packed."""


def ingest(
    lake: Lake,
    path: str | Path,
    *,
    run_id: str | None = None,
    format_name: str | None = None,
    batch_size: int = BATCH_EPISODES,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Read a file into a lake; the counts are of records, and of the new episodes' steps.

    The job's parameters are the file's name and size, its format and the run: nothing that depends on the machine.

    Args:
        run_id: run of records that name none; the file's stem unless given.
        batch_size: episodes a commit at most.
        progress: called between batches, at most every 10 seconds.

    Raises:
        FormatError: the file is missing, empty or of no known format.
        UsageError: a batch size below 1, or an empty run.
    """
    if batch_size < 1:
        raise UsageError(f"the batch size is {batch_size}; valid: 1 or more")
    path = Path(path)
    report = prepare(path, run_id=run_id, format_name=format_name)
    meter, size = Meter(), path.stat().st_size
    with Source(path) as file:
        text_size = None if file.is_packed else size
    parameters = {"source": report.source, "bytes": size, "format": report.format, "run_id": report.run_id}
    shown = time.monotonic()
    with lake.job(kind="ingest", run_id=report.run_id, parameters=parameters) as job, _without_collector():
        copies = Copies()
        for batch in _batches(FORMATS[report.format].read(path, meter), meter, batch_size):
            _record(job, batch, report, copies)
            batch.clear()
            gc.collect(1)
            if progress is not None and time.monotonic() - shown >= PROGRESS_SECONDS:
                progress(Progress(report.records, meter.done, text_size))
                shown = time.monotonic()
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


def prepare(path: Path, *, run_id: str | None = None, format_name: str | None = None) -> Report:
    """The report of a file before any record is read; needs no lake and raises what `ingest` would."""
    fmt = choose(path, format_name)
    run = printable(stem(path) if run_id is None else run_id)
    if not run.strip():
        raise UsageError("the run's name is empty; give --run NAME")
    return Report(source=printable(path.name), format=fmt.name, run_id=run)


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


def _batches(items: Iterator[Item], meter: Meter, batch_size: int) -> Iterator[list[Item]]:
    batch: list[Item] = []
    steps = begun = 0
    for item in items:
        batch.append(item)
        steps += 0 if isinstance(item, Reject) else len(item[1].steps)
        if len(batch) >= batch_size or steps >= BATCH_STEPS or meter.done - begun >= BATCH_BYTES:
            yield batch
            batch, steps, begun = [], 0, meter.done
    if batch:
        yield batch


def _record(job: Job, batch: list[Item], report: Report, copies: Copies) -> None:
    rejects: list[Reject] = []
    records: list[EpisodeRecord] = []
    positions: list[int] = []
    for item in batch:
        if isinstance(item, Reject):
            rejects.append(item)
            report.first_fault = report.first_fault or (item.position, item.message)
            continue
        position, record = item
        record.run_id = record.run_id or report.run_id
        report.runs.add(record.run_id)
        copies.add(record)
        record.source_uri = report.source
        records.append(record)
        positions.append(position)
    if rejects:
        job.reject(rejects, report.source, report.format)
    counts = job.record_checked(records, positions)
    report.records += len(batch)
    report.new += counts.new
    report.steps += counts.steps
    report.present += counts.present
    report.rejected += len(rejects) + counts.rejected
