"""Ingest: a file of trajectories into the lake, in batches, exactly once, with every record accounted for.

Records in = new + already present + rejects; the figures stand in the job's terminal row. Killed and started again, a
job skips what is present. The batch size changes nothing but speed.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from lake.errors import UsageError
from lake.formats import FORMATS
from lake.formats.registry import Item, choose
from lake.jobs import Job
from lake.lake import Lake
from lake.records import EpisodeRecord, Reject, printable

BATCH_EPISODES = 512
BATCH_STEPS = 16_384
"""A batch closes at whichever comes first; both bound memory."""


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


def ingest(
    lake: Lake,
    path: str | Path,
    *,
    run_id: str | None = None,
    format_name: str | None = None,
    batch_size: int = BATCH_EPISODES,
) -> Report:
    """Read a file into a lake.

    Args:
        lake: where to.
        path: the file.
        run_id: run of records that name none; the file's stem unless given.
        format_name: the file's format; sniffed unless given.
        batch_size: episodes a commit at most.

    Returns:
        Counts of records, and of episodes and steps that are new.

    Raises:
        FormatError: the file is missing, empty or of no known format.
        UsageError: a batch size below 1, or an empty run.
    """
    if batch_size < 1:
        msg = f"the batch size is {batch_size}; valid: 1 or more"
        raise UsageError(msg)
    path = Path(path)
    report = prepare(path, run_id=run_id, format_name=format_name)
    parameters = {"source": printable(str(path.resolve())), "format": report.format, "run_id": report.run_id}
    with lake.job(kind="ingest", run_id=report.run_id, parameters=parameters) as job:
        for batch in _batches(FORMATS[report.format].read(path), batch_size):
            _record(job, batch, report)
        job.counts |= {
            "rows_in": report.records,
            "rows_out": report.new,
            "rows_dropped": report.rejected,
            "already_present": report.present,
            "steps": report.steps,
        }
    return report


def prepare(path: Path, *, run_id: str | None = None, format_name: str | None = None) -> Report:
    """As what a file would be read, with all counts 0; needs no lake and raises what `ingest` would."""
    fmt = choose(path, format_name)
    run = printable(path.stem if run_id is None else run_id)
    if not run.strip():
        msg = "the run's name is empty; give --run NAME"
        raise UsageError(msg)
    return Report(source=printable(path.name), format=fmt.name, run_id=run)


def _batches(items: Iterator[Item], batch_size: int) -> Iterator[list[Item]]:
    batch: list[Item] = []
    steps = 0
    for item in items:
        batch.append(item)
        steps += 0 if isinstance(item, Reject) else len(item[1].steps)
        if len(batch) >= batch_size or steps >= BATCH_STEPS:
            yield batch
            batch, steps = [], 0
    if batch:
        yield batch


def _record(job: Job, batch: list[Item], report: Report) -> None:
    rejects: list[Reject] = []
    records: list[EpisodeRecord] = []
    positions: list[int] = []
    for item in batch:
        if isinstance(item, Reject):
            rejects.append(item)
            continue
        position, record = item
        record.run_id = record.run_id or report.run_id
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
