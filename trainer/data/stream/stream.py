"""The stream: the micro-batches of each optimizer step of a plan, read ahead by threads.

Threads and not processes: decoding releases the GIL, and sending tensors between processes costs more than it saves
(measured: 476,000 samples/s in one process, 64,000 through a worker). What is prefetched never shows: steps come out in
the plan's order, and a resumed run starts at any of them, on any number of ranks.


Axes: `_M` members, `_Q` sequences, `_U` units.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from lake.read.snapshot import Snapshot
from trainer.config import TrainConfig
from trainer.data.plan.plan import OptimizerStep, Plan
from trainer.data.stream.aggregation import Unit, unit_numbers
from trainer.data.stream.batch import Arena, Buffers, Ints, PackedBatch
from trainer.data.stream.collate import Members, Shares, TokenArrays, collate, dummy
from trainer.data.stream.read_ahead import ReadAhead
from trainer.data.stream.row_groups import RowGroupReader
from trainer.data.stream.share import Share
from trainer.data.stream.windows import Locations, Window, Windows
from trainer.losses import Needs, Temperature

Bools = npt.NDArray[np.bool_]


class Assembler:
    """Lays out optimizer steps."""

    def __init__(self, plan: Plan, needs: Needs, share: Share, *, pinned: bool) -> None:
        self._plan, self._needs, self._share, self._pinned = plan, needs, share, pinned
        self._buffers = Buffers()
        takes = [name for name in ("takes_context", "takes_action") if name in plan.members.columns]
        self._takes_M2: Bools | None = plan.members.select(takes).to_numpy() if takes else None
        """Whether a member's context and its action belong to its sequence, bool [M, 2]; None where all do."""
        self._columns = _member_columns(plan, needs, self._takes_M2)

    def batches(self, step: OptimizerStep, window: Window) -> list[PackedBatch]:
        """This rank's micro-batches of an optimizer step."""
        bins = self._share.micro_batches(step)
        full = [items for items in bins if items]
        batches = self._laid_out(step, full, window) if full else []
        missing = len(bins) - len(full)
        if missing:
            blank = dummy(
                self._columns,
                logprobs=self._needs.behaviour_logprobs,
                units=self._plan.weighting.unit is not Unit.TOKEN,
                pairs=self._plan.paired,
                signs=self._plan.sign_M is not None,
            )
            batches += [blank] * missing
        return batches

    def _laid_out(self, step: OptimizerStep, bins: list[list[int]], window: Window) -> list[PackedBatch]:
        sequences_Q = np.concatenate([np.array(items) for items in bins])
        chosen_M, members_Q = self._plan.members_of(sequences_Q)
        columns = self._columns.take(chosen_M)
        arena = self._buffers.arena(_room(columns))
        return collate(
            columns,
            members_Q,
            self._tokens(chosen_M, window, arena),
            shares_of(self._plan, step, sequences_Q),
            [len(items) for items in bins],
            pinned=self._pinned,
            allocate=arena.array,
        )

    def _tokens(self, chosen_M: Ints, window: Window, arena: Arena) -> TokenArrays:
        """Tokens of members, end to end."""
        context_R = action_R = window.rows(chosen_M)
        if self._takes_M2 is not None:
            takes_context, takes_action = self._takes_M2[chosen_M].T
            context_R, action_R = context_R[takes_context], action_R[takes_action]
        actions = _slices(action_R, window.action_starts_R)
        return TokenArrays(
            context_C=_joined(window.context_C, _slices(context_R, window.context_starts_R), arena),
            action_A=_joined(window.action_A, actions, arena),
            mask_A=None if window.mask_A is None else _joined(window.mask_A, actions, arena),
            logprobs_A=None if window.logprobs_A is None else _joined(window.logprobs_A, actions, arena),
        )


def _room(columns: Members) -> int:
    """Bytes that suffice for a batch: 12 for every token, at most 80 more for one of an action."""
    actions = int(columns.n_action_M.sum())
    return 12 * (int(columns.n_context_M.sum()) + actions) + 80 * actions + 4096


def _slices(row_R: Ints, starts_R: Ints) -> list[slice]:
    """Where the tokens of rows lie; neighbouring rows are one slice."""
    lows = starts_R[row_R[np.diff(row_R, prepend=-2) != 1]]
    highs = starts_R[row_R[np.diff(row_R, append=-2) != 1] + 1]
    return [slice(low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]


def _joined(values: npt.NDArray[Any], slices: list[slice], arena: Arena) -> npt.NDArray[Any]:
    """Several slices of an array, end to end."""
    out = arena.array(sum(part.stop - part.start for part in slices), values.dtype)
    return np.concatenate([values[part] for part in slices], out=out)


def shares_of(plan: Plan, step: OptimizerStep, sequences_Q: Ints) -> Shares:
    """What the members of some sequences count, which are in the order of a buffer.

    Atoms are whole: every unit is all here or not at all.
    """
    weighting = plan.weighting
    chosen_M, members_Q = plan.members_of(sequences_Q)
    trained_M = plan.trained_M[chosen_M]
    firsts_E = plan.sequence_starts_E
    opens_Q = firsts_E[np.searchsorted(firsts_E, sequences_Q)] == sequences_Q
    unit_M = unit_numbers(weighting.unit, trained_M, members_Q, opens_Q)
    tokens_U = np.bincount(unit_M[trained_M], plan.loss_tokens_M[chosen_M][trained_M]).astype(np.int64)
    weight_U = weighting.weights(tokens_U, tokens=step.loss_tokens, units=step.units)
    # A turn that is not trained has no number of its own, and no tokens that carry loss either.
    weight_M = np.where(trained_M, weight_U[np.maximum(unit_M, 0)], 0.0).astype(np.float32)
    if weighting.unit is Unit.TOKEN:
        return Shares(weight_M)
    sign_U = None
    if plan.sign_M is not None:
        sign_U = plan.sign_M[chosen_M][trained_M][np.unique(unit_M[trained_M], return_index=True)[1]]
    # The two sides of a pair are units, one after the other.
    pair_U = np.arange(len(tokens_U)) // 2 if plan.paired else None
    return Shares(weight_M, unit_M, 1.0 / step.units, pair_U, sign_U)


def _member_columns(plan: Plan, needs: Needs, takes_M2: Bools | None) -> Members:
    members = plan.members
    lengths_M2 = members.select("n_context", "n_action").to_numpy().astype(np.int64)
    if takes_M2 is not None:
        lengths_M2 *= takes_M2
    temperatures = members["temperature"].filter(members["trained"])
    scaled = needs.temperature is Temperature.AS_SAMPLED and bool((temperatures != 1).any())
    known = members["staleness"].null_count() < members.height
    return Members(
        n_context_M=lengths_M2[:, 0],
        n_action_M=lengths_M2[:, 1],
        trained_M=plan.trained_M,
        loss_tokens_M=plan.loss_tokens_M,
        step_index_M=members["step_index"].to_numpy() if needs.pairs else None,
        advantage_M=members["advantage"].cast(pl.Float32).to_numpy() if needs.advantages else None,
        temperature_M=members["temperature"].cast(pl.Float32).to_numpy() if scaled else None,
        staleness_M=members["staleness"].cast(pl.Float32).fill_null(np.nan).to_numpy() if known else None,
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
        # A mask that is true throughout says nothing: usually the column need not be read at all.
        masks = bool(((members["n_trained"] != members["n_action"]) & members["trained"]).any())
        reader = RowGroupReader(
            snapshot.files("tokens"),
            snapshot.objects,
            masks=masks,
            logprobs=needs.behaviour_logprobs,
            disk_bytes=config.disk_cache_bytes,
        )
        share = Share(plan, rank, world_size)
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
        # Whoever waits for a row group that is not read any more is told so.
        self._reading.shutdown(wait=True, cancel_futures=True)
        self._assembly.shutdown(wait=True, cancel_futures=True)

    def steps(self, first: int = 0) -> Iterator[tuple[OptimizerStep, list[PackedBatch]]]:
        """Optimizer steps from `first` on, each with this rank's micro-batches."""
        waiting: deque[tuple[OptimizerStep, Future[list[PackedBatch]]]] = deque()
        ahead = ReadAhead(self._windows.cut(self._plan.steps[first:]), self._limit)
        self._open.callback(ahead.stop)
        with ahead:
            for step, window in ahead.steps():
                waiting.append((step, self._assembly.submit(self._assembler.batches, step, window)))
                if len(waiting) > self._prefetch:
                    ready, future = waiting.popleft()
                    yield ready, future.result()
        while waiting:
            ready, future = waiting.popleft()
            yield ready, future.result()
