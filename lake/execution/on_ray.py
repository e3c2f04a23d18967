"""The executor that runs parts as tasks on a Ray cluster.

Ray is an optional extra, imported when an executor is made. The executor uses a running cluster (`RAY_ADDRESS`, or `ray
start`). Otherwise, or with `RAY_ADDRESS=local`, Ray starts one on this machine, which ends with the process. Every node
must be able to reach the lake: in a bucket, or in a folder that all of them mount.
"""

import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from lake.errors import MissingExtraError, UsageError, WorkerLostError
from lake.execution.executor import TRIES, Item, NodeResult, Result, explain_lost_worker, require_workers, run_windowed

_ANSWER_SECONDS = 10.0
"""Timeout for a connection to a cluster."""


class RayExecutor:
    """Runs parts as Ray tasks with one core each.

    Args:
        workers: number of parts that run at once; default: one per core of the cluster.
        address: address of a running cluster; None uses RAY_ADDRESS, or else starts a cluster on this machine.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: no cluster answers at the address.
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
        options = {"address": address, "log_to_driver": False, "logging_level": "error"}
        if address not in (None, "", "local"):
            _require_answer(str(address))
            self._ray.init(**options)
            return
        try:
            self._ray.init(**options, num_cpus=workers, include_dashboard=False)
        except ValueError:  # Ray found a cluster of `ray start`, which rejects a number of cores
            self._ray.init(**options)

    def map(
        self, task: Callable[[Item], Result], items: Iterable[Item], *, without: Collection[str] = ()
    ) -> Iterator[Result]:
        """See `Executor.map`."""
        # A task that raises does not run again; a task whose worker died does.
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": TRIES - 1, "retry_exceptions": False}
        if without:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(without))})"}
        remote = self._ray.remote(**options)(task)
        cancel = partial(self._ray.cancel, force=True)
        errors = self._ray.exceptions
        done = 0
        try:
            for result in run_windowed(remote.remote, self._ray.get, cancel, iter(items), self.workers):
                yield result
                done += 1
        except errors.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            raise WorkerLostError(explain_lost_worker(done)) from error
        except errors.RayError as error:
            raise WorkerLostError(_explain_failure(error)) from error

    def on_nodes(self, task: Callable[[Item], Result], item: Item) -> list[NodeResult[Result]]:
        """See `Executor.on_nodes`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        hosts = Counter(node["NodeManagerHostname"] for node in nodes)
        remote = self._ray.remote(num_cpus=0)(task)
        requests = []
        for node in nodes:
            host, node_id = node["NodeManagerHostname"], node["NodeID"]
            name = host if hosts[host] == 1 else f"{host} ({node_id[:8]})"
            strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            requests.append((node_id, name, remote.options(scheduling_strategy=strategy).remote(item)))
        errors = self._ray.exceptions
        results = []
        for node_id, name, reference in requests:
            try:
                results.append(NodeResult(node_id, name, self._ray.get(reference)))
            except (errors.TaskUnschedulableError, errors.NodeDiedError) as error:
                # A node that has died gets no part. A live one that does not answer could get some.
                if any(node["Alive"] and node["NodeID"] == node_id for node in self._ray.nodes()):
                    raise WorkerLostError(explain_lost_worker(0)) from error
            except errors.LocalRayletDiedError as error:
                raise WorkerLostError(_explain_failure(error)) from error
        return results


def _explain_failure(error: Exception) -> str:
    """Return the message for a failure of the cluster, such as that of a node's raylet."""
    reason = str(error).strip().partition("\n")[0]
    return f"the Ray cluster failed ({reason or type(error).__name__}); check it, and run the job again"


def _require_answer(address: str) -> None:
    """Raise UsageError unless a process listens at HOST:PORT or ray://HOST:PORT; Ray would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # a keyword of Ray, such as `auto`
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        advice = "set RAY_ADDRESS to a running cluster, or to `local` to start one on this machine"
        raise UsageError(f"no Ray cluster answers at {address} ({error}); {advice}") from error
