"""Nodes of a Ray cluster that die while they are asked; real clusters are in test_lake_executors."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from lake.errors import UsageError, WorkerLostError
from lake.execution.on_ray import RayExecutor

ONE, TWO = "1" * 56, "2" * 56
"""Ids of nodes."""
ray_exceptions = pytest.importorskip("ray.exceptions", reason="needs Ray")


class Cluster:
    """Two nodes, as Ray lists them; a task on the second finds that it is gone."""

    exceptions = ray_exceptions

    def __init__(self, *, dies: bool) -> None:
        self._dies = dies
        self._listed = 0

    def nodes(self) -> list[dict[str, Any]]:
        """The second dies after it was listed for the first time, or never does."""
        self._listed += 1
        alive = (True, self._listed == 1 or not self._dies)
        names = zip((ONE, TWO), alive, strict=True)
        return [{"NodeID": n, "NodeManagerHostname": n, "Alive": a, "Resources": {"CPU": 1}} for n, a in names]

    def remote(self, **_: Any) -> Any:
        """Something whose call names the node that it is for."""

        class Remote:
            def options(self, scheduling_strategy: Any) -> "Remote":
                self.node = scheduling_strategy.node_id
                return self

            def remote(self, _: Any) -> str:
                return str(self.node)

        return lambda _: Remote()

    def get(self, node: str) -> str:
        """The answer of a node."""
        if node == TWO:
            raise ray_exceptions.TaskUnschedulableError("it doesn't exist any more")
        return f"answer of {node[0]}"


def ask_nodes(cluster: Cluster) -> list[str]:
    executor = RayExecutor.__new__(RayExecutor)
    executor._ray = cluster
    return [on_node.result for on_node in executor.on_nodes(str, "item")]


def test_a_node_that_dies_while_it_is_asked_is_left_out() -> None:
    assert ask_nodes(Cluster(dies=True)) == ["answer of 1"]


def test_a_node_that_is_there_and_does_not_answer_is_not_passed_over() -> None:
    """It could get parts without having been looked at."""
    with pytest.raises(WorkerLostError):
        ask_nodes(Cluster(dies=False))


@pytest.mark.parametrize(
    ("address", "running", "connections"),
    [
        (None, False, [{"num_cpus": 3}]),
        (None, True, [{"num_cpus": 3}, {}]),
        ("local", True, [{"num_cpus": 3}]),
        ("auto", True, [{}]),
    ],
)
def test_a_running_cluster_keeps_its_number_of_cores(
    monkeypatch: pytest.MonkeyPatch, address: str | None, running: bool, connections: list[dict[str, int]]
) -> None:
    """Ray takes a number of cores for what it starts, and refuses one for a cluster that `ray start` began."""
    import ray

    requests: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        requests.append({name: value for name, value in options.items() if name == "num_cpus"})
        is_found = options["address"] not in (None, "local") or (options["address"] is None and running)
        if is_found and options.get("num_cpus") is not None:
            raise ValueError("When connecting to an existing cluster, num_cpus and num_gpus must not be provided.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayExecutor(3, address=address).workers == 3
    assert requests == connections


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Ray itself would try for many minutes."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match=f"no Ray cluster .*{address} .*RAY_ADDRESS"):
        RayExecutor(2)


@pytest.mark.parametrize(
    ("died", "fragment"),
    [
        (ray_exceptions.WorkerCrashedError, r"a worker process died 3 times in a row \(0 parts were done before it\)"),
        (ray_exceptions.LocalRayletDiedError, r"the Ray cluster failed \(.*raylet.*\); .* run the job again"),
    ],
)
def test_what_dies_under_a_part_is_told_in_words(died: type[Exception], fragment: str) -> None:
    class Dying:
        exceptions = ray_exceptions

        def remote(self, **_: Any) -> Any:
            return lambda task: SimpleNamespace(remote=task)

        def get(self, _: object) -> Any:
            raise died

        def cancel(self, _: object, *, force: bool) -> None:
            assert force

    executor = RayExecutor.__new__(RayExecutor)
    executor._ray, executor.workers = Dying(), 1
    with pytest.raises(WorkerLostError, match=fragment):
        list(executor.map(str, range(3)))
