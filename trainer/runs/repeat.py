"""Do a run again, from what the lake holds of it: the resolved configuration and the table versions that it read.

The result says whether the weights came out the same. They do on the machine, number of threads and versions that the
run had; what differs of that is said.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.lake import Lake
from lake.settings import validated
from trainer.config import TrainConfig
from trainer.former_layout import renewed_record
from trainer.runs.offline import OnPlan, Origin, train
from trainer.runs.runs import final_digest

if TYPE_CHECKING:
    from trainer.runs.training_run import Progress, TrainResult

_RUNS = """
SELECT j.job_id, j.run_id, j.status, j.counts, j.parameters, c.data_snapshot, c.cursor, c.sha256, c.optimizer_step
FROM job_runs AS j JOIN checkpoints AS c USING (job_id)
WHERE j.kind = 'train'
QUALIFY row_number() OVER (PARTITION BY j.job_id ORDER BY c.optimizer_step DESC, c.attempt DESC) = 1
ORDER BY c.at DESC
"""


def repeat(
    lk: Lake,
    wanted: str,
    out: Path,
    *,
    run_id: str,
    on_step: "Progress | None" = None,
    on_plan: OnPlan | None = None,
) -> "TrainResult":
    """Train again what a run trained, on the data that it read; the first note says whether the weights are the same.

    Args:
        wanted: name of the run, or id of its job (13 characters or their beginning).

    Raises:
        UsageError: no such run.
        CheckpointError: its data are not there any more, its model is another, or its plan comes out differently.
    """
    row = _find(lk, wanted)
    config = validated(TrainConfig, renewed_record(msgspec.json.decode(row["parameters"])), f"run {row['run_id']}: ")
    versions = msgspec.json.decode(row["data_snapshot"], type=dict[str, int])
    cursor = msgspec.json.decode(row["cursor"], type=dict[str, Any])
    origin = Origin(versions, cursor["plan_hash"], cursor["model_sha256"])
    result = train(lk, config, out, run_id=run_id, on_step=on_step, on_plan=on_plan, origin=origin)
    result.notes.insert(0, _verdict(row, result))
    return result


def _find(lk: Lake, wanted: str) -> dict[str, Any]:
    runs = lk.sql(_RUNS).with_columns(text=pl.col("job_id").map_elements(ids.to_text, return_dtype=pl.String))
    found = runs.filter(pl.col("run_id") == wanted)
    if found.is_empty():
        found = runs.filter(pl.col("text").str.starts_with(wanted))
    if found.is_empty():
        known = ", ".join(runs["run_id"].unique(maintain_order=True).head(5)) or "none"
        msg = f"--repeat {wanted}: no training run of that name or job id has a checkpoint; the newest runs: {known}"
        raise UsageError(msg)
    if found["job_id"].n_unique() > 1:
        jobs = ", ".join(found["text"].head(5))
        raise UsageError(f"--repeat {wanted} means {found.height} runs; name one by its job: {jobs}")
    return found.row(0, named=True)


def _verdict(row: dict[str, Any], result: "TrainResult") -> str:
    name = f"run {row['run_id']} (job {row['text']})"
    if row["status"] != "succeeded":
        return f"{name} did not end, so there are no final weights to compare with"
    digest = final_digest(row["counts"]) or str(row["sha256"])
    if digest == result.weights_sha256:
        return f"the weights are those of {name}, bit for bit"
    return f"the weights are not those of {name}: it came to {digest[:16]}..."
