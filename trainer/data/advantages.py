"""Which advantages a run trains on: a series at its newest state, or one credit job, pinned by id.

A series (one estimator with one set of parameters) covers groups that several jobs worked on, since a job computes only
what changed; for each group its newest job counts. The series of the newest succeeded credit job is the default.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.reading import collected
from lake.snapshot import Snapshot

_SERIES = "SELECT DISTINCT job_id FROM latest_advantages WHERE series_id = ? ORDER BY job_id"
_KEYS = ("episode_id", "step_index", "group_id")


@dataclass(frozen=True, slots=True)
class AdvantageSource:
    """A resolved choice of advantages."""

    series_id: int
    """The estimator with its parameters."""
    job_id: int | None
    """The one credit job; None takes the whole series, for each group its newest job."""
    jobs: tuple[int, ...]
    """Every credit job whose rows are read."""

    def describe(self) -> str:
        """For messages: `job 0...` or `series 0...`."""
        if self.job_id is not None:
            return f"credit job {ids.to_text(self.job_id)}"
        return f"series {ids.to_text(self.series_id)} ({len(self.jobs)} credit jobs)"


def resolve_advantages(snapshot: Snapshot, wanted: str | None) -> AdvantageSource:
    """The credit job or series that a text names; the series of the newest succeeded credit job for None.

    A job's id means the rows of that job alone: the groups that it computed, not those that stood.

    Raises:
        UsageError: the text is no id, or names no succeeded credit job and no series.
        DataRefusedError: the lake holds no succeeded credit job.
    """
    jobs = collected(
        snapshot.scan("jobs")
        .filter((pl.col("kind") == "credit") & (pl.col("event") == "succeeded"))
        .select("job_id", "series_id", "sequence", "at")
        .sort("sequence", "at", "job_id", descending=True, nulls_last=True)
    )
    if jobs.is_empty():
        msg = "the lake holds no advantages; compute them first: trajlake credit gigpo"
        raise DataRefusedError(msg)
    if wanted is None:
        return _series(snapshot, jobs["series_id"][0])
    try:
        value = ids.from_text(wanted)
    except ValueError as error:
        msg = f"--advantages: {error}"
        raise UsageError(msg) from error
    if jobs["job_id"].is_in([value]).any():
        return AdvantageSource(jobs.row(by_predicate=pl.col("job_id") == value)[1], value, (value,))
    if jobs["series_id"].is_in([value]).any():
        return _series(snapshot, value)
    newest = ", ".join(ids.to_text(job) for job in jobs["job_id"].head(5))
    msg = f"--advantages {wanted}: no succeeded credit job and no series of that id; the newest credit jobs: {newest}"
    raise UsageError(msg)


def _series(snapshot: Snapshot, series_id: int) -> AdvantageSource:
    return AdvantageSource(series_id, None, tuple(snapshot.sql(_SERIES, [series_id])["job_id"].to_list()))


def read_advantages(
    snapshot: Snapshot,
    source: AdvantageSource,
    episode_ids: pl.Series | None = None,
    columns: Sequence[str] = ("advantage", "flags"),
) -> pl.DataFrame:
    """Advantages by step.

    Args:
        snapshot: the data.
        source: which.
        episode_ids: int64 [E]; None takes all.
        columns: of the table `advantages`.

    Returns:
        episode_id, step_index, group_id and the columns: one row per step, in any order. What is not known is NULL.
    """
    if source.job_id is not None:
        rows = snapshot.scan("advantages").filter(pl.col("job_id") == source.job_id)
        frame = collected(rows.select(*_KEYS, *columns))
    else:
        listed = ", ".join((*_KEYS, *columns))
        frame = snapshot.sql(f"SELECT {listed} FROM latest_advantages WHERE series_id = ?", [source.series_id])
    if episode_ids is not None:
        frame = frame.filter(pl.col("episode_id").is_in(episode_ids.implode()))
    return frame
