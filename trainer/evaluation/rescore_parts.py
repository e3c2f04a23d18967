"""Rescoring on an executor: parts are chunks of whole episodes, and each worker process loads the checkpoint once.

Parts are handed out until a round's time is up; the round's terminal row accepts what they wrote. The chunks are those
of a run in one process, and each is laid out and batched as there, so that the log-probabilities are the same numbers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from lake.errors import CheckpointError
from lake.execution.held import held
from lake.read.snapshot import Snapshot
from lake.write.parts import JobPart, Written
from trainer.backends.base import tensor_digest
from trainer.config import TrainConfig
from trainer.data.select.selection import Selection
from trainer.evaluation.checkpoints import Place, open_policy
from trainer.evaluation.ratios import ratio_rows
from trainer.evaluation.scoring import score

if TYPE_CHECKING:
    from trainer.policy.model import Policy


@dataclass(frozen=True, slots=True)
class Task:
    """What all parts share."""

    place: Place
    digest: str
    """Of the weights: every node must find the same in the place."""
    name: str
    """Of the checkpoint, in `ratios`."""
    config: TrainConfig
    snapshot: Snapshot
    part: JobPart


@dataclass(frozen=True, slots=True)
class RescoredPart:
    """What a part wrote."""

    written: tuple[Written, ...]
    rows: int
    tokens: int


def rescore_part(item: tuple[Task, Selection]) -> RescoredPart:
    """Score the actions of a chunk in a worker process, and write them; CheckpointError if its weights are others."""
    task, chunk = item
    device = task.config.device
    policy = held("policy", (str(task.place.path), task.digest, device), lambda: _policy(task, device))
    snapshot = task.snapshot
    rows = ratio_rows(
        snapshot, pl.concat(list(score(policy, snapshot, chunk, task.config))), task.name, task.place.policy_version
    )
    written = task.part.write("ratios", rows)
    return RescoredPart(() if written is None else (written,), rows.height, int(rows["n_action"].sum()))


def _policy(task: Task, device: str) -> "Policy":
    policy, _ = open_policy(task.place, device)
    if tensor_digest(policy.state()) != task.digest:
        raise CheckpointError(f"{task.place.path} holds other weights on this node than where the job began")
    return policy
