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
from trainer.row_groups import RowGroupCache, Slices


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
        self._needs = needs
        self._prefetch = config.prefetch
        paths = [file.path for file in snapshot.files("tokens")]
        self._cache = RowGroupCache(paths, logprobs=needs.behaviour_logprobs, limit=config.cache_bytes)
        self._pool = ThreadPoolExecutor(config.read_threads, thread_name_prefix="trajlake-read")
        members = plan.members
        self._file_M = members["file"].to_numpy().astype(np.int64)
        self._group_M, self._row_M = self._locate(members)
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
        """Tokens of members, end to end; neighbours in a file are one slice."""
        file_M, group_M, row_M = self._file_M[chosen_M], self._group_M[chosen_M], self._row_M[chosen_M]
        apart_M = (np.diff(file_M) != 0) | (np.diff(group_M) != 0) | (np.diff(row_M) != 1)
        firsts = np.concatenate([[0], np.flatnonzero(apart_M) + 1])
        lasts = np.concatenate([firsts[1:], [len(chosen_M)]]) - 1
        parts: list[Slices] = []
        for file, group, low, high in zip(
            file_M[firsts].tolist(),
            group_M[firsts].tolist(),
            row_M[firsts].tolist(),
            row_M[lasts].tolist(),
            strict=True,
        ):
            parts.append(self._cache.get(file, group).rows(low, high + 1))
        self._check_lengths(chosen_M, columns, parts)
        logprobs = [part.logprobs_A for part in parts if part.logprobs_A is not None]
        return TokenArrays(
            context_T=np.concatenate([part.context_T for part in parts]),
            action_A=np.concatenate([part.action_A for part in parts]),
            mask_A=np.concatenate([part.mask_A for part in parts]),
            logprobs_A=np.concatenate(logprobs) if logprobs else None,
        )

    def _check_lengths(self, chosen_M: Ints, columns: Members, parts: list[Slices]) -> None:
        """The plan was made from n_context and n_action: they must be what the lists hold."""
        context_M = np.concatenate([part.n_context_R for part in parts])
        action_M = np.concatenate([part.n_action_R for part in parts])
        bad_M = (context_M != columns.n_context_M) | (action_M != columns.n_action_M)
        if bad_M.any():
            at = int(np.flatnonzero(bad_M)[0])
            row = self._plan.members.row(int(chosen_M[at]), named=True)
            msg = (
                f"table `tokens`, row episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}: "
                f"n_context {row['n_context']} and n_action {row['n_action']} do not match the lists' lengths "
                f"{context_M[at]} and {action_M[at]}; record the episode again"
            )
            raise ContractError(msg)

    def _locate(self, members: pl.DataFrame) -> tuple[Ints, Ints]:
        """Row group of each member, and its row inside it."""
        row_M = members["row"].to_numpy()
        group_M = np.zeros(len(row_M), np.int64)
        inside_M = np.zeros(len(row_M), np.int64)
        for file in np.unique(self._file_M):
            here_M = self._file_M == file
            starts = self._cache.group_starts(int(file))
            group_M[here_M] = np.searchsorted(starts, row_M[here_M], side="right") - 1
            inside_M[here_M] = row_M[here_M] - starts[group_M[here_M]]
        return group_M, inside_M


def _member_columns(members: pl.DataFrame, needs: Needs) -> Members:
    scaled = needs.temperature is Temperature.AS_SAMPLED
    return Members(
        n_context_M=members["n_context"].to_numpy().astype(np.int64),
        n_action_M=members["n_action"].to_numpy().astype(np.int64),
        trained_M=members["trained"].to_numpy(),
        loss_tokens_M=members["loss_tokens"].to_numpy(),
        advantage_M=members["advantage"].cast(pl.Float32).to_numpy() if needs.advantages else None,
        temperature_M=members["temperature"].cast(pl.Float32).to_numpy() if scaled else None,
    )
