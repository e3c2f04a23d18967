"""What one rank has of each optimizer step: its micro-batches.

Whoever reads ahead needs to know them before whoever lays them out, in another thread; they are packed once for both.
"""

import numpy as np

from trainer.data.plan.plan import OptimizerStep, Plan
from trainer.data.stream.batch import Ints, ranges


class Share:
    """One of `world_size` equal shares of a plan's optimizer steps; all of each where there is one rank."""

    def __init__(self, plan: Plan, rank: int = 0, world_size: int = 1) -> None:
        self._plan, self._rank, self._world_size = plan, rank, world_size
        self._packed: dict[int, list[list[int]]] = {}

    def members(self, step: OptimizerStep) -> Ints:
        """The members of its sequences of a step, int64; remembers how they are packed."""
        if self._world_size == 1:
            return self.all_members(step)
        bins = self._packed[step.index] = self._bins(step)
        return self._plan.members_of(np.array([q for items in bins for q in items], np.int64))[0]

    def all_members(self, step: OptimizerStep) -> Ints:
        """The members of all ranks' sequences of a step, int64."""
        sequences_E, members_Q = self._plan.sequence_starts_E, self._plan.member_starts_Q
        firsts = members_Q[sequences_E[step.episodes_E]]
        return ranges(firsts, members_Q[sequences_E[step.episodes_E + 1]] - firsts)

    def micro_batches(self, step: OptimizerStep) -> list[list[int]]:
        """Sequence numbers of each of its micro-batches (`Plan.micro_batches`), to be asked for once."""
        packed = self._packed.pop(step.index, None)
        return self._bins(step) if packed is None else packed

    def _bins(self, step: OptimizerStep) -> list[list[int]]:
        return self._plan.micro_batches(step, self._world_size)[self._rank]
