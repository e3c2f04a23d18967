"""Rows of which there may be one each: commit those that nobody else has committed, and try again if others are faster.

Long jobs commit as they go, and two of them at once share nothing but the table. Whoever comes second finds the other's
rows in the compare-and-swap of its terminal row, and drops its own of the same things.
"""

from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from lake.errors import ConflictError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot

if TYPE_CHECKING:
    from lake.lake import Lake

_TRIES = 20


class Commit(NamedTuple):
    """What a job writes: rows by table, of which empty ones are left out, and figures for its terminal row."""

    tables: Mapping[str, pl.DataFrame]
    counts: Mapping[str, Any]


class Committed(NamedTuple):
    """The rows that nobody else has committed, and the job; None if there was nothing left to write."""

    kept: pl.DataFrame
    job_id: int | None


def commit_unclaimed(
    lake: "Lake",
    rows: pl.DataFrame,
    *,
    claimed: Callable[[Snapshot], pl.DataFrame],
    made: Callable[[pl.DataFrame, pl.Series], Commit],
    refusal: str,
    **job: Any,
) -> Committed:
    """Commit rows whose episodes are still in the lake and which others have not committed meanwhile, as one job.

    Args:
        rows: with `episode_id`, and all columns of what is claimed.
        claimed: what others have committed by a snapshot, by the columns that there may be one row of.
        made: what to write, from the rows that are left and the episodes that are still there.

    Raises:
        ConflictError: others were faster again and again.
    """
    episode_ids = rows["episode_id"].unique()
    for attempt in count(1):
        now = lake.snapshot()
        here = now.scan("episodes").filter(pl.col("episode_id").is_in(episode_ids.implode()))
        present = collected(here.select("episode_id"))["episode_id"]
        others = claimed(now)
        still = rows.filter(pl.col("episode_id").is_in(present.implode()))
        kept = still.join(others, on=others.columns, how="anti", maintain_order="left")
        commit = made(kept, present)
        if all(frame.is_empty() for frame in commit.tables.values()):
            return Committed(kept, None)

        def guard(kept: pl.DataFrame = kept) -> None:
            taken = claimed(lake.snapshot())
            if not kept.join(taken, on=taken.columns, how="semi").is_empty():
                raise ConflictError(refusal)

        try:
            with lake.job(**job, guard=guard) as running:
                for table, frame in commit.tables.items():
                    running.write(table, frame)
                running.counts |= commit.counts
        except ConflictError:
            if attempt == _TRIES:
                raise
        else:
            return Committed(kept, running.job_id)
    raise AssertionError  # there is always another number
