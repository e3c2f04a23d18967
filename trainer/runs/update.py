"""One update phase on the rollouts of one round, for a loop that holds the model itself.

The same selection, plan, stream and loop as an offline run, without its checkpoints: the caller decides when to write
the returned rows and what to do with the weights.
"""

from dataclasses import dataclass

import polars as pl

from lake.judgements.credit import Credit
from lake.snapshot import Snapshot
from trainer.backends.single import SingleDevice
from trainer.config import TrainConfig
from trainer.data.plan import Plan
from trainer.data.refusals import find_refusals, refuse
from trainer.data.selection import Selection, select
from trainer.runs.loop import StepReport, batches_frame, run_steps
from trainer.runs.metrics import metrics_frame


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
    source: Credit,
    config: TrainConfig,
    *,
    learning_rate: float,
    first_step: int = 0,
    own_encoding: int | None = None,
) -> Update:
    """Train on the episodes of `config.where`: `config.epochs` passes of `config.minibatches` optimizer steps.

    Args:
        backend: the policy and its optimizer, which keep their state between phases.
        snapshot: data that holds the episodes and their advantages.
        source: whose advantages.
        config: loss, where, epochs, minibatches. `seed` decides the order of the episodes: change it from phase to
            phase.
        learning_rate: peak of `config.schedule` over this phase.
        first_step: number of the first optimizer step, for rows of a loop that counts through.
        own_encoding: encoding_id of the model's tokens, if the episodes come in several.

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
    reports = list(run_steps(backend, snapshot, plan, config, peak=learning_rate))
    metrics = metrics_frame([(report.step.index + first_step, report.metrics) for report in reports])
    batches = batches_frame(plan, reports).with_columns(pl.col("optimizer_step") + first_step)
    return Update(selection, reports, batches, metrics)
