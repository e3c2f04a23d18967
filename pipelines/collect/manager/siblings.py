"""Siblings: the rollouts of one task in one round, while they run.

They begin in the same messages, or none of them is compared with another. Where more are played than are wanted, the
first that finish are kept (`keep` is first), or all of them until a selection chooses the best.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from lake import ids
from lake.records import EpisodeRecord
from pipelines.collect.environments import Task
from pipelines.collect.manager.rounds import Group, Start, start_of
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
    start: Start | None = None
    """How it begins, once anybody knows."""
    ended: int = 0
    finished: set[int] = msgspec.field(default_factory=set)
    """Numbers of the rollouts that were played to their end."""
    unnamed: list[Callable[[], None]] = []
    """Each records a failure whose environment did not open, while nobody knows as yet what it calls the task."""
    unwritten: int = 0
    """Rollouts that have ended and wait for the disk."""
    returns: list[float] = []
    """Of those that finished in this process and were rewarded."""
    broken: str | None = None
    """Why its rewards cannot be compared."""

    @property
    def is_full(self) -> bool:
        """Whether those that still run are superfluous."""
        return self.enough is not None and len(self.finished) >= self.enough

    @property
    def is_closed(self) -> bool:
        """Whether no further rollout begins."""
        return self.is_full or self.broken is not None

    def finish(self, rollout: int, status: str) -> None:
        """A rollout was played to `status`; that it is on the disk is not waited for, so that the next one knows."""
        if status in FINISHED:
            self.finished.add(rollout)
        else:
            self.finished.discard(rollout)

    def check(self, record: EpisodeRecord) -> None:
        """Compare how a rollout begins with its siblings. Raises StartError."""
        own = start_of(record)
        if self.start is None:
            self.start = own
        elif own.hash != self.start.hash:
            hashes = ids.to_text(own.hash), ids.to_text(self.start.hash)
            self.broken = (
                f"task {record.task_id!r} (seed {self.group.seed}) began differently in rollout {record.rollout_index} "
                f"of round {self.group.number}: the hash of its first messages and tools is {hashes[0]}, and that of "
                f"its siblings {hashes[1]}; their rewards cannot be compared. The environment's `reset` has to answer "
                "equal tasks alike, in every process"
            )
            raise StartError(self.broken)
