"""The one optimizer loop: stream, forward and backward, update, report. Offline and online training both run it.

Most losses compute nothing before the gradient of an optimizer step. A reference policy is frozen, so its
log-probabilities are those of any pass. The proximal policy of a decoupled loss has the weights of some optimizer steps
ago (`trainer.losses.correction`), whose copy is put in place for a pass. A loss with statistics (z0 of kto,
batch-normalised weights) first sees every micro-batch of the step under the weights at its start, without gradient; its
sums are added over micro-batches and ranks.

`update` is one update phase on the rollouts of one round, for a loop that holds the model itself: the same selection,
plan, stream and loop as an offline run, without its checkpoints. The caller decides when to write
the returned rows and what to do with the weights.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import polars as pl
from torch import Tensor  # noqa: TID253

from lake.judgements.credit import Credit
from lake.read.snapshot import Snapshot
from trainer.backends.base import FrozenPolicy, PolicyBackend, SingleDevice, loss_rows
from trainer.config import TrainConfig
from trainer.data.plan.plan import OptimizerStep, Plan
from trainer.data.select.refusals import find_refusals, refuse
from trainer.data.select.selection import Selection, select
from trainer.data.stream.batch import PackedBatch
from trainer.data.stream.stream import Stream
from trainer.losses import Loss
from trainer.losses.policy import CorrectedLoss
from trainer.policy.model import check_vocabulary
from trainer.runs.batches import batches_frame
from trainer.runs.factories import learning_rate, make_reference
from trainer.runs.metrics import EpisodeFigures, from_sums, metrics_frame

PROXIMAL_EVERY = 4
"""Optimizer steps of a proximal policy where nothing else is said: AReaL cuts a batch into as many."""


def proximal_period(loss: Loss, config: TrainConfig, plan: Plan) -> int:
    """Optimizer steps for which the proximal policy stays the same; 1 where the loss has none.

    The plan's epochs are the periods where `config.minibatches` cuts them.
    """
    if not loss.needs.proximal_logprobs:
        return 1
    if isinstance(loss, CorrectedLoss) and loss.correction.proximal_every is not None:
        return loss.correction.proximal_every
    return PROXIMAL_EVERY if config.minibatches is None else sum(step.epoch == 0 for step in plan.steps)


def fill_batches(
    backend: PolicyBackend,
    reference: FrozenPolicy | None,
    loss: Loss,
    batches: Sequence[PackedBatch],
    *,
    proximal: bool = False,
) -> tuple[list[PackedBatch], Mapping[str, float]]:
    """This rank's micro-batches, dummies included, on the policy's device with what the loss needs filled in.

    Also returns what `loss.prepare` came to over all ranks. With `proximal`, the proximal policy is the copy that the
    backend keeps, and not the policy as it is.

    Raises:
        ContractError: the backend keeps no copy.
    """
    filled = [batch.to(backend.policy.device) for batch in batches]
    if reference is not None:
        filled = [replace(batch, reference_logprobs_N=reference.logprobs(batch)) for batch in filled]
    if proximal:
        with backend.as_proximal():
            filled = [replace(batch, proximal_logprobs_N=backend.logprobs(batch)) for batch in filled]
    if not loss.needs.statistics:
        return filled, {}
    # Dummies too: across ranks all must make the same passes.
    passed = [(batch, backend.logprobs(batch)) for batch in filled]
    rows = [loss_rows(batch, loss, logprobs_N, None) for batch, logprobs_N in passed if not batch.dummy]
    sums = loss.prepare(rows) if rows else {}
    return filled, backend.ranks.summed({name: float(value) for name, value in sums.items()})


@dataclass(frozen=True, slots=True)
class StepReport:
    """What an update did."""

    step: OptimizerStep
    """What it consumed."""
    metrics: dict[str, float]
    """Names of `lake.read.metric_names.METRICS`."""
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
    """Train a plan from one of its steps on, with a report after each update.

    Args:
        backend: the policy and its optimizer. Across ranks each runs micro-batches of its own, and reports are alike.
        reference: frozen policy of losses that need one; None loads the configuration's.

    Raises:
        ContractError: a token id outside the vocabulary of the model or of the reference, a gradient that is not
            finite, or a first step inside the period of a proximal policy that the backend does not keep.
    """
    loss = config.loss
    if loss.needs.reference_logprobs and reference is None:
        reference = make_reference(config, backend.ranks)
    vocabulary = min(scoring.vocabulary for scoring in (backend, reference) if scoring is not None)
    total, period, figures = len(plan.steps), proximal_period(loss, config, plan), EpisodeFigures(snapshot, plan)
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
                "episode_logprob": sums["logprob"] / len(step.episodes_E),
                "grad_norm": norm,
                "learning_rate": rate,
                "action_tokens": step.loss_tokens,
                "tokens": step.tokens,
                "micro_batches": len(batches) * backend.world_size,
                "seconds": now - began,
            }
            began = now
            yield StepReport(step, metrics | figures.means(step))


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
    return backend.ranks.summed({name: math.fsum(map(float, values)) for name, values in parts.items()})


@dataclass(frozen=True, slots=True)
class Update:
    """What an update phase did."""

    selection: Selection
    """What was trained on, and what was not."""
    reports: list[StepReport]
    """One per optimizer step."""
    batches: pl.DataFrame
    """Rows for the table `batches`."""
    metrics: pl.DataFrame
    """Rows for the table `metrics`."""


def update(
    backend: SingleDevice,
    snapshot: Snapshot,
    source: Credit | None,
    config: TrainConfig,
    *,
    learning_rate: float,
    first_step: int = 0,
    own_encoding: int | None = None,
    reference: FrozenPolicy | None = None,
    on_step: Callable[[StepReport, int], object] | None = None,
) -> Update:
    """Train on the episodes of `config.where`: `config.epochs` passes of `config.minibatches` optimizer steps.

    Args:
        backend: the policy and its optimizer, which keep their state between phases.
        source: where advantages come from; None for losses without.
        config: loss, where, epochs, minibatches. `seed` decides the order of the episodes: change it from phase to
            phase.
        learning_rate: peak of `config.schedule` over this phase.
        first_step: number of the first optimizer step, for rows of a loop that counts through.
        own_encoding: encoding_id of the model's tokens, if the episodes come in several.
        reference: see `run_steps`.
        on_step: told each report, and how many there will be, before the next update.

    Raises:
        DataRefusedError: nothing to train on, or data that cannot support the loss.
    """
    loss = config.loss
    selection = select(
        snapshot,
        config,
        loss.needs,
        source=source,
        own_encoding=None if own_encoding is None else lambda: own_encoding,
    )
    refuse(find_refusals(snapshot, selection.members, loss))
    plan = Plan(selection, config)
    reports = []
    for report in run_steps(backend, snapshot, plan, config, peak=learning_rate, reference=reference):
        reports.append(report)
        if on_step is not None:
            on_step(report, len(plan.steps))
    metrics = metrics_frame([(report.step.index + first_step, report.metrics) for report in reports])
    batches = batches_frame(plan, [report.step for report in reports]).with_columns(
        pl.col("optimizer_step") + first_step
    )
    return Update(selection, reports, batches, metrics)
