"""One job whose rows are written by the parts of an executor, where there may be one row each of a thing.

Parts write files; the job's terminal row accepts them together. If another job has committed rows of the same things
meanwhile, or someone has taken episodes out, a file cannot be accepted as it is: the job fails, and what its parts
wrote is given back, for `lake.write.claims` to commit without those.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import polars as pl

from lake.errors import ConflictError
from lake.execution.executor import Executor, Item
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.write.parts import JobPart, Written, read_back

if TYPE_CHECKING:
    from lake.lake import Lake


class PartResult(Protocol):
    """What a part answers."""

    @property
    def written(self) -> Sequence[Written]:
        """Its files."""


Found = TypeVar("Found", bound=PartResult)


class Parted(NamedTuple, Generic[Found]):
    """What came of the parts."""

    results: list[Found]
    job_id: int | None
    """The job that accepted all of them; None if it could not, or nothing was written."""
    left: Mapping[str, pl.DataFrame]
    """Where it could not: the rows by table, for `commit_unclaimed`."""


def run_parts(
    lake: "Lake",
    executor: Executor,
    task: Callable[[Item], Found],
    items: Callable[[JobPart], Iterable[Item]],
    *,
    claimed: Callable[[Snapshot, pl.DataFrame], pl.DataFrame],
    keys: Callable[[list[Found]], pl.DataFrame],
    counts: Callable[[list[Found]], Mapping[str, Any]],
    check: Callable[[], None] = lambda: None,
    told: Callable[[Found], None] = lambda _: None,
    refusal: str,
    without: Collection[str] = (),
    **job: Any,
) -> Parted[Found]:
    """Run parts as one job.

    Args:
        task: see `Executor.map`; it writes with the `JobPart`.
        items: the parts, from what they write with.
        claimed: what others have committed by a snapshot of some keys, by columns of these.
        keys: what the parts wrote rows of, by the columns that there may be one row of, with episode_id.
        counts: figures for the terminal row.
        check: called when all parts are done; raises what must fail the job.
        told: called with each result as it comes.
        refusal: why the job fails if others were faster.
        without: nodes that get no part.
        job: arguments of `Lake.job`.

    Raises:
        WorkerLostError: worker processes died again and again; nothing is visible.
        Exception: whatever a task or `check` raises.
    """
    results: list[Found] = []
    is_checked = False

    def guard() -> None:
        wanted, now = keys(results), lake.snapshot()
        episode_ids = wanted["episode_id"].unique()
        here = now.scan("episodes").filter(pl.col("episode_id").is_in(episode_ids.implode()))
        taken = claimed(now, wanted)
        if (
            collected(here.select(pl.len())).item() < len(episode_ids)
            or not wanted.join(taken, on=taken.columns, how="semi").is_empty()
        ):
            raise ConflictError(refusal)

    running = lake.job(**job, guard=guard)
    try:
        with running:
            for result in executor.map(task, items(running.part()), without=without):
                results.append(result)
                for written in result.written:
                    running.take(written)
                told(result)
            check()
            running.counts |= counts(results)
            is_checked = True
    except ConflictError:
        if not is_checked:
            raise
        return Parted(results, None, _rows(running.part(), results))
    return Parted(results, running.job_id, {})


def until(seconds: float, todo: deque[Item]) -> Iterator[Item]:
    """Take one at least, and go on until the time is up: the parts of a round."""
    end = time.monotonic() + seconds
    while todo:
        yield todo.popleft()
        if time.monotonic() >= end:
            return


def _rows(part: JobPart, results: Iterable[PartResult]) -> dict[str, pl.DataFrame]:
    """All rows that the parts wrote, by table. A file that is gone was rewritten by `forget`: its rows are left out."""
    found: dict[str, list[pl.DataFrame]] = defaultdict(list)
    for result in results:
        for written in result.written:
            with suppress(FileNotFoundError):
                found[written.table].append(read_back(part.objects, written))
    return {table: pl.concat(frames) for table, frames in found.items()}
