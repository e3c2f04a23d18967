"""Parts that run on this machine: in threads of this process, or in processes of their own.

Python's pools are imported when one is needed: that fails while a process ends, when a recorder may still deliver.
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
from lake.execution.cores import usable_cores
from lake.execution.executor import TRIES, Item, OfNode, Result, lost, require_workers, windowed

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


class LocalExecutor:
    """Threads of this process, or processes of this machine; at most 4 workers, a core each, unless given.

    Polars, NumPy and Parquet leave Python's lock, so threads compute one item while another is written. Processes are
    for tasks that spend their time in Python, such as similarity anchors; each takes half a second to start.
    """

    def __init__(self, workers: int | None = None, *, processes: bool = False) -> None:
        require_workers(workers)
        self.workers = workers or min(4, usable_cores())
        self.is_here = not processes

    def map(
        self, task: Callable[[Item], Result], items: Iterable[Item], *, without: Collection[str] = ()
    ) -> Iterator[Result]:
        """See `Executor.map`."""
        assert not without, "there is one node, and what cannot run on it is not asked for"
        todo = iter(items)
        if not self.is_here:
            yield from self._map_processes(task, todo)
        elif self.workers == 1:
            yield from map(task, todo)
        else:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(self.workers) as pool:
                yield from windowed(
                    lambda item: pool.submit(task, item), Future.result, Future.cancel, todo, self.workers
                )

    def on_nodes(self, task: Callable[[Item], Result], item: Item) -> list[OfNode[Result]]:
        """See `Executor.on_nodes`."""
        name = platform.node()
        return [OfNode(name, name, task(item))]

    def _map_processes(self, task: Callable[[Item], Result], items: Iterator[Item]) -> Iterator[Result]:
        """As `map`; when a process is lost, what had not come back runs again in new ones."""
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool

        started: deque[Item] = deque()
        done = tries = 0
        if not (first := list(islice(items, 1))):
            return  # no processes for nothing
        items = chain(first, items)
        while True:
            before = done
            # Not forked: Polars' threads would be copied in the middle of their work.
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(self.workers, context, initializer=_end_with_parent) as pool:

                def start(item: Item, pool: "ProcessPoolExecutor" = pool) -> Future[Result]:
                    started.append(item)
                    return pool.submit(task, item)

                try:
                    for result in windowed(start, Future.result, Future.cancel, items, self.workers):
                        done += 1
                        started.popleft()
                        yield result
                except BrokenProcessPool as error:
                    tries = 1 if done > before else tries + 1
                    if tries >= TRIES:
                        raise WorkerLostError(lost(done)) from error
                    items = chain(list(started), items)
                    started.clear()
                else:
                    return


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, killed or not: its work would be for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
