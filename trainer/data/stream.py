"""The stream: the micro-batches of each optimizer step of a plan, read ahead by threads.

Threads and not processes: decoding releases the GIL, and sending tensors between processes costs more than it saves
(measured: 476,000 samples/s in one process, 64,000 through a worker). What is prefetched never shows: steps come out in
the plan's order, and a resumed run starts at any of them, on any number of ranks.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from lake.snapshot import Snapshot
from trainer.config import TrainConfig
from trainer.data.assembly import Assembler
from trainer.data.batch import PackedBatch
from trainer.data.plan import OptimizerStep, Plan
from trainer.data.row_groups import RowGroupReader
from trainer.data.windows import Locations, Window, Windows
from trainer.losses import Needs


class Stream:
    """Reads a plan's tokens. Use as a context: leaving it stops the threads.

    Args:
        snapshot: the snapshot the plan was made on.
        plan: what to read.
        needs: of the loss: which columns come along.
        config: threads, prefetch, cache, device.
        rank: whose micro-batches to read.
        world_size: number of ranks.
    """

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
        self._prefetch = config.prefetch
        members = plan.members
        # A mask that is true throughout says nothing: usually the column need not be read at all.
        masks = bool(((members["n_trained"] != members["n_action"]) & members["trained"]).any())
        reader = RowGroupReader(
            snapshot.files("tokens"), snapshot.objects, masks=masks, logprobs=needs.behaviour_logprobs
        )
        self._pool = ThreadPoolExecutor(config.read_threads, thread_name_prefix="trajlake-read")
        locations = Locations(plan, reader, self._pool)
        self._windows = Windows(plan, reader, locations, self._pool, limit=config.cache_bytes, ramp=config.prefetch + 1)
        self._assembler = Assembler(
            plan,
            needs,
            locations,
            rank=rank,
            world_size=world_size,
            pinned=config.device.startswith("cuda"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def steps(self, first: int = 0) -> Iterator[tuple[OptimizerStep, list[PackedBatch]]]:
        """Optimizer steps from `first` on, each with this rank's micro-batches."""
        waiting: deque[tuple[OptimizerStep, Future[list[PackedBatch]]]] = deque()
        for step, window in self._read_ahead(first):
            waiting.append((step, self._pool.submit(self._assembler.batches, step, window)))
            if len(waiting) > self._prefetch:
                ready, future = waiting.popleft()
                yield ready, future.result()
        while waiting:
            ready, future = waiting.popleft()
            yield ready, future.result()

    def _read_ahead(self, first: int) -> Iterator[tuple[OptimizerStep, Window]]:
        """Optimizer steps with their window, whose rows are being read; between them, rows of the next window."""
        windows = self._windows.cut(self._plan.steps[first:])
        window = next(windows, None)
        while window is not None:
            window.begin()
            following = next(windows, None)
            share = 0 if following is None else -(-following.waiting // len(window.steps))
            for step in window.steps:
                yield step, window
                if following is not None:
                    following.begin(share)
            window = following
