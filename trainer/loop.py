"""The one optimizer loop: stream, forward and backward, update, report. Offline and online training both run it."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl
from torch import Tensor  # noqa: TID253

from lake.errors import ContractError
from lake.snapshot import Snapshot
from trainer.backend import SingleDevice
from trainer.batch import PackedBatch
from trainer.config import TrainConfig
from trainer.losses import LOSSES
from trainer.metrics import from_sums
from trainer.plan import OptimizerStep, Plan
from trainer.schedule import learning_rate
from trainer.stream import Stream


@dataclass(frozen=True, slots=True)
class StepReport:
    """What an update did."""

    step: OptimizerStep
    """What it consumed."""
    metrics: dict[str, float]
    """Names of `trainer.metrics.METRICS`."""


def run_steps(
    backend: SingleDevice, snapshot: Snapshot, plan: Plan, config: TrainConfig, *, peak: float, first: int = 0
) -> Iterator[StepReport]:
    """Train a plan from one of its steps on.

    Args:
        backend: the policy and its optimizer.
        snapshot: the snapshot the plan was made on.
        plan: what to train on.
        config: the run.
        peak: peak learning rate.
        first: first optimizer step to do.

    Yields:
        A report after each update.

    Raises:
        ContractError: a token id outside the model's vocabulary, or a gradient that is not finite.
    """
    loss = LOSSES[config.loss]
    total = len(plan.steps)
    with Stream(snapshot, plan, loss.needs, config) as stream:
        began = time.perf_counter()
        for step, batches in stream.steps(first):
            sums: defaultdict[str, list[Tensor]] = defaultdict(list)
            for batch in batches:
                _check_vocabulary(batch, backend.policy.vocabulary)
                for name, value in backend.forward_backward(batch, loss, config, step.loss_tokens).items():
                    sums[name].append(value)
            rate = learning_rate(step.index, total, peak, config.schedule)
            norm = backend.optim_step(rate)
            now = time.perf_counter()
            metrics = from_sums({n: math.fsum(map(float, values)) for n, values in sums.items()}, step.loss_tokens)
            metrics |= {
                "grad_norm": norm,
                "learning_rate": rate,
                "action_tokens": step.loss_tokens,
                "tokens": step.tokens,
                "micro_batches": len(batches),
                "seconds": now - began,
            }
            began = now
            yield StepReport(step, metrics)


def batches_frame(plan: Plan, reports: list[StepReport]) -> pl.DataFrame:
    """Rows for the table `batches`: which episodes each update consumed."""
    return pl.concat([plan.consumed(report.step) for report in reports])


def _check_vocabulary(batch: PackedBatch, vocabulary: int) -> None:
    highest = int(batch.input_ids_T.max())
    if highest >= vocabulary:
        msg = (
            f"table `tokens` holds token id {highest}, and the model knows ids below {vocabulary}: the tokens were "
            f"made with another tokenizer; choose the model they came from, or --tokens rendered"
        )
        raise ContractError(msg)
