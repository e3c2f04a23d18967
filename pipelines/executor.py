"""Where the parts of a job run: here, in a few processes of this machine, or on a Ray cluster.

An executor maps a function over items and gives the results in the order of the items. It may run an item a second time
if the process that had it is gone, so a task must be one that may run again: what it writes counts only once its result
is used (`lake.write.jobs`). Results never depend on the executor: tasks share nothing.

Ray is an optional extra, imported when an executor is made. A cluster that is running is used (`RAY_ADDRESS`, or `ray
start`); otherwise Ray starts one on this machine and it ends with the process. The lake has to be where every node can
reach it: a bucket, or a folder that all of them mount.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, Protocol, TypeVar

from lake.errors import MissingExtraError, UsageError, WorkerLostError

Item = TypeVar("Item")
Result = TypeVar("Result")
TRIES = 3
"""How often an item is started before a job gives up on processes that die under it."""


class Executor(Protocol):
    """Runs the parts of a job."""

    @property
    def workers(self) -> int:
        """Items that run at once: each holds its own data in memory."""

    def map(self, task: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results of `task` for each item, in the items' order.

        The task is a function of a module that may run twice for an item; it, items and results may travel to other
        processes. WorkerLostError if the process of an item died again and again; else whatever the task raises, once:
        items that have not started by then are not run.
        """


class LocalExecutor:
    """Threads of this process, or processes of this machine; at most 4 workers, a core each, unless given.

    Polars, NumPy and Parquet leave Python's lock, so threads compute one item while another is written. Processes are
    for tasks that spend their time in Python, such as similarity anchors; each takes half a second to start.
    """

    def __init__(self, workers: int | None = None, *, processes: bool = False) -> None:
        if workers is not None and workers < 1:
            msg = f"{workers} workers; valid: 1 or more"
            raise UsageError(msg)
        self.workers = workers or min(4, len(os.sched_getaffinity(0)))
        self._processes = processes

    def map(self, task: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """See `Executor.map`."""
        todo = list(items)
        if self._processes and todo:
            yield from self._map_processes(task, todo)
        elif self.workers == 1 or len(todo) < 2:
            yield from map(task, todo)
        else:
            with ThreadPoolExecutor(self.workers) as pool:
                yield from _windowed(
                    lambda item: pool.submit(task, item), Future.result, Future.cancel, todo, self.workers
                )

    def _map_processes(self, task: Callable[[Item], Result], items: list[Item]) -> Iterator[Result]:
        """As `map`; when a process is lost, what had not come back runs again in new ones."""
        done = tries = 0
        while done < len(items):
            before = done
            # Not forked: Polars' threads would be copied in the middle of their work.
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(min(self.workers, len(items)), context, initializer=_end_with_parent) as pool:
                try:
                    for result in _windowed(
                        lambda item: pool.submit(task, item), Future.result, Future.cancel, items[done:], self.workers
                    ):
                        done += 1
                        yield result
                except BrokenProcessPool as error:
                    tries = 1 if done > before else tries + 1
                    if tries >= TRIES:
                        raise WorkerLostError(lost(done, len(items))) from error


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, killed or not: its work would be for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def lost(done: int, items: int) -> str:
    """What to say when workers die again and again."""
    return (
        f"a worker process died {TRIES} times in a row ({done} of {items} parts were done; nothing of the job is "
        "visible). Often the machine was out of memory: give a smaller --memory or fewer --workers, and run it again"
    )


def _windowed(
    start: Callable[[Any], Any],
    result: Callable[[Any], Any],
    cancel: Callable[[Any], Any],
    items: list[Any],
    width: int,
) -> Iterator[Any]:
    """Results in order, with at most one item waiting per worker; after an error nothing more is started."""
    running: deque[Any] = deque()
    waiting = iter(items)
    try:
        while True:
            while len(running) < 2 * width and (item := next(waiting, None)) is not None:
                running.append(start(item))
            if not running:
                return
            yield result(running.popleft())
    finally:
        for handle in running:
            cancel(handle)


class RayExecutor:
    """Ray tasks; a core of the cluster each, unless `workers` is given. MissingExtraError if Ray is not installed.

    `address` is that of a running cluster; None asks the environment, then starts one on this machine.
    """

    def __init__(self, workers: int | None = None, *, address: str | None = None) -> None:
        if workers is not None and workers < 1:
            msg = f"{workers} workers; valid: 1 or more"
            raise UsageError(msg)
        try:
            import ray
        except ImportError as error:
            msg = 'Ray is not installed; the local executor needs nothing, or: pip install "trajlake[ray]"'
            raise MissingExtraError(msg) from error
        self._ray: Any = ray
        if not self._ray.is_initialized():
            address = address or os.environ.get("RAY_ADDRESS")
            here = {} if address else {"num_cpus": workers, "include_dashboard": False}
            self._ray.init(address=address, log_to_driver=False, logging_level="error", **here)
        self.workers = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def map(self, task: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """See `Executor.map`."""
        todo = list(items)
        # What a task raises is its own affair and not tried again; a worker that dies is.
        remote = self._ray.remote(num_cpus=1, max_retries=TRIES - 1, retry_exceptions=False)(task)
        cancel = partial(self._ray.cancel, force=True)
        errors = self._ray.exceptions
        done = 0
        try:
            for result in _windowed(remote.remote, self._ray.get, cancel, todo, self.workers):
                yield result
                done += 1
        except errors.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            raise WorkerLostError(lost(done, len(todo))) from error


EXECUTORS = ("local", "processes", "ray")


def executor_named(name: str, workers: int | None = None) -> Executor:
    """The executor that a command line names: `local`, `processes` or `ray`; UsageError for another name."""
    if name == "ray":
        return RayExecutor(workers)
    if name not in EXECUTORS:
        msg = f"no executor {name!r}; valid: {', '.join(EXECUTORS)}"
        raise UsageError(msg)
    return LocalExecutor(workers, processes=name == "processes")
