"""Rows of the table `batches`: what each update consumed, and what it weighed in the update's loss.

The weights are those that the stream hands to the loss (`trainer.data.stream.stream.shares_of`), so that readers need
not know how a loss is averaged. Losses on preferences weigh units and no single tokens: theirs stay NULL.
"""

from collections.abc import Iterable

import numpy as np
import polars as pl

from trainer.data.plan.plan import OptimizerStep, Plan
from trainer.data.stream.batch import ranges, starts
from trainer.data.stream.stream import shares_of


def batches_frame(plan: Plan, steps: Iterable[OptimizerStep]) -> pl.DataFrame:
    """A row for each episode, or side of a pair, that some optimizer steps consumed, in their order."""
    return pl.concat([_of_step(plan, step) for step in steps])


def _of_step(plan: Plan, step: OptimizerStep) -> pl.DataFrame:
    rows = plan.consumed(step)
    if plan.sign_M is not None:
        empty = {"loss_weight": pl.lit(None, pl.Float64), "token_weights": pl.lit(None, pl.List(pl.Float32))}
        return rows.with_columns(**empty)
    first_E = plan.sequence_starts_E[step.episodes_E]
    sequences_E = plan.sequence_starts_E[step.episodes_E + 1] - first_E
    sequences_Q = ranges(first_E, sequences_E)
    members_M, members_Q = plan.members_of(sequences_Q)
    weight_M = shares_of(plan, step, sequences_Q).weight_M
    entry_M = np.repeat(np.repeat(np.arange(rows.height), sequences_E), members_Q)
    trained_M = plan.trained_M[members_M]
    step_M = plan.members["step_index"].to_numpy()[members_M]
    # Steps of an entry lie from its first trained one to its last; those between that carry no loss weigh 0.
    first_step_E = rows["first_step"].to_numpy()
    spans_E = rows["last_step"].to_numpy() - first_step_E + 1
    at_M = starts(spans_E)[entry_M] + step_M - first_step_E[entry_M]
    weights = np.zeros(int(spans_E.sum()), np.float32)
    weights[at_M[trained_M]] = weight_M[trained_M]
    mass_M = weight_M.astype(np.float64) * plan.loss_tokens_M[members_M]
    lists = pl.DataFrame({"entry": np.repeat(np.arange(rows.height), spans_E), "weights": weights})
    return rows.with_columns(
        loss_weight=pl.Series(np.bincount(entry_M, mass_M, rows.height)),
        token_weights=lists.group_by("entry", maintain_order=True).all()["weights"],
    )
