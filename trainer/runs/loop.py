"""The one optimizer loop: stream, forward and backward, update, report. Offline and online training both run it."""

import math
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import polars as pl
from torch import Tensor  # noqa: TID253

from lake.snapshot import Snapshot
from trainer.backends.base import FrozenPolicy, PolicyBackend
from trainer.config import TrainConfig
from trainer.data.batch import PackedBatch
from trainer.data.plan import OptimizerStep, Plan
from trainer.data.stream import Stream
from trainer.losses import Loss
from trainer.monitor.returns import Returns
from trainer.policy.model_check import check_vocabulary
from trainer.runs.factories import make_reference
from trainer.runs.metrics import from_sums
from trainer.runs.passes import fill_batches, proximal_period
from trainer.runs.schedule import learning_rate


@dataclass(frozen=True, slots=True)
class StepReport:
    """What an update did."""

    step: OptimizerStep
    """What it consumed."""
    metrics: dict[str, float]
    """Names of `trainer.runs.metrics.METRICS`."""
    alarms: list[str] = field(default_factory=list)
    """A sentence for each alarm that began with it."""


def run_steps(
    backend: PolicyBackend,
    snapshot: Snapshot,
    plan: Plan,
    config: TrainConfig,
    *,
    peak: float,
    first: int = 0,
    reference: FrozenPolicy | None = None,
) -> Generator[StepReport, None, None]:
    """Train a plan from one of its steps on.

    Args:
        backend: the policy and its optimizer. Across ranks each runs micro-batches of its own, and reports are alike.
        snapshot: the snapshot the plan was made on.
        plan: what to train on.
        config: the run.
        peak: peak learning rate.
        first: first optimizer step to do.
        reference: frozen policy of losses that need one; None loads the configuration's.

    Yields:
        A report after each update.

    Raises:
        ContractError: a token id outside the vocabulary of the model or of the reference, a gradient that is not
            finite, or a first step inside the period of a proximal policy that the backend does not keep.
    """
    loss = config.loss
    if loss.needs.reference_logprobs and reference is None:
        reference = make_reference(config, backend.ranks)
    vocabulary = min(scoring.vocabulary for scoring in (backend, reference) if scoring is not None)
    total, period, returns = len(plan.steps), proximal_period(loss, config, plan), Returns(snapshot, plan)
    with Stream(snapshot, plan, loss.needs, config, rank=backend.rank, world_size=backend.world_size) as stream:
        began = time.perf_counter()
        for step, batches in stream.steps(first):
            for batch in batches:
                check_vocabulary(batch, vocabulary)
            begins, ends = step.index % period == 0, (step.index + 1) % period == 0 or step.index + 1 == total
            if begins and not ends:
                backend.keep_proximal()
            sums = _gradient(backend, reference, loss, batches, proximal=not begins)
            rate = learning_rate(step.index, total, peak, config.schedule)
            norm = backend.optim_step(rate)
            if ends:
                backend.drop_proximal()
            now = time.perf_counter()
            metrics = from_sums(sums, step.loss_tokens) | {
                "grad_norm": norm,
                "learning_rate": rate,
                "action_tokens": step.loss_tokens,
                "tokens": step.tokens,
                "micro_batches": len(batches) * backend.world_size,
                "seconds": now - began,
            }
            if (reward := returns.mean(step)) is not None:
                metrics["reward"] = reward
            began = now
            yield StepReport(step, metrics)


def _gradient(
    backend: PolicyBackend,
    reference: FrozenPolicy | None,
    loss: Loss,
    batches: Sequence[PackedBatch],
    *,
    proximal: bool,
) -> dict[str, float]:
    """Add the gradient of an optimizer step; sums behind its metrics, over all ranks."""
    parts: defaultdict[str, list[Tensor]] = defaultdict(list)
    filled, statistics = fill_batches(backend, reference, loss, batches, proximal=proximal)
    for batch in filled:
        for name, value in backend.forward_backward(batch, loss, statistics).items():
            parts[name].append(value)
    return backend.ranks.added({name: math.fsum(map(float, values)) for name, values in parts.items()})


def batches_frame(plan: Plan, reports: list[StepReport]) -> pl.DataFrame:
    """Rows for the table `batches`: which episodes each update consumed."""
    return pl.concat([plan.consumed(report.step) for report in reports])
