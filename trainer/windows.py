"""Which row groups are read when: each once per window of consecutive optimizer steps, ahead of their need.

The order of episodes is a hash's, so an optimizer step needs rows from all over the table. Reading whole row groups for
each step would decode most of the table again and again. Where all wanted rows fit into the cache they are read once,
for all epochs. Otherwise a window is as many optimizer steps as half of the cache holds; of each row group only the
window's rows are kept, so that an epoch costs as many passes over the table as it has windows, not one per step. The
first windows are small: training starts after the row groups of a few steps.

Axes: `_M` members of the plan, `_Q` sequences.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from lake import ids
from lake.errors import ContractError
from trainer.plan import OptimizerStep, Plan
from trainer.ranges import Ints, ranges
from trainer.row_groups import RowGroup, RowGroupReader

_DENSE = 0.9
"""A row group of whose rows at least this share is wanted is kept as it is, without a copy."""


class Locations:
    """Where each member's tokens lie.

    Args:
        plan: whose members.
        reader: of its files.
        pool: reads the files' footers.

    Attributes:
        group_M: number of the row group, int64 [M].
        row_M: row inside it, int64 [M].
        groups: (file, row group of the file) of each number.
    """

    def __init__(self, plan: Plan, reader: RowGroupReader, pool: ThreadPoolExecutor) -> None:
        file_M, row_M = (plan.members[name].to_numpy() for name in ("file", "row"))
        files = np.unique(file_M).tolist()
        list(pool.map(reader.metadata, files))
        self.groups: list[tuple[int, int]] = []
        self.group_M = np.zeros(len(row_M), np.int64)
        self.row_M = np.zeros(len(row_M), np.int64)
        for file in files:
            here_M = file_M == file
            starts = reader.group_starts(file)
            inner = np.searchsorted(starts, row_M[here_M], side="right") - 1
            self.group_M[here_M] = inner + len(self.groups)
            self.row_M[here_M] = row_M[here_M] - starts[inner]
            self.groups += [(file, number) for number in range(len(starts) - 1)]


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What a window keeps of a row group."""

    group: RowGroup
    """The rows."""
    rows: Ints | None
    """Their numbers in the file's row group, ascending; None: all of them."""

    def at(self, row: int) -> int:
        """Where a row of the file's row group is in `group`."""
        return row if self.rows is None else int(np.searchsorted(self.rows, row))


Task = Callable[[], KeptRows]


class Window:
    """The token rows of some consecutive optimizer steps.

    Reading is handed to the pool row group by row group, before the steps that need them: the pool starts tasks in the
    order in which it got them, so a step that waits for a row group never waits for a task that cannot start.

    Args:
        steps: the optimizer steps, at least one.
        tasks: by number of the row group, what reads it.
        pool: runs them.
    """

    def __init__(self, steps: Sequence[OptimizerStep], tasks: Mapping[int, Task], pool: ThreadPoolExecutor) -> None:
        self.steps = steps
        self._tasks = deque(tasks.items())
        self._pool = pool
        self._futures: dict[int, Future[KeptRows]] = {}

    def begin(self, count: int | None = None) -> None:
        """Hand the next `count` row groups to the pool; None: all that are left."""
        for _ in range(len(self._tasks) if count is None else min(count, len(self._tasks))):
            number, task = self._tasks.popleft()
            self._futures[number] = self._pool.submit(task)

    @property
    def waiting(self) -> int:
        """Row groups that nobody began to read."""
        return len(self._tasks)

    def rows(self, number: int) -> KeptRows:
        """A row group's rows; waits until they are read."""
        return self._futures[number].result()


class Windows:
    """Cuts a plan into windows.

    Args:
        plan: what is read.
        reader: reads row groups.
        locations: of the plan's members.
        pool: reads ahead.
        limit: bytes of tokens to keep; a window holds at least one optimizer step whatever its size.
        ramp: optimizer steps of the first window; each one after it may hold twice as many.
    """

    def __init__(
        self,
        plan: Plan,
        reader: RowGroupReader,
        locations: Locations,
        pool: ThreadPoolExecutor,
        *,
        limit: int,
        ramp: int,
    ) -> None:
        self._plan, self._reader, self._locations, self._pool = plan, reader, locations, pool
        self._limit, self._ramp = limit, ramp
        n_context_M, n_action_M = (plan.members[name].to_numpy() for name in ("n_context", "n_action"))
        self._bytes_M = 4 * n_context_M.astype(np.int64) + reader.bytes_per_action * n_action_M

    def cut(self, steps: Sequence[OptimizerStep]) -> Iterator[Window]:
        """Windows over optimizer steps, in order; nothing is read yet."""
        if int(self._bytes_M.sum()) <= self._limit:
            if steps:
                yield self._window(steps)
            return
        first, longest = 0, self._ramp
        while first < len(steps):
            size, count = 0, 0
            for step in steps[first : first + longest]:
                size += int(self._bytes_M[self._members(step.episodes_E)].sum())
                if count and size > self._limit // 2:
                    break
                count += 1
            yield self._window(steps[first : first + count])
            first, longest = first + count, 2 * longest

    def _window(self, steps: Sequence[OptimizerStep]) -> Window:
        wanted_M = np.unique(self._members(np.unique(np.concatenate([step.episodes_E for step in steps]))))
        group_M = self._locations.group_M[wanted_M]
        order = np.argsort(group_M, kind="stable")
        numbers, firsts = np.unique(group_M[order], return_index=True)
        parts = np.split(wanted_M[order], firsts[1:])
        reads = [partial(self._read, number, part) for number, part in zip(numbers.tolist(), parts, strict=True)]
        return Window(steps, dict(zip(numbers.tolist(), reads, strict=True)), self._pool)

    def _members(self, episodes_E: Ints) -> Ints:
        """Members of episodes."""
        sequences_E, members_Q = self._plan.sequence_starts_E, self._plan.member_starts_Q
        firsts, lasts = members_Q[sequences_E[episodes_E]], members_Q[sequences_E[episodes_E + 1]]
        return ranges(firsts, lasts - firsts)

    def _read(self, number: int, wanted_M: Ints) -> KeptRows:
        """Read a row group, compare it with the plan, and keep what is wanted."""
        group = self._reader.read(*self._locations.groups[number])
        row_M = self._locations.row_M[wanted_M]
        self._check_lengths(group, row_M, wanted_M)
        rows = np.unique(row_M)
        if len(rows) >= _DENSE * group.rows:
            return KeptRows(group, None)
        return KeptRows(group.take(rows), rows)

    def _check_lengths(self, group: RowGroup, row_M: Ints, wanted_M: Ints) -> None:
        """The plan was made from n_context and n_action: they must be what the lists hold."""
        context, action = group.lengths(row_M)
        planned = self._plan.members[wanted_M].select("episode_id", "step_index", "n_context", "n_action")
        bad = (context != planned["n_context"].to_numpy()) | (action != planned["n_action"].to_numpy())
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            row = planned.row(at, named=True)
            msg = (
                f"table `tokens`, row episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}: "
                f"n_context {row['n_context']} and n_action {row['n_action']} do not match the lists' lengths "
                f"{context[at]} and {action[at]}; record the episode again"
            )
            raise ContractError(msg)
