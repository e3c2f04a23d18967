"""Jobs that write rows with unique keys while other jobs do the same: each key gets one row, from the first job.

Long jobs commit as they go, and concurrent jobs share only the table. The second job finds the rows of the first one in
the compare-and-swap of its terminal row, and drops its rows with the same keys (`commit_unique`).

The parts of an executor write files, and the job's terminal row accepts all of them together (`run_parts`). This fails
if another job has committed rows with the same keys in the meantime, or episodes were removed. Then the rows of the
parts are returned, and the caller commits the remaining ones with `commit_unique`.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import polars as pl

from lake.errors import ConflictError
from lake.execution.executor import Executor, Item
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.write.jobs import JobPart, WritableLake, WrittenRows, read_back

_TRIES = 20


class Commit(NamedTuple):
    """The content of a job: rows by table, where empty frames are skipped, and counts for its terminal row."""

    tables: Mapping[str, pl.DataFrame]
    counts: Mapping[str, Any]


class Committed(NamedTuple):
    """The rows that no other job has committed, and the job; None if no row was left."""

    rows: pl.DataFrame
    job_id: int | None


def commit_unique(
    lake: WritableLake,
    rows: pl.DataFrame,
    *,
    committed_keys: Callable[[Snapshot], pl.DataFrame],
    build: Callable[[pl.DataFrame, pl.Series], Commit],
    conflict: str,
    **job: Any,
) -> Committed:
    """Commit, as one job, the rows whose episodes are in the lake and whose keys no other job has committed.

    Args:
        rows: frame with `episode_id` and all key columns.
        committed_keys: returns the keys that other jobs have committed in a snapshot.
        build: returns the content of the job, from the remaining rows and the episodes that are in the lake.
        conflict: message of the ConflictError.
        job: arguments of `Lake.job`.

    Raises:
        ConflictError: other jobs were faster, repeatedly.
    """
    episode_ids = rows["episode_id"].unique()
    for attempt in count(1):
        snapshot = lake.snapshot()
        episodes = snapshot.scan("episodes").filter(pl.col("episode_id").is_in(episode_ids.implode()))
        present = collect_rows(episodes.select("episode_id"))["episode_id"]
        other_keys = committed_keys(snapshot)
        candidates = rows.filter(pl.col("episode_id").is_in(present.implode()))
        unique = candidates.join(other_keys, on=other_keys.columns, how="anti", maintain_order="left")
        commit = build(unique, present)
        if all(frame.is_empty() for frame in commit.tables.values()):
            return Committed(unique, None)

        def guard(unique: pl.DataFrame = unique) -> None:
            new_keys = committed_keys(lake.snapshot())
            if not unique.join(new_keys, on=new_keys.columns, how="semi").is_empty():
                raise ConflictError(conflict)

        try:
            with lake.job(**job, guard=guard) as running:
                for table, frame in commit.tables.items():
                    running.write(table, frame)
                running.counts |= commit.counts
        except ConflictError:
            if attempt == _TRIES:
                raise
        else:
            return Committed(unique, running.job_id)
    raise AssertionError  # count() is endless


class PartResult(Protocol):
    """The result of a part."""

    @property
    def written(self) -> Sequence[WrittenRows]:
        """The rows that the part wrote."""


Result = TypeVar("Result", bound=PartResult)


class PartsOutcome(NamedTuple, Generic[Result]):
    """The results of all parts."""

    results: list[Result]
    job_id: int | None
    """The job that accepted all rows; None after a conflict, or if no row was written."""
    uncommitted: Mapping[str, pl.DataFrame]
    """After a conflict: the rows by table, for `commit_unique`."""


def run_parts(
    lake: WritableLake,
    executor: Executor,
    task: Callable[[Item], Result],
    items: Callable[[JobPart], Iterable[Item]],
    *,
    committed_keys: Callable[[Snapshot, pl.DataFrame], pl.DataFrame],
    written_keys: Callable[[list[Result]], pl.DataFrame],
    counts: Callable[[list[Result]], Mapping[str, Any]],
    check: Callable[[], None] = lambda: None,
    on_result: Callable[[Result], None] = lambda _: None,
    conflict: str,
    without: Collection[str] = (),
    **job: Any,
) -> PartsOutcome[Result]:
    """Run parts as one job.

    Args:
        task: see `Executor.map`; it writes with the `JobPart`.
        items: returns the parts for a `JobPart`.
        committed_keys: returns those of some keys that other jobs have committed in a snapshot.
        written_keys: returns the keys of the rows that the parts wrote, with episode_id.
        counts: returns figures for the terminal row.
        check: called after all parts; an exception of it fails the job.
        on_result: called with each result.
        conflict: message of the job's failure if other jobs were faster.
        without: ids of nodes that get no part.
        job: arguments of `Lake.job`.

    Raises:
        WorkerLostError: worker processes died repeatedly; nothing is visible.
        Exception: any exception of a task or of `check`.
    """
    results: list[Result] = []
    is_checked = False

    def guard() -> None:
        keys, snapshot = written_keys(results), lake.snapshot()
        episode_ids = keys["episode_id"].unique()
        episodes = snapshot.scan("episodes").filter(pl.col("episode_id").is_in(episode_ids.implode()))
        other_keys = committed_keys(snapshot, keys)
        if (
            collect_rows(episodes.select(pl.len())).item() < len(episode_ids)
            or not keys.join(other_keys, on=other_keys.columns, how="semi").is_empty()
        ):
            raise ConflictError(conflict)

    running = lake.job(**job, guard=guard)
    try:
        with running:
            for result in executor.map(task, items(running.part()), without=without):
                results.append(result)
                for written in result.written:
                    running.take(written)
                on_result(result)
            check()
            running.counts |= counts(results)
            is_checked = True
    except ConflictError:
        if not is_checked:
            raise
        frames: dict[str, list[pl.DataFrame]] = defaultdict(list)
        for result in results:
            for written in result.written:
                with suppress(FileNotFoundError):  # `forget` has rewritten the file
                    frames[written.table].append(read_back(running.part().objects, written))
        return PartsOutcome(results, None, {table: pl.concat(rows) for table, rows in frames.items()})
    return PartsOutcome(results, running.job_id, {})


def take_until(seconds: float, waiting: deque[Item]) -> Iterator[Item]:
    """Yield at least one item, and more until the time is up: the parts of a round."""
    end = time.monotonic() + seconds
    while waiting:
        yield waiting.popleft()
        if time.monotonic() >= end:
            return
