"""How long a plan will take: from an earlier job of the same kind, or from timing this model for a moment."""

import time
from pathlib import Path

import msgspec
import polars as pl

from lake import ids
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.settings import value_at
from trainer.config import TrainConfig
from trainer.data.plan.plan import Plan
from trainer.former_layout import renewed_record
from trainer.losses.sft import SFT
from trainer.policy.model_folder import stored_parameters
from trainer.runs.lineage import SPEED

_TIMED_TOKENS = 2048


def estimate_seconds(snapshot: Snapshot, plan: Plan, config: TrainConfig, *, measure: bool) -> tuple[float | None, str]:
    """Seconds a plan will take, and where the figure comes from.

    Args:
        measure: load the model and time it, rather than look at earlier jobs.

    Returns:
        Seconds of training (without start-up and checkpoints), None where nothing tells, and a few words on how they
        were estimated.
    """
    tokens = plan.tokens * config.epochs
    if measure:
        speed = _timed_speed(plan, config)
        return tokens / speed, f"one timed pass of this model: {speed:,.0f} tokens/s"
    if (earlier := _earlier_speed(snapshot, config)) is not None:
        job_id, speed = earlier
        return tokens / speed, f"speed of job {ids.to_text(job_id)}: {speed:,.0f} tokens/s"
    return None, "no earlier run of this loss with a model of this size; --measure loads the model and times it"


def _earlier_speed(snapshot: Snapshot, config: TrainConfig) -> tuple[int, float] | None:
    """Speed of the newest finished run of a model of this size, with this loss and device."""
    size = stored_parameters(Path(config.model))
    jobs = snapshot.scan("jobs").filter((pl.col("kind") == "train") & (pl.col("event") == "succeeded"))
    rows = collected(jobs.sort("at", descending=True).select("job_id", "parameters", "counts"))
    for job_id, parameters, counts in rows.iter_rows():
        was, figures = renewed_record(msgspec.json.decode(parameters)), msgspec.json.decode(counts or "{}")
        alike = value_at(was, "loss.name") == config.loss.name and was.get("device") == config.device
        alike &= config.threads in (None, was.get("threads"))
        alike &= was.get("model") == config.model if size is None else figures.get("parameters") == size
        if alike and figures.get(SPEED):
            return job_id, float(figures[SPEED])
    return None


def _timed_speed(plan: Plan, config: TrainConfig) -> float:
    """Tokens per second of one forward and backward pass over sequences of the plan's mean length.

    The time of a loss is that of the model, so it is timed with the plainest. A backward pass takes about twice a
    forward pass; losses with a reference or a first pass have one more of these each.
    """
    import torch

    from trainer.backends.base import SingleDevice
    from trainer.data.stream.batch import PackedBatch
    from trainer.policy.model import policy_of
    from trainer.runs.offline import make_deterministic

    make_deterministic(config)
    needs = config.loss.needs
    passes = 1 + (needs.reference_logprobs + bool(needs.statistics)) / 3
    length = max(2, min(_TIMED_TOKENS, plan.tokens // plan.sequences))
    count = max(1, _TIMED_TOKENS // length)
    share = plan.loss_tokens / plan.tokens
    total = length * count
    boundaries = list(range(0, total + 1, length))
    inner = torch.arange(total)[torch.arange(total) % length > 0]
    target_at = inner[:: max(1, round(1 / share))]
    batch = PackedBatch(
        input_ids_T=torch.zeros(total, dtype=torch.int64),
        position_ids_T=torch.arange(total) % length,
        boundaries=boundaries,
        predictor_N=target_at - 1,
        target_N=torch.zeros(len(target_at), dtype=torch.int64),
        weight_N=torch.full((len(target_at),), 1 / len(target_at)),
    )
    backend = SingleDevice(policy_of(config), config.optimizer)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        backend.forward_backward(batch, SFT())
        seconds.append(time.perf_counter() - began)
    return total / min(seconds) / passes
