"""Parts that run as tasks on a Ray cluster.

Ray is an optional extra, imported when an executor is made. A cluster that is running is used (`RAY_ADDRESS`, or `ray
start`); otherwise, or with `RAY_ADDRESS=local`, Ray starts one on this machine and it ends with the process. The lake
has to be where every node can reach it: a bucket, or a folder that all of them mount.
"""

import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from lake.errors import MissingExtraError, UsageError, WorkerLostError
from lake.execution.executor import TRIES, Item, OfNode, Result, lost, require_workers, windowed

_ANSWER_SECONDS = 10.0
"""How long a cluster may take to accept a connection."""


class RayExecutor:
    """Ray tasks; a core of the cluster each, unless `workers` is given. MissingExtraError if Ray is not installed.

    `address` is that of a running cluster; None asks the environment, then starts one on this machine.
    """

    is_here = False

    def __init__(self, workers: int | None = None, *, address: str | None = None) -> None:
        require_workers(workers)
        try:
            import ray
        except ImportError as error:
            msg = 'Ray is not installed; the local executor needs nothing, or: pip install "trajlake[ray]"'
            raise MissingExtraError(msg) from error
        self._ray: Any = ray
        if not self._ray.is_initialized():
            self._connect(address or os.environ.get("RAY_ADDRESS"), workers)
        self.workers = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _connect(self, address: str | None, workers: int | None) -> None:
        said = {"address": address, "log_to_driver": False, "logging_level": "error"}
        if address not in (None, "", "local"):
            _require_answer(str(address))
            self._ray.init(**said)
            return
        try:
            self._ray.init(**said, num_cpus=workers, include_dashboard=False)
        except ValueError:  # Ray found a cluster of `ray start`, and takes no number of cores for that
            self._ray.init(**said)

    def map(
        self, task: Callable[[Item], Result], items: Iterable[Item], *, without: Collection[str] = ()
    ) -> Iterator[Result]:
        """See `Executor.map`."""
        # What a task raises is its own affair and not tried again; a worker that dies is.
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": TRIES - 1, "retry_exceptions": False}
        if without:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(without))})"}
        remote = self._ray.remote(**options)(task)
        cancel = partial(self._ray.cancel, force=True)
        errors = self._ray.exceptions
        done = 0
        try:
            for result in windowed(remote.remote, self._ray.get, cancel, iter(items), self.workers):
                yield result
                done += 1
        except errors.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            raise WorkerLostError(lost(done)) from error
        except errors.RayError as error:
            raise WorkerLostError(_failed(error)) from error

    def on_nodes(self, task: Callable[[Item], Result], item: Item) -> list[OfNode[Result]]:
        """See `Executor.on_nodes`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        hosts = Counter(node["NodeManagerHostname"] for node in nodes)
        remote = self._ray.remote(num_cpus=0)(task)
        asked = []
        for node in nodes:
            host, node_id = node["NodeManagerHostname"], node["NodeID"]
            name = host if hosts[host] == 1 else f"{host} ({node_id[:8]})"
            there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            asked.append((node_id, name, remote.options(scheduling_strategy=there).remote(item)))
        errors = self._ray.exceptions
        found = []
        for node_id, name, answer in asked:
            try:
                found.append(OfNode(node_id, name, self._ray.get(answer)))
            except (errors.TaskUnschedulableError, errors.NodeDiedError) as error:
                # A node that died meanwhile gets no part. One that is there and does not answer might get some.
                if any(node["Alive"] and node["NodeID"] == node_id for node in self._ray.nodes()):
                    raise WorkerLostError(lost(0)) from error
            except errors.LocalRayletDiedError as error:
                raise WorkerLostError(_failed(error)) from error
        return found


def _failed(error: Exception) -> str:
    """What to say when the cluster itself fails, such as the process that holds a node of it together."""
    said = str(error).strip().partition("\n")[0]
    return f"the Ray cluster failed ({said or type(error).__name__}); look after it, and run the job again"


def _require_answer(address: str) -> None:
    """Raise UsageError unless something listens at HOST:PORT or ray://HOST:PORT: Ray itself tries for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # one of Ray's words, such as `auto`
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        advice = "let RAY_ADDRESS name one that runs, or `local` to start one on this machine"
        raise UsageError(f"no Ray cluster answers at {address} ({error}); {advice}") from error
