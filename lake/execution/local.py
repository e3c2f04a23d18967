"""The executor of this machine, which runs parts in threads of this process or in separate processes, and its cores.

The pools of Python are imported only when needed. Importing them fails while a process ends, and a recorder may still
deliver then.
"""

import multiprocessing
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain, islice
from typing import TYPE_CHECKING

from lake.errors import WorkerLostError
from lake.execution.executor import TRIES, Item, NodeResult, Result, explain_lost_worker, require_workers, run_windowed

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

_PARAMETERS_PER_THREAD = 4_000_000
"""Threads of a smaller model wait for one another longer than they compute. On two busy cores, an update of 97,600
parameters took 8.4 s with two threads and 0.2 s with one (decision 0054)."""


def count_usable_cores() -> int:
    """Return the number of cores that this process may use: on Linux its affinity, elsewhere all cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_threads(parameters: int) -> int | None:
    """Return the number of threads for a model's arithmetic on the CPU; None leaves the library's default.

    `OMP_NUM_THREADS` remains the maximum.
    """
    setting = os.environ.get("OMP_NUM_THREADS", "")
    most = min(count_usable_cores(), int(setting)) if setting.isdecimal() and int(setting) else count_usable_cores()
    threads = max(1, parameters // _PARAMETERS_PER_THREAD)
    # Libraries use physical cores, and there may be half as many of those.
    return threads if 2 * threads <= max(2, most) else None


class LocalExecutor:
    """Runs parts in threads of this process, or in processes of this machine.

    Polars, NumPy and Parquet release the GIL, so threads compute one item while another is written. Processes suit
    tasks that spend their time in Python, such as similarity anchors; each takes half a second to start.

    Args:
        workers: number of parts that run at once; default: one per core, at most 4.
    """

    def __init__(self, workers: int | None = None, *, processes: bool = False) -> None:
        require_workers(workers)
        self.workers = workers or min(4, count_usable_cores())
        self.is_here = not processes

    def map(
        self, task: Callable[[Item], Result], items: Iterable[Item], *, without: Collection[str] = ()
    ) -> Iterator[Result]:
        """See `Executor.map`."""
        assert not without, "this executor has one node"
        waiting = iter(items)
        if not self.is_here:
            yield from self._map_processes(task, waiting)
        elif self.workers == 1:
            yield from map(task, waiting)
        else:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(self.workers) as pool:
                yield from run_windowed(
                    lambda item: pool.submit(task, item), Future.result, Future.cancel, waiting, self.workers
                )

    def on_nodes(self, task: Callable[[Item], Result], item: Item) -> list[NodeResult[Result]]:
        """See `Executor.on_nodes`."""
        name = platform.node()
        return [NodeResult(name, name, task(item))]

    def _map_processes(self, task: Callable[[Item], Result], items: Iterator[Item]) -> Iterator[Result]:
        """Map in processes; after a process died, run the unfinished items again in new ones."""
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool

        started: deque[Item] = deque()
        done = tries = 0
        if not (first := list(islice(items, 1))):
            return  # start no processes for an empty job
        items = chain(first, items)
        while True:
            done_before = done
            # A fork would copy the threads of Polars in the middle of their work.
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(self.workers, context, initializer=_end_with_parent) as pool:

                def start(item: Item, pool: "ProcessPoolExecutor" = pool) -> Future[Result]:
                    started.append(item)
                    return pool.submit(task, item)

                try:
                    for result in run_windowed(start, Future.result, Future.cancel, items, self.workers):
                        done += 1
                        started.popleft()
                        yield result
                except BrokenProcessPool as error:
                    tries = 1 if done > done_before else tries + 1
                    if tries >= TRIES:
                        raise WorkerLostError(explain_lost_worker(done)) from error
                    items = chain(list(started), items)
                    started.clear()
                else:
                    return


def _end_with_parent() -> None:
    """End this process when its parent ends, even if it was killed: no one would use the results."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
