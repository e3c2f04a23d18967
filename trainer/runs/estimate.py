"""How long a plan will take: from an earlier job of the same kind, or from timing this model for a moment."""

import time

import msgspec
import polars as pl
import torch  # noqa: TID253 - loaded by commands only when they train

from lake import ids
from lake.reading import collected
from lake.snapshot import Snapshot
from trainer.backends.single import SingleDevice
from trainer.config import TrainConfig
from trainer.data.batch import PackedBatch
from trainer.data.plan import Plan
from trainer.losses import LOSSES, find_loss
from trainer.policy.model import Policy

SPEED = "tokens_per_second"
"""Name under which a training job's counts hold its speed."""
_TIMED_TOKENS = 2048


def estimate_seconds(snapshot: Snapshot, policy: Policy, plan: Plan, config: TrainConfig) -> tuple[float, str]:
    """Seconds a plan will take, and where the figure comes from.

    Args:
        snapshot: where earlier jobs are.
        policy: the model; its weights are left as they are.
        plan: what would be trained.
        config: resolved.

    Returns:
        Seconds of training (without start-up and checkpoints), and a few words on how they were estimated.
    """
    tokens = plan.tokens * config.epochs
    earlier = _earlier_speed(snapshot, policy, config)
    if earlier is not None:
        job_id, speed = earlier
        return tokens / speed, f"speed of job {ids.to_text(job_id)}: {speed:,.0f} tokens/s"
    speed = _timed_speed(policy, plan, config)
    return tokens / speed, f"one timed pass of this model: {speed:,.0f} tokens/s"


def _earlier_speed(snapshot: Snapshot, policy: Policy, config: TrainConfig) -> tuple[int, float] | None:
    """Speed of the newest finished run of a model of this size, with this loss, device and number of threads."""
    jobs = snapshot.scan("jobs").filter((pl.col("kind") == "train") & (pl.col("event") == "succeeded"))
    rows = collected(jobs.sort("at", descending=True).select("job_id", "parameters", "counts"))
    for job_id, parameters, counts in rows.iter_rows():
        was, figures = msgspec.json.decode(parameters), msgspec.json.decode(counts or "{}")
        alike = all(was.get(name) == getattr(config, name) for name in ("loss", "device", "threads"))
        if alike and figures.get("parameters") == policy.num_parameters and figures.get(SPEED):
            return job_id, float(figures[SPEED])
    return None


def _timed_speed(policy: Policy, plan: Plan, config: TrainConfig) -> float:
    """Tokens per second of one forward and backward pass over sequences of the plan's mean length.

    The time of a loss is that of the model, so it is timed with the plainest. A backward pass takes about twice a
    forward pass; losses with a reference or a first pass have one more of these each.
    """
    needs = find_loss(config).needs
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
    backend = SingleDevice(policy, config.optimizer)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        backend.forward_backward(batch, LOSSES["sft"], config)
        seconds.append(time.perf_counter() - began)
    policy.model.zero_grad(set_to_none=True)
    return total / min(seconds) / passes
