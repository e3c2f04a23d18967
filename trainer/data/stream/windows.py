"""Which token rows are read when: each row group once per window of consecutive optimizer steps, ahead of their need.

The order of episodes is a hash's, so an optimizer step needs rows from all over the table. Reading whole row groups for
each step would decode most of the table again and again. Where all wanted rows fit into the cache they are read once,
for all epochs. Otherwise a window is as many optimizer steps as half of the cache holds, and an epoch costs as many
passes over the table as it has windows, not one per step. The first windows are small: training starts after the row
groups of a few steps.

A rank's windows hold the rows of its own micro-batches, and read the row groups in which these lie: they span as many
times more optimizer steps as there are ranks, so that each rank makes so many times fewer passes.

A window's memory is laid out by the plan before anything is read; a decoded row group is copied to its places in it and
forgotten. Rows of an episode are neighbours, so that its contexts are one slice and its actions another.

Axes: `_M` members of the plan, `_R` rows of a window, `_C` their context tokens, `_A` their action tokens.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from lake import ids
from lake.errors import ContractError
from trainer.data.plan.plan import OptimizerStep, Plan
from trainer.data.stream.batch import Ints, ranges, starts
from trainer.data.stream.row_groups import RowGroupReader
from trainer.data.stream.share import Share


class Locations:
    """Where each member's tokens lie.

    Attributes:
        group_M: number of the row group, int64 [M].
        row_M: row inside it, int64 [M].
        lengths_M2: numbers of context and of action tokens, int64 [M, 2].
        groups: (file, row group of the file) of each number.
    """

    def __init__(self, plan: Plan, reader: RowGroupReader, pool: ThreadPoolExecutor) -> None:
        file_M, row_M = (plan.members[name].to_numpy() for name in ("file", "row"))
        files = np.unique(file_M).tolist()
        list(pool.map(reader.metadata, files))
        self.groups: list[tuple[int, int]] = []
        self.group_M = np.zeros(len(row_M), np.int64)
        self.row_M = np.zeros(len(row_M), np.int64)
        self.lengths_M2: Ints = plan.members.select("n_context", "n_action").to_numpy().astype(np.int64)
        for file in files:
            here_M = file_M == file
            first_rows = reader.group_starts(file)
            inner = np.searchsorted(first_rows, row_M[here_M], side="right") - 1
            self.group_M[here_M] = inner + len(self.groups)
            self.row_M[here_M] = row_M[here_M] - first_rows[inner]
            self.groups += [(file, number) for number in range(len(first_rows) - 1)]


class Window:
    """The token rows of some consecutive optimizer steps.

    Reading is handed to a pool row group by row group, window after window; steps wait for it in threads of another
    pool, so that neither holds up the other.

    Args:
        wanted_M: members of theirs, ascending.

    Attributes:
        context_C: ids of context tokens of all rows, int32 [C].
        action_A: ids of action tokens, int32 [A].
        mask_A: action masks, bool [A], if they are read.
        logprobs_A: behaviour log-probabilities, float32 [A], NaN where there are none, if they are read.
        context_starts_R: row r has the context tokens [context_starts_R[r], context_starts_R[r + 1]).
        action_starts_R: and these places in the three arrays of action tokens.
        bytes: memory of the tokens.
    """

    def __init__(
        self,
        steps: Sequence[OptimizerStep],
        wanted_M: Ints,
        plan: Plan,
        locations: Locations,
        reader: RowGroupReader,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.steps = steps
        self._plan, self._locations, self._reader, self._pool = plan, locations, reader, pool
        # Groups hold less than 2^32 rows: one sort instead of two, and of a few ascending runs.
        place_M = (locations.group_M[wanted_M] << 32) | locations.row_M[wanted_M]
        order = np.argsort(place_M, kind="stable")
        is_new = np.diff(place_M[order], prepend=-1) != 0
        self._wanted_M = wanted_M
        self._slot_M = np.empty(len(wanted_M), np.int64)
        self._slot_M[order] = np.cumsum(is_new) - 1
        self._member_R = wanted_M[order[is_new]]
        self.context_starts_R, self.action_starts_R = map(starts, locations.lengths_M2[self._member_R].T)
        group_R = locations.group_M[self._member_R]
        firsts = np.flatnonzero(np.diff(group_R, prepend=-1))
        places = pairwise([*firsts.tolist(), len(group_R)])
        self._parts = [(number, *place) for number, place in zip(group_R[firsts].tolist(), places, strict=True)]
        self._reading: dict[int, Future[None]] = {}
        self._complete = False
        actions = int(self.action_starts_R[-1])
        self.context_C = np.empty(int(self.context_starts_R[-1]), np.int32)
        self.action_A = np.empty(actions, np.int32)
        self.mask_A = np.empty(actions, np.bool_) if reader.masks else None
        self.logprobs_A = np.empty(actions, np.float32) if reader.logprobs else None
        self.bytes = 4 * len(self.context_C) + reader.bytes_per_action * actions

    def begin(self) -> None:
        """Hand the row groups to the pool."""
        for number, low, high in self._parts:
            self._reading[number] = self._pool.submit(self._read, number, low, high)

    def rows(self, chosen_M: Ints) -> Ints:
        """Numbers of the rows of some members, int64; waits until they are read."""
        if not self._complete:
            for number in np.unique(self._locations.group_M[chosen_M]).tolist():
                self._reading[number].result()
            # Once nothing is left to wait for, no step looks again.
            self._complete = all(map(_succeeded, self._reading.values()))
        everything = len(self._wanted_M) == len(self._locations.group_M)
        return self._slot_M[chosen_M if everything else np.searchsorted(self._wanted_M, chosen_M)]

    def _read(self, number: int, low: int, high: int) -> None:
        """Read a row group and copy what is wanted of it to rows [low, high)."""
        group = self._reader.read(*self._locations.groups[number])
        rows = self._locations.row_M[self._member_R[low:high]]
        context, action = group.lengths(rows)
        self._check_lengths(context, action, low)
        context_at, action_at = _span(group.context_starts, rows, context), _span(group.action_starts, rows, action)
        self.context_C[self.context_starts_R[low] : self.context_starts_R[high]] = group.context_C[context_at]
        places = slice(self.action_starts_R[low], self.action_starts_R[high])
        self.action_A[places] = group.action_A[action_at]
        if self.mask_A is not None and group.mask_A is not None:
            self.mask_A[places] = group.mask_A[action_at]
        if self.logprobs_A is not None and group.logprobs_A is not None:
            self.logprobs_A[places] = group.logprobs_A[action_at]

    def _check_lengths(self, context: Ints, action: Ints, low: int) -> None:
        """The plan was made from n_context and n_action: they must be what the lists hold."""
        planned = self._locations.lengths_M2[self._member_R[low : low + len(context)]]
        bad = np.flatnonzero((planned[:, 0] != context) | (planned[:, 1] != action))
        if len(bad):
            at = int(bad[0])
            row = self._plan.members.row(int(self._member_R[low + at]), named=True)
            raise ContractError(
                f"table `tokens`, row episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}: "
                f"n_context {row['n_context']} and n_action {row['n_action']} do not match the lists' lengths "
                f"{context[at]} and {action[at]}; record the episode again"
            )


def _succeeded(future: Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _span(first_tokens: Ints, rows: Ints, counts: Ints) -> slice | Ints:
    """Where the tokens of some rows are among those of all: one slice if the rows are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(first_tokens[rows[0]], first_tokens[rows[-1] + 1])
    return ranges(first_tokens[rows], counts)


class Windows:
    """Cuts a rank's share of a plan into windows.

    Args:
        limit: bytes of tokens to keep; a window holds at least one optimizer step whatever its size.
        ramp: optimizer steps of the first window; each one after it may hold twice as many.
    """

    def __init__(
        self,
        plan: Plan,
        share: Share,
        reader: RowGroupReader,
        locations: Locations,
        pool: ThreadPoolExecutor,
        *,
        limit: int,
        ramp: int,
    ) -> None:
        self._plan, self._share, self._reader, self._locations, self._pool = plan, share, reader, locations, pool
        self._limit, self._ramp = limit, ramp
        self._bytes_M = locations.lengths_M2 @ np.array([4, reader.bytes_per_action])

    def cut(self, steps: Sequence[OptimizerStep]) -> Iterator[Window]:
        """Windows over optimizer steps, in order; nothing is read yet."""
        if int(self._bytes_M.sum()) <= self._limit:
            if steps:
                # Every epoch gives the rank others of the episodes: in the end it needs them all.
                yield self._window(steps, [self._share.all_members(step) for step in steps])
            return
        first, longest = 0, self._ramp
        held: list[Ints] = []
        while first < len(steps):
            size, count = 0, 0
            for step in steps[first : first + longest]:
                if count == len(held):
                    held.append(self._share.members(step))
                size += int(self._bytes_M[held[count]].sum())
                if count and size > self._limit // 2:
                    break
                count += 1
            yield self._window(steps[first : first + count], held[:count])
            held = held[count:]
            first, longest = first + count, 2 * longest

    def _window(self, steps: Sequence[OptimizerStep], held: Sequence[Ints]) -> Window:
        wanted_M = np.unique(np.concatenate(held))
        return Window(steps, wanted_M, self._plan, self._locations, self._reader, self._pool)
