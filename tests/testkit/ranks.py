"""Several real processes that train together over gloo, forked from a server that has loaded torch already."""

import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from testkit.processes import fork_server

RANK = "rank"
"""First word to a worker that is to be a rank (`testkit.training_worker`)."""
_PATIENCE = 150


def on_ranks(count: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function in several processes, connected as ranks; the next call with as many finds the same ones.

    Args:
        count: number of processes.
        task: a function of `testkit.rank_tasks`; gets the `Ranks` first, then the arguments. It leaves nothing behind
            in its process.
        arguments: picklable.

    Returns:
        What it returned on each rank.
    """
    group = _GROUPS.get(count) or _Group(count)
    # A group that has failed in a task is not used again: its ranks wait for each other in different places.
    _GROUPS.pop(count, None)
    try:
        results = group.run(task, arguments)
    except BaseException:
        group.end()
        raise
    _GROUPS[count] = group
    return results


class _Group:
    """Processes that are ranks of each other and run one task after another."""

    def __init__(self, count: int) -> None:
        self._server = fork_server("testkit.training_worker")
        self._pids: list[int] = []
        self._connections: list[Connection] = []
        port = _free_port()
        for rank in range(count):
            mine, theirs = socket.socketpair()
            words = [RANK, *map(str, (rank, count, port))]
            self._pids.append(self._server.ask([theirs.fileno(), 1, 2], run=words))
            self._connections.append(Connection(mine.detach()))
            theirs.close()

    def run(self, task: Callable[..., Any], arguments: Any) -> list[Any]:
        for connection in self._connections:
            connection.send((task, arguments))
        results = []
        for connection in self._connections:
            assert connection.poll(_PATIENCE), f"a rank of {task.__name__} said nothing for {_PATIENCE} s"
            fault, value = connection.recv()
            assert fault is None, fault
            results.append(value)
        return results

    def end(self) -> None:
        """Kill the ranks."""
        for connection in self._connections:
            connection.close()
        for pid in self._pids:
            if self._server.ask(wait=pid, block=False) is None:
                os.kill(pid, signal.SIGKILL)
                self._server.ask(wait=pid, block=True)


_GROUPS: dict[int, _Group] = {}
"""By number of ranks. They end with the server that has forked them."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def files_below(folder: Path) -> set[str]:
    """Names of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
