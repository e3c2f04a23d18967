"""The stream: the micro-batches of each optimizer step of a plan, read ahead by threads.

Threads suffice: decoding releases the GIL, and sending tensors between processes costs more than it saves (measured:
476,000 samples/s in one process, 64,000 through a worker). Prefetching does not change the result. Steps come out in
the plan's order, and a resumed run starts at any of them, on any number of ranks.

Windows decide when token rows are read. A hash orders the episodes, so an optimizer step needs rows from all over the
table. Reading whole row groups for each step would decode most of the table again and again. If all rows fit into the
cache, each row group is read once for all epochs. Otherwise a window has as many optimizer steps as half of the cache
holds, and an epoch costs one pass over the table per window. The first windows are small, so training starts after the
row groups of a few steps. With several ranks, a window holds only the rows of the rank's micro-batches. It then spans
more optimizer steps, in proportion to the number of ranks, and each rank needs fewer passes.

The plan determines the layout of a window's memory before anything is read. A decoded row group is copied to its
positions in that memory and dropped. Rows of an episode are neighbours, so its contexts are one slice and its actions
another.

A separate thread cuts windows and starts reading them, as far ahead of the model as memory allows. The model waits for
the store at the start, and later only if the store is slower on average.

Axes: `_M` members of the plan, `_Q` sequences, `_U` units, `_R` rows of a window, `_C` their context tokens, `_A` their
action tokens.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.read.snapshot import Snapshot
from trainer.config import TrainConfig
from trainer.data.batch import Buffers, Ints, MemoryArena, PackedBatch, compute_starts, expand_ranges
from trainer.data.collate import MemberColumns, MemberWeights, TokenArrays, collate, make_dummy
from trainer.data.plan import OptimizerStep, Plan
from trainer.data.row_groups import RowGroupReader
from trainer.data.selection import VALUE_TARGET
from trainer.losses import Needs, Temperature
from trainer.losses.base import Unit, number_units


class RankShare:
    """The micro-batches of one rank, out of `world_size`, in each optimizer step of a plan.

    The read-ahead thread needs them before the assembly thread does; each step is packed once for both.
    """

    def __init__(self, plan: Plan, rank: int = 0, world_size: int = 1) -> None:
        self._plan, self._rank, self._world_size = plan, rank, world_size
        self._packed: dict[int, list[list[int]]] = {}

    def list_members(self, step: OptimizerStep) -> Ints:
        """Return the members of the rank's sequences of a step, int64, and keep their packing."""
        if self._world_size == 1:
            return self.list_all_members(step)
        bins = self._packed[step.index] = self._plan.pack_micro_batches(step, self._world_size)[self._rank]
        return self._plan.list_members(np.array([q for items in bins for q in items], np.int64))[0]

    def list_all_members(self, step: OptimizerStep) -> Ints:
        """Return the members of all ranks' sequences of a step, int64."""
        sequences_E, members_Q = self._plan.sequence_starts_E, self._plan.member_starts_Q
        firsts = members_Q[sequences_E[step.episodes_E]]
        return expand_ranges(firsts, members_Q[sequences_E[step.episodes_E + 1]] - firsts)

    def take_micro_batches(self, step: OptimizerStep) -> list[list[int]]:
        """Return the sequence numbers of each micro-batch of the rank, and drop the packing of `list_members`."""
        packed = self._packed.pop(step.index, None)
        return self._plan.pack_micro_batches(step, self._world_size)[self._rank] if packed is None else packed


class Locations:
    """File positions of each member's tokens.

    Attributes:
        group_M: number of the row group, int64 [M].
        row_M: row inside it, int64 [M].
        lengths_M2: numbers of context and of action tokens, int64 [M, 2].
        groups: (file, row group of the file) of each number.
    """

    def __init__(self, plan: Plan, reader: RowGroupReader, pool: ThreadPoolExecutor) -> None:
        file_M, row_M = (plan.members[name].to_numpy() for name in ("file", "row"))
        files = np.unique(file_M).tolist()
        list(pool.map(reader.read_metadata, files))
        self.groups: list[tuple[int, int]] = []
        self.group_M = np.zeros(len(row_M), np.int64)
        self.row_M = np.zeros(len(row_M), np.int64)
        self.lengths_M2: Ints = plan.members.select("n_context", "n_action").to_numpy().astype(np.int64)
        for file in files:
            in_file_M = file_M == file
            first_rows = reader.read_group_starts(file)
            inner = np.searchsorted(first_rows, row_M[in_file_M], side="right") - 1
            self.group_M[in_file_M] = inner + len(self.groups)
            self.row_M[in_file_M] = row_M[in_file_M] - first_rows[inner]
            self.groups += [(file, number) for number in range(len(first_rows) - 1)]


class Window:
    """The token rows of some consecutive optimizer steps.

    One thread pool reads row groups, window after window. Another pool waits for them to assemble steps. Neither blocks
    the other.

    Args:
        members_M: members of these steps, ascending.

    Attributes:
        context_C: ids of context tokens of all rows, int32 [C].
        action_A: ids of action tokens, int32 [A].
        mask_A: action masks, bool [A], if they are read.
        logprobs_A: behaviour log-probabilities, float32 [A], NaN where a row has none, if they are read.
        context_starts_R: row r has the context tokens [context_starts_R[r], context_starts_R[r + 1]).
        action_starts_R: the same for the three arrays of action tokens.
        bytes: memory of the tokens.
    """

    def __init__(
        self,
        steps: Sequence[OptimizerStep],
        members_M: Ints,
        plan: Plan,
        locations: Locations,
        reader: RowGroupReader,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.steps = steps
        self._plan, self._locations, self._reader, self._pool = plan, locations, reader, pool
        # Row groups have fewer than 2^32 rows, so one sort of combined keys replaces two sorts.
        location_M = (locations.group_M[members_M] << 32) | locations.row_M[members_M]
        order = np.argsort(location_M, kind="stable")
        is_new = np.diff(location_M[order], prepend=-1) != 0
        self._members_M = members_M
        self._slot_M = np.empty(len(members_M), np.int64)
        self._slot_M[order] = np.cumsum(is_new) - 1
        self._member_R = members_M[order[is_new]]
        self.context_starts_R, self.action_starts_R = map(compute_starts, locations.lengths_M2[self._member_R].T)
        group_R = locations.group_M[self._member_R]
        firsts = np.flatnonzero(np.diff(group_R, prepend=-1))
        bounds = pairwise([*firsts.tolist(), len(group_R)])
        self._row_groups = [(group, *rows) for group, rows in zip(group_R[firsts].tolist(), bounds, strict=True)]
        self._reading: dict[int, Future[None]] = {}
        self._complete = False
        actions = int(self.action_starts_R[-1])
        self.context_C = np.empty(int(self.context_starts_R[-1]), np.int32)
        self.action_A = np.empty(actions, np.int32)
        self.mask_A = np.empty(actions, np.bool_) if reader.masks else None
        self.logprobs_A = np.empty(actions, np.float32) if reader.logprobs else None
        self.bytes = 4 * len(self.context_C) + reader.bytes_per_action * actions

    def begin(self) -> None:
        """Submit the row groups to the pool."""
        for number, low, high in self._row_groups:
            self._reading[number] = self._pool.submit(self._read, number, low, high)

    def wait_for_rows(self, member_M: Ints) -> Ints:
        """Wait until some members are read; return the numbers of their rows, int64."""
        if not self._complete:
            for number in np.unique(self._locations.group_M[member_M]).tolist():
                self._reading[number].result()
            # Later steps skip the wait once all row groups are read.
            self._complete = all(
                future.done() and not future.cancelled() and future.exception() is None
                for future in self._reading.values()
            )
        has_all = len(self._members_M) == len(self._locations.group_M)
        return self._slot_M[member_M if has_all else np.searchsorted(self._members_M, member_M)]

    def _read(self, number: int, low: int, high: int) -> None:
        """Read a row group and copy the window's rows of it to rows [low, high)."""
        group = self._reader.read(*self._locations.groups[number])
        rows = self._locations.row_M[self._member_R[low:high]]
        context, action = group.count_tokens(rows)
        self._check_lengths(context, action, low)
        tokens = _select_tokens(group.context_starts, rows, context)
        self.context_C[self.context_starts_R[low] : self.context_starts_R[high]] = group.context_C[tokens]
        tokens = _select_tokens(group.action_starts, rows, action)
        target = slice(self.action_starts_R[low], self.action_starts_R[high])
        self.action_A[target] = group.action_A[tokens]
        if self.mask_A is not None and group.mask_A is not None:
            self.mask_A[target] = group.mask_A[tokens]
        if self.logprobs_A is not None and group.logprobs_A is not None:
            self.logprobs_A[target] = group.logprobs_A[tokens]

    def _check_lengths(self, context: Ints, action: Ints, low: int) -> None:
        """Check n_context and n_action, which the plan used, against the lengths of the lists."""
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


def _select_tokens(first_tokens: Ints, rows: Ints, counts: Ints) -> slice | Ints:
    """Return the positions of the tokens of some rows: one slice if the rows are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(first_tokens[rows[0]], first_tokens[rows[-1] + 1])
    return expand_ranges(first_tokens[rows], counts)


class Windows:
    """Cuts a rank's share of a plan into windows.

    Args:
        limit: maximum bytes of tokens; a window holds at least one optimizer step of any size.
        ramp: optimizer steps of the first window; the maximum doubles with each window.
    """

    def __init__(
        self,
        plan: Plan,
        share: RankShare,
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
        """Yield windows over optimizer steps, in order; nothing is read yet."""
        if int(self._bytes_M.sum()) <= self._limit:
            if steps:
                # Every epoch gives the rank other episodes, so over all epochs it may need any of them.
                yield self._build_window(steps, [self._share.list_all_members(step) for step in steps])
            return
        first, longest = 0, self._ramp
        members_of_steps: list[Ints] = []
        while first < len(steps):
            size, count = 0, 0
            for step in steps[first : first + longest]:
                if count == len(members_of_steps):
                    members_of_steps.append(self._share.list_members(step))
                size += int(self._bytes_M[members_of_steps[count]].sum())
                if count and size > self._limit // 2:
                    break
                count += 1
            yield self._build_window(steps[first : first + count], members_of_steps[:count])
            members_of_steps = members_of_steps[count:]
            first, longest = first + count, 2 * longest

    def _build_window(self, steps: Sequence[OptimizerStep], members_of_steps: Sequence[Ints]) -> Window:
        members_M = np.unique(np.concatenate(members_of_steps))
        return Window(steps, members_M, self._plan, self._locations, self._reader, self._pool)


class ReadAhead:
    """Yields windows in order and starts to read each as early as possible.

    Use it as a context: leaving it ends the thread.
    The windows in memory, including the one in use, have at most `limit` bytes if each has at most half of that. One
    window ahead of the one in use is always started.
    """

    def __init__(self, windows: Iterator[Window], limit: int) -> None:
        self._windows, self._limit = windows, limit
        self._open_windows: deque[Window] = deque()
        self._changed = threading.Condition()
        self._stopped = self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trajlake-windows", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Start no more windows and join the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def steps(self) -> Iterator[tuple[OptimizerStep, Window]]:
        """Yield the optimizer steps, each with its window. Asking for a step of the next window releases the last."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open_windows or self._ended)
                window = self._open_windows[0] if self._open_windows else None
            if window is None:
                break
            for step in window.steps:
                yield step, window
            with self._changed:
                self._open_windows.popleft()
                self._changed.notify_all()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._wait_for_room() and (window := next(self._windows, None)) is not None:
                window.begin()
                with self._changed:
                    self._open_windows.append(window)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error  # `steps` raises it
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until memory allows another window; return False after `stop`."""
        windows = self._open_windows
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or len(windows) < 2 or sum(w.bytes for w in windows) <= self._limit // 2
            )
            return not self._stopped


class Assembler:
    """Lays out optimizer steps in packed batches."""

    def __init__(self, plan: Plan, needs: Needs, share: RankShare, *, pinned: bool) -> None:
        self._plan, self._needs, self._share, self._pinned = plan, needs, share, pinned
        self._buffers = Buffers()
        takes = [name for name in ("takes_context", "takes_action") if name in plan.members.columns]
        self._takes_M2: npt.NDArray[np.bool_] | None = plan.members.select(takes).to_numpy() if takes else None
        """Whether a member's context and its action belong to its sequence, bool [M, 2]; None where all do."""
        self._columns = _build_member_columns(plan, needs, self._takes_M2)

    def assemble(self, step: OptimizerStep, window: Window) -> list[PackedBatch]:
        """Return this rank's micro-batches of an optimizer step."""
        bins = self._share.take_micro_batches(step)
        full = [items for items in bins if items]
        batches = []
        if full:
            sequences_Q = np.concatenate([np.array(items) for items in full])
            member_M, members_Q = self._plan.list_members(sequences_Q)
            columns = self._columns.take(member_M)
            # A batch needs at most 12 bytes for every token and 80 more for one of an action.
            actions = int(columns.n_action_M.sum())
            arena = self._buffers.allocate_arena(12 * (int(columns.n_context_M.sum()) + actions) + 80 * actions + 4096)
            batches = collate(
                columns,
                members_Q,
                self._gather_tokens(member_M, window, arena),
                compute_weights(self._plan, step, sequences_Q),
                [len(items) for items in full],
                pinned=self._pinned,
                allocate=arena.allocate,
            )
        missing = len(bins) - len(full)
        if missing:
            blank = make_dummy(
                self._columns,
                logprobs=self._needs.behaviour_logprobs,
                units=self._plan.weighting.unit is not Unit.TOKEN,
                pairs=self._plan.paired,
                signs=self._plan.sign_M is not None,
            )
            batches += [blank] * missing
        return batches

    def _gather_tokens(self, member_M: Ints, window: Window, arena: MemoryArena) -> TokenArrays:
        """Return the tokens of members, end to end."""
        context_R = action_R = window.wait_for_rows(member_M)
        if self._takes_M2 is not None:
            takes_context, takes_action = self._takes_M2[member_M].T
            context_R, action_R = context_R[takes_context], action_R[takes_action]
        actions = _list_slices(action_R, window.action_starts_R)
        return TokenArrays(
            context_C=_concat_slices(window.context_C, _list_slices(context_R, window.context_starts_R), arena),
            action_A=_concat_slices(window.action_A, actions, arena),
            mask_A=None if window.mask_A is None else _concat_slices(window.mask_A, actions, arena),
            logprobs_A=None if window.logprobs_A is None else _concat_slices(window.logprobs_A, actions, arena),
        )


def _list_slices(row_R: Ints, starts_R: Ints) -> list[slice]:
    """Return the slices of the tokens of rows; neighbouring rows share a slice."""
    lows = starts_R[row_R[np.diff(row_R, prepend=-2) != 1]]
    highs = starts_R[row_R[np.diff(row_R, append=-2) != 1] + 1]
    return [slice(low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]


def _concat_slices(values: npt.NDArray[Any], slices: list[slice], arena: MemoryArena) -> npt.NDArray[Any]:
    """Concatenate slices of an array."""
    out = arena.allocate(sum(part.stop - part.start for part in slices), values.dtype)
    return np.concatenate([values[part] for part in slices], out=out)


def compute_weights(plan: Plan, step: OptimizerStep, sequences_Q: Ints) -> MemberWeights:
    """Return the weights and units of the members of some sequences, which are in the order of a buffer.

    Atoms are not split: all sequences of a unit are present or none is.
    """
    weighting = plan.weighting
    member_M, members_Q = plan.list_members(sequences_Q)
    trained_M = plan.trained_M[member_M]
    firsts_E = plan.sequence_starts_E
    opens_Q = firsts_E[np.searchsorted(firsts_E, sequences_Q)] == sequences_Q
    unit_M = number_units(weighting.unit, trained_M, members_Q, opens_Q)
    tokens_U = np.bincount(unit_M[trained_M], plan.loss_tokens_M[member_M][trained_M]).astype(np.int64)
    weight_U = weighting.weights(tokens_U, tokens=step.loss_tokens, units=step.units)
    # A turn that is not trained has no number, and none of its tokens carries loss.
    weight_M = np.where(trained_M, weight_U[np.maximum(unit_M, 0)], 0.0).astype(np.float32)
    value_weight = 0.0
    if VALUE_TARGET in plan.members.columns:
        value_weight = 1.0 / int(plan.trained_M[RankShare(plan).list_all_members(step)].sum())
    if weighting.unit is Unit.TOKEN:
        return MemberWeights(weight_M, value_weight=value_weight)
    sign_U = None
    if plan.sign_M is not None:
        sign_U = plan.sign_M[member_M][trained_M][np.unique(unit_M[trained_M], return_index=True)[1]]
    # The two sides of a pair are units, one after the other.
    pair_U = np.arange(len(tokens_U)) // 2 if plan.paired else None
    return MemberWeights(weight_M, unit_M, 1.0 / step.units, pair_U, sign_U, value_weight)


def _build_member_columns(plan: Plan, needs: Needs, takes_M2: npt.NDArray[np.bool_] | None) -> MemberColumns:
    members = plan.members
    lengths_M2 = members.select("n_context", "n_action").to_numpy().astype(np.int64)
    if takes_M2 is not None:
        lengths_M2 *= takes_M2
    temperatures = members["temperature"].filter(members["trained"])
    scaled = needs.temperature is Temperature.AS_SAMPLED and bool((temperatures != 1).any())
    has_staleness = members["staleness"].null_count() < members.height
    return MemberColumns(
        n_context_M=lengths_M2[:, 0],
        n_action_M=lengths_M2[:, 1],
        trained_M=plan.trained_M,
        loss_tokens_M=plan.loss_tokens_M,
        step_index_M=members["step_index"].to_numpy() if needs.pairs else None,
        advantage_M=members["advantage"].cast(pl.Float32).to_numpy() if needs.advantages else None,
        temperature_M=members["temperature"].cast(pl.Float32).to_numpy() if scaled else None,
        staleness_M=members["staleness"].cast(pl.Float32).fill_null(np.nan).to_numpy() if has_staleness else None,
        value_target_M=members[VALUE_TARGET].cast(pl.Float32).to_numpy() if VALUE_TARGET in members.columns else None,
    )


class Stream:
    """Reads a plan's tokens from the snapshot it was made on. Use as a context: leaving it stops the threads."""

    def __init__(
        self,
        snapshot: Snapshot,
        plan: Plan,
        needs: Needs,
        config: TrainConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._plan = plan
        self._prefetch, self._limit = config.prefetch, config.cache_bytes
        members = plan.members
        # A mask that is true throughout adds nothing, so the column is usually not read.
        masks = bool(((members["n_trained"] != members["n_action"]) & members["trained"]).any())
        reader = RowGroupReader(
            snapshot.files("tokens"),
            snapshot.objects,
            masks=masks,
            logprobs=needs.behaviour_logprobs,
            disk_bytes=config.disk_cache_bytes,
        )
        share = RankShare(plan, rank, world_size)
        self._reading = ThreadPoolExecutor(config.read_threads, thread_name_prefix="trajlake-read")
        self._assembly = ThreadPoolExecutor(config.prefetch, thread_name_prefix="trajlake-batches")
        self._open = ExitStack()
        locations = Locations(plan, reader, self._reading)
        self._windows = Windows(
            plan, share, reader, locations, self._reading, limit=config.cache_bytes, ramp=config.prefetch + 1
        )
        self._assembler = Assembler(plan, needs, share, pinned=config.device.startswith("cuda"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self._open.close()
        # A step that waits for a cancelled row group gets a CancelledError.
        self._reading.shutdown(wait=True, cancel_futures=True)
        self._assembly.shutdown(wait=True, cancel_futures=True)

    def steps(self, first: int = 0) -> Iterator[tuple[OptimizerStep, list[PackedBatch]]]:
        """Yield the optimizer steps from `first` on, each with this rank's micro-batches."""
        waiting: deque[tuple[OptimizerStep, Future[list[PackedBatch]]]] = deque()
        ahead = ReadAhead(self._windows.cut(self._plan.steps[first:]), self._limit)
        self._open.callback(ahead.stop)
        with ahead:
            for step, window in ahead.steps():
                waiting.append((step, self._assembly.submit(self._assembler.assemble, step, window)))
                if len(waiting) > self._prefetch:
                    ready, future = waiting.popleft()
                    yield ready, future.result()
        while waiting:
            ready, future = waiting.popleft()
            yield ready, future.result()
