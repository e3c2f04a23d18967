"""A Ray cluster of several nodes, which are processes of this machine, in its own process.

`from testkit.ray_cluster import ray_cluster` gives a test module one: a node of a core that can isolate user code
fully, and one that cannot: there the filter of system calls hears of a processor that it is not written for. The head
runs nothing. Each node costs three seconds of CPU, so tests that lose one ask for another before.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from testkit.processes import environment

OBJECT_STORE_BYTES = 80 << 20
"""Of each node: about the least that Ray takes."""
_TRIES = 4
_WEAK = """
import platform, sys
machine = platform.machine
def weak():
    asked_by = sys._getframe(1).f_globals.get("__name__")
    return "riscv64" if asked_by == "lake.locked.isolation" else machine()
platform.machine = weak
"""


@dataclass
class RayCluster:
    """How to reach it, and which orders it takes."""

    address: str
    _process: subprocess.Popen[str]

    def ask(self, order: str) -> dict[str, object]:
        """`node`: add another node that can isolate user code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        answer: dict[str, object] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """A fresh cluster."""
    if find_spec("ray") is None:
        pytest.skip('Ray is not installed: pip install "trajlake[ray]"')
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        Path(folder, "sitecustomize.py").write_text(_WEAK)
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "testkit.ray_cluster", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1"),
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            yield RayCluster(json.loads(process.stdout.readline())["address"], process)
        finally:
            process.communicate(timeout=60)  # its stdin ends, and it does


def main(folder: str) -> None:
    """Start a cluster, and do what is asked until stdin ends."""
    import os

    from ray.cluster_utils import Cluster

    size = {"object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster()
    path = os.pathsep.join((folder, os.environ["PYTHONPATH"]))
    _added(cluster, num_cpus=0, include_dashboard=False, no_monitor=True, include_log_monitor=False, **size)
    _added(cluster, num_cpus=1, env_vars={"PYTHONPATH": path}, **size)
    _added(cluster, num_cpus=1, **size)
    cluster.wait_for_nodes()
    print(json.dumps({"address": cluster.address}), flush=True)
    for order in sys.stdin:
        assert order.strip() == "node", order
        _added(cluster, num_cpus=1, **size)
        print(json.dumps({}), flush=True)
    cluster.shutdown()


def _added(cluster: Any, **options: Any) -> None:
    """Add a node; Ray gives it half a minute to start, which a busy machine may exceed."""
    for attempt in range(_TRIES):
        try:
            cluster.add_node(**options)
        except Exception as error:
            if attempt + 1 == _TRIES or "timed out during startup" not in str(error):
                raise
        else:
            return


if __name__ == "__main__":
    main(sys.argv[1])
