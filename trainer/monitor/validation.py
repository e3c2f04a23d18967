"""Validation on held-out episodes while a run trains, and when to stop.

What is measured is the mean negative log-likelihood of the held-out episodes' action tokens: it exists for every loss,
and it rises when a policy leaves the data. Whether to stop is a pure function of the measurements so far, which the
checkpoint holds, so a resumed run stops where an undisturbed one does.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lake.read.snapshot import Snapshot
from trainer.config import ValidationConfig
from trainer.data.stream.stream import Stream
from trainer.losses import Needs

if TYPE_CHECKING:
    from trainer.backends.base import PolicyBackend
    from trainer.config import TrainConfig
    from trainer.data.plan.plan import Plan

Measurement = tuple[int, float]
"""Updates done, negative log-likelihood in nats per token."""


def best(history: Sequence[Measurement], min_improvement: float = 0.0) -> Measurement | None:
    """The measurement that later ones have to beat; None before the first.

    A measurement takes the place of the best before it if it is lower by more than `min_improvement`; NaN never is.
    """
    winner: Measurement | None = None
    for step, value in history:
        if not math.isnan(value) and (winner is None or value < winner[1] - min_improvement):
            winner = (step, value)
    return winner


def exported_step(history: Sequence[Measurement], config: ValidationConfig | None) -> int | None:
    """Updates done at the weights that are exported in place of the last ones; None if the last ones are."""
    winner = None if config is None or not config.export else best(history, config.min_improvement)
    return None if winner is None else winner[0]


def should_stop(history: Sequence[Measurement], config: ValidationConfig) -> bool:
    """Whether `patience` measurements in a row brought no improvement."""
    if config.patience is None or not history:
        return False
    winner = best(history, config.min_improvement)
    since = sum(1 for step, _ in history if winner is None or step > winner[0])
    return since >= config.patience


def negative_log_likelihood(backend: "PolicyBackend", snapshot: Snapshot, plan: "Plan", config: "TrainConfig") -> float:
    """Mean negative log-likelihood of a plan's trained tokens, in nats, at temperature 1; no weight changes."""
    total = 0.0
    with Stream(snapshot, plan, Needs(), config, rank=backend.rank, world_size=backend.world_size) as stream:
        for _, batches in stream.steps():
            total -= math.fsum(float(backend.logprobs(batch).sum()) for batch in batches if not batch.dummy)
    return backend.ranks.summed({"nll": total})["nll"] / plan.loss_tokens
