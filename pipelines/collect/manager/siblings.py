"""Siblings: the rollouts of one task in one round, while they run.

They begin in the same messages, or none of them is compared with another. Where more are played than are wanted, the
first that finish are kept (`keep` is first), or all of them until a selection chooses the best.
"""

from typing import Literal

import msgspec

from lake import ids
from lake.records import EpisodeRecord
from pipelines.collect.environments import Task
from pipelines.collect.manager.rounds import Group, start_hash
from pipelines.collect.players import StartError

Keep = Literal["all", "first", "best"]
FINISHED = ("completed", "truncated")
"""`status` of rollouts that were played to their end."""


class Siblings(msgspec.Struct, kw_only=True):
    """A group that is played."""

    group: Group
    task: Task
    total: int
    """Rollouts that are going to end, one way or the other."""
    expected: int | None = None
    """Rollouts that credit is going to see."""
    enough: int | None = None
    """Rollouts that have to finish; those that still run then are superfluous. None: all are played to their end."""
    start: int | None = None
    """How it begins, once anybody knows."""
    ended: int = 0
    finished: int = 0
    unwritten: int = 0
    """Rollouts that have ended and wait for the disk."""
    broken: str | None = None
    """Why its rewards cannot be compared."""

    @property
    def is_full(self) -> bool:
        """Whether those that still run are superfluous."""
        return self.enough is not None and self.finished >= self.enough

    @property
    def is_closed(self) -> bool:
        """Whether no further rollout begins."""
        return self.is_full or self.broken is not None

    def finish(self, status: str) -> None:
        """A rollout was played to `status`; that it is on the disk is not waited for, so that the next one knows."""
        self.finished += status in FINISHED

    def check(self, record: EpisodeRecord) -> None:
        """Compare how a rollout begins with its siblings. Raises StartError."""
        own = start_hash(record)
        if self.start is None:
            self.start = own
        elif own != self.start:
            self.broken = (
                f"task {record.task_id!r} (seed {self.group.seed}) began differently in rollout {record.rollout_index} "
                f"of round {self.group.number}: the hash of its first messages and tools is {ids.to_text(own)}, and "
                f"that of its siblings {ids.to_text(self.start)}; their rewards cannot be compared. The environment's "
                "`reset` has to answer equal tasks alike, in every process"
            )
            raise StartError(self.broken)
