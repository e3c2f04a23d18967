"""Parts of a job on a Ray cluster: one task each, run again where a worker dies.

Ray is an optional extra and imported here alone, when an executor is made. A cluster that is running is used as it is
(`RAY_ADDRESS`, or `ray start`); otherwise Ray starts one on this machine and it ends with the process. The lake has to
be where every node can reach it: a bucket, or a folder that all of them mount.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from lake.errors import MissingExtraError, UsageError, WorkerLostError
from pipelines.executor import TRIES, lost

Item = TypeVar("Item")
Result = TypeVar("Result")


class RayExecutor:
    """Ray tasks; see `pipelines.executor.Executor`.

    Args:
        workers: items at once; None takes a core of the cluster each.
        address: of a running cluster; None asks the environment, then starts one on this machine.

    Raises:
        MissingExtraError: ray is not installed.
        UsageError: workers below 1.
    """

    def __init__(self, workers: int | None = None, *, address: str | None = None) -> None:
        if workers is not None and workers < 1:
            msg = f"{workers} workers can do nothing; give 1 or more"
            raise UsageError(msg)
        self._ray = _ray()
        if not self._ray.is_initialized():
            address = address or os.environ.get("RAY_ADDRESS")
            here = {} if address else {"num_cpus": workers, "include_dashboard": False}
            self._ray.init(address=address, log_to_driver=False, logging_level="error", **here)
        self._workers = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    @property
    def workers(self) -> int:
        """Items that run at once."""
        return self._workers

    def map(self, task: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """See `Executor.map`."""
        todo = list(items)
        # What a task raises is its own affair and not tried again; a worker that dies is.
        remote = self._ray.remote(num_cpus=1, max_retries=TRIES - 1, retry_exceptions=False)(task)
        running: deque[Any] = deque()
        waiting = iter(todo)
        done = 0
        try:
            while True:
                while len(running) < 2 * self._workers and (item := next(waiting, None)) is not None:
                    running.append(remote.remote(item))
                if not running:
                    return
                yield self._result(running.popleft(), done, len(todo))
                done += 1
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)

    def _result(self, reference: Any, done: int, items: int) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            raise WorkerLostError(lost(done, items)) from error


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        msg = 'Ray is not installed; the local executor needs nothing, or: pip install "trajlake[ray]"'
        raise MissingExtraError(msg) from error
    return ray
