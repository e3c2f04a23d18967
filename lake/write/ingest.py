"""Ingest: files of trajectories into the lake, in batches, exactly once, with every record accounted for.

Records in = new + already present + rejects; the figures stand in the job's terminal row. Killed and started again, a
job skips what is present. The batch size changes nothing but speed. What scorers said of episodes is committed after
them: `lake.write.scores`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lake.errors import UsageError
from lake.execution.executor import Executor
from lake.write.batches import BATCH_EPISODES, Batch, batches, collect_garbage, record_batch, without_collector
from lake.write.copies import Copies
from lake.write.ingest_parts import record_parts
from lake.write.jobs import Job
from lake.write.plan import Plan, Report, plan
from lake.write.runs import KnownRuns
from lake.write.scores import RECORDED, add_scores
from lake.write.sources import located

if TYPE_CHECKING:
    from lake.lake import Lake

BATCH_SCORES = 200_000
"""Scores that are committed at once."""
PROGRESS_SECONDS = 10.0


class Progress(msgspec.Struct, frozen=True):
    """How far an ingest is."""

    records: int
    done: int
    """Bytes of text."""
    size: int | None
    """Bytes of the files; None if one is packed."""


def ingest(
    lake: "Lake",
    path: str | Path,
    *,
    run_id: str | None = None,
    format_name: str | None = None,
    batch_size: int = BATCH_EPISODES,
    progress: Callable[[Progress], None] | None = None,
    executor: Executor | None = None,
    follow_links: bool = False,
) -> Report:
    """Read a file, a folder, a glob or a URI into a lake; the counts are of records, and of the new episodes' steps.

    Args:
        run_id: run of records that name none; what `lake.write.runs` says unless given.
        batch_size: episodes a commit at most.
        progress: called between batches, at most every 10 seconds.
        executor: where files are read and their rows written (`lake.write.ingest_parts`); in this process unless given.
        follow_links: whether links in a folder to files outside of it are followed.

    Raises:
        FormatError: see `plan`.
        UsageError: a batch size below 1, or an empty run.
    """
    stdin = getattr(sys.stdin, "buffer", BytesIO())
    with located([str(path)], stdin, follow_links=follow_links) as (argument,):
        planned = plan(argument, run_id=run_id, format_name=format_name)
        return run_plan(lake, planned, batch_size=batch_size, progress=progress, executor=executor)


def run_plan(
    lake: "Lake",
    plan: Plan,
    *,
    batch_size: int = BATCH_EPISODES,
    progress: Callable[[Progress], None] | None = None,
    executor: Executor | None = None,
    only_if_any: bool = False,
) -> Report:
    """Read what was planned into a lake, as one job; see `ingest`. `only_if_any`: no job if there is no record."""
    if batch_size < 1:
        raise UsageError(f"the batch size is {batch_size}; valid: 1 or more")
    report = plan.report
    size = plan.text_size
    shown = time.monotonic()
    job = lake.job(kind="ingest", run_id=report.run_id, parameters=plan.parameters())
    known = KnownRuns(job.index(), lake.snapshot)
    found = batches(plan.readings, batch_size, known)
    first = None
    if executor is None:
        with without_collector():
            first = next(found, None)
        if first is None and only_if_any:
            return report

    def commit_scores() -> None:
        report.scores += add_scores(lake, job.scores.taken(), version=RECORDED, source=report.source).new

    with job, without_collector():
        copies = Copies()
        if executor is None:
            recorded = _recorded(job, chain([first] if first else [], found), plan, copies)
        else:
            recorded = record_parts(lake, job, plan, executor, known=known, batch_size=batch_size, copies=copies)
        for done in recorded:
            if len(job.scores) >= BATCH_SCORES:
                commit_scores()
            if progress is not None and time.monotonic() - shown >= PROGRESS_SECONDS:
                progress(Progress(report.records, done, size))
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


def _recorded(job: Job, found: Iterator[Batch], plan: Plan, copies: Copies) -> Iterator[int]:
    """Record batches one after another; after each, the bytes of text that are done."""
    for batch in found:
        record_batch(job, batch, plan.report, copies.add)
        batch.clear()
        collect_garbage()
        yield plan.done
