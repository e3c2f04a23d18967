"""The stream: the micro-batches of each optimizer step of a plan, read ahead by threads.

Threads and not processes: decoding releases the GIL, and sending tensors between processes costs more than it saves
(measured: 476,000 samples/s in one process, 64,000 through a worker). What is prefetched never shows: steps come out in
the plan's order, and a resumed run starts at any of them.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.snapshot import Snapshot
from trainer.batch import PackedBatch
from trainer.collate import Ints, Members, TokenArrays, collate, cut
from trainer.config import TrainConfig
from trainer.losses import Needs, Temperature
from trainer.plan import OptimizerStep, Plan
from trainer.row_groups import RowGroup, RowGroupCache


class Stream:
    """Reads a plan's tokens. Use as a context: leaving it stops the threads.

    Args:
        snapshot: the snapshot the plan was made on.
        plan: what to read.
        needs: of the loss: which columns come along.
        config: threads, prefetch, cache.
    """

    def __init__(self, snapshot: Snapshot, plan: Plan, needs: Needs, config: TrainConfig) -> None:
        self._plan = plan
        self._prefetch = config.prefetch
        paths = [file.path for file in snapshot.files("tokens")]
        members = plan.members
        # A mask that is true throughout says nothing: usually the column need not be read at all.
        masks = bool(((members["n_trained"] != members["n_action"]) & members["trained"]).any())
        self._cache = RowGroupCache(paths, masks=masks, logprobs=needs.behaviour_logprobs, limit=config.cache_bytes)
        self._pool = ThreadPoolExecutor(config.read_threads, thread_name_prefix="trajlake-read")
        self._groups, self._group_M, self._row_M = self._locate(members)
        self._columns = _member_columns(members, needs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def steps(self, first: int = 0) -> Iterator[tuple[OptimizerStep, list[PackedBatch]]]:
        """Optimizer steps from `first` on, each with its micro-batches."""
        waiting: deque[tuple[OptimizerStep, Future[list[PackedBatch]]]] = deque()
        for step in self._plan.steps[first:]:
            waiting.append((step, self._pool.submit(self._assemble, step)))
            if len(waiting) > self._prefetch:
                ready, future = waiting.popleft()
                yield ready, future.result()
        while waiting:
            ready, future = waiting.popleft()
            yield ready, future.result()

    def _assemble(self, step: OptimizerStep) -> list[PackedBatch]:
        bins = self._plan.micro_batches(step)
        starts_Q = self._plan.member_starts_Q
        sequences_Q = np.concatenate([np.array(items) for items in bins])
        members_Q = starts_Q[sequences_Q + 1] - starts_Q[sequences_Q]
        chosen_M = np.concatenate([np.arange(starts_Q[q], starts_Q[q + 1]) for q in sequences_Q])
        columns = self._columns.take(chosen_M)
        batch = collate(columns, members_Q, self._tokens(chosen_M, columns))
        return cut(batch, [len(items) for items in bins])

    def _tokens(self, chosen_M: Ints, columns: Members) -> TokenArrays:
        """Tokens of members, end to end; neighbours in a row group are one slice."""
        group_M, row_M = self._group_M[chosen_M], self._row_M[chosen_M]
        groups = {number: self._cache.get(*self._groups[number]) for number in np.unique(group_M).tolist()}
        self._check_lengths(chosen_M, columns, groups)
        firsts = np.flatnonzero(np.diff(group_M, prepend=-1) | (np.diff(row_M, prepend=-2) != 1))
        lasts = np.append(firsts[1:], len(chosen_M)) - 1
        context, action, masks, logprobs = [], [], [], []
        runs = zip(group_M[firsts].tolist(), row_M[firsts].tolist(), row_M[lasts].tolist(), strict=True)
        for number, low, high in runs:
            group = groups[number]
            context.append(group.context_T[group.context_starts[low] : group.context_starts[high + 1]])
            span = slice(group.action_starts[low], group.action_starts[high + 1])
            action.append(group.action_A[span])
            if group.mask_A is not None:
                masks.append(group.mask_A[span])
            if group.logprobs_A is not None:
                logprobs.append(group.logprobs_A[span])
        return TokenArrays(
            context_T=np.concatenate(context),
            action_A=np.concatenate(action),
            mask_A=np.concatenate(masks) if masks else None,
            logprobs_A=np.concatenate(logprobs) if logprobs else None,
        )

    def _check_lengths(self, chosen_M: Ints, columns: Members, groups: dict[int, RowGroup]) -> None:
        """The plan was made from n_context and n_action: they must be what the lists hold."""
        group_M = self._group_M[chosen_M]
        for number, group in groups.items():
            here = np.flatnonzero(group_M == number)
            context, action = group.lengths(self._row_M[chosen_M[here]])
            bad = (context != columns.n_context_M[here]) | (action != columns.n_action_M[here])
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                row = self._plan.members.row(int(chosen_M[here[at]]), named=True)
                msg = (
                    f"table `tokens`, row episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}: "
                    f"n_context {row['n_context']} and n_action {row['n_action']} do not match the lists' lengths "
                    f"{context[at]} and {action[at]}; record the episode again"
                )
                raise ContractError(msg)

    def _locate(self, members: pl.DataFrame) -> tuple[list[tuple[int, int]], Ints, Ints]:
        """The row groups that hold members as (file, group), and of each member its row group and row inside it."""
        file_M, row_M = members["file"].to_numpy(), members["row"].to_numpy()
        groups: list[tuple[int, int]] = []
        group_M = np.zeros(len(row_M), np.int64)
        inside_M = np.zeros(len(row_M), np.int64)
        for file in np.unique(file_M).tolist():
            here_M = file_M == file
            starts = self._cache.group_starts(file)
            inner = np.searchsorted(starts, row_M[here_M], side="right") - 1
            group_M[here_M] = inner + len(groups)
            inside_M[here_M] = row_M[here_M] - starts[inner]
            groups += [(file, number) for number in range(len(starts) - 1)]
        return groups, group_M, inside_M


def _member_columns(members: pl.DataFrame, needs: Needs) -> Members:
    temperatures = members["temperature"].filter(members["trained"])
    scaled = needs.temperature is Temperature.AS_SAMPLED and bool((temperatures != 1).any())
    return Members(
        n_context_M=members["n_context"].to_numpy().astype(np.int64),
        n_action_M=members["n_action"].to_numpy().astype(np.int64),
        trained_M=members["trained"].to_numpy(),
        loss_tokens_M=members["loss_tokens"].to_numpy(),
        advantage_M=members["advantage"].cast(pl.Float32).to_numpy() if needs.advantages else None,
        temperature_M=members["temperature"].cast(pl.Float32).to_numpy() if scaled else None,
    )
