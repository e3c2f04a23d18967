"""What the lake knows of a training job that was started before: its state, its checkpoints, its attempts."""

from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import CheckpointError
from lake.lake import Lake
from lake.read.parquet import collected
from trainer.runs.runs import RunFolder

SPEED = "tokens_per_second"
"""Name under which a training job's counts hold its speed."""


def newest_checkpoint(lk: Lake, job_id: int) -> dict[str, Any] | None:
    """The row of `checkpoints` with the most updates; None if there is none yet."""
    mine = lk.scan("checkpoints").filter(pl.col("job_id") == job_id)
    newest = collected(mine.sort("optimizer_step", "attempt").tail(1))
    return newest.row(0, named=True) if newest.height else None


def checkpoints_of(lk: Lake, job_id: int, folder: RunFolder) -> list[tuple[int, Path]]:
    """Updates done and place of each checkpoint of a job, oldest first; of repeated steps the newest attempt's."""
    mine = lk.scan("checkpoints").filter(pl.col("job_id") == job_id).sort("optimizer_step", "attempt")
    rows = collected(mine).iter_rows(named=True)
    places = {row["optimizer_step"]: folder.checkpoints / Path(row["uri"]).name for row in rows}
    return sorted(places.items())


def job_row(lk: Lake, job_id: int) -> dict[str, Any]:
    """Its status in `job_runs` (started means running or interrupted) and what it counted.

    Raises:
        CheckpointError: the lake does not know the job.
    """
    found = lk.sql("SELECT status, counts FROM job_runs WHERE job_id = ?", [job_id])
    if found.is_empty():
        msg = f"the lake {lk.uri} does not know job {ids.to_text(job_id)}; name the lake that the run was started on"
        raise CheckpointError(msg)
    return found.row(0, named=True)


def final_digest(counts: str | None) -> str | None:
    """Digest of the weights that a run ended with: not those of its newest checkpoint where it exported the best.

    Args:
        counts: of its row in `job_runs`, JSON; None for a job that has not ended.
    """
    digest = None if counts is None else msgspec.json.decode(counts, type=dict[str, Any]).get("weights_sha256")
    return None if digest is None else str(digest)


def next_attempt(lk: Lake, job_id: int) -> int:
    """One more than any attempt that left rows; at least 1, since the first attempt is 0."""
    snapshot = lk.snapshot()
    mine = pl.col("job_id") == job_id
    parts = [snapshot.scan(name).filter(mine).select("attempt") for name in ("batches", "metrics", "checkpoints")]
    return 1 + int(collected(pl.concat(parts).select(pl.col("attempt").max().fill_null(0)))["attempt"][0])
