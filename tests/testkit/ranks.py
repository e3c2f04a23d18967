"""Several real processes that train together over gloo, forked from a server that has loaded torch already."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from testkit.processes import environment

_PATIENCE = 150
_CONTEXT = multiprocessing.get_context("forkserver")


@cache
def _server() -> None:
    """Start the server that forks; it imports what ranks need, once, and finds it through PYTHONPATH alone."""
    _CONTEXT.set_forkserver_preload(["testkit.rank_tasks"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(OMP_NUM_THREADS="1").items():
            patch.setenv(name, value)
        forkserver.ensure_running()


def on_ranks(count: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function in several processes, connected as ranks.

    Args:
        count: number of processes.
        task: a function of `testkit.rank_tasks`; gets the `Ranks` first, then the arguments.
        arguments: picklable.

    Returns:
        What it returned on each rank.
    """
    _server()
    answers = [_CONTEXT.Pipe(duplex=False) for _ in range(count)]
    port = _free_port()
    processes = [
        _CONTEXT.Process(target=_one_rank, args=(rank, count, port, answers[rank][1], task, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for _, theirs in answers:
        theirs.close()
    results = []
    try:
        for mine, _ in answers:
            assert mine.poll(_PATIENCE), f"a rank of {task.__name__} said nothing for {_PATIENCE} s"
            fault, value = mine.recv()
            assert fault is None, fault
            results.append(value)
    finally:
        for process in processes:
            process.join(5 if len(results) == count else 0)
            process.kill()
    return results


def _one_rank(rank: int, count: int, port: int, answer: Any, task: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    from trainer.backends.ranks import join_ranks, leave_ranks

    torch.set_num_threads(1)
    try:
        answer.send((None, task(join_ranks("cpu"), *arguments)))
    except Exception:
        answer.send((traceback.format_exc(), None))
        raise
    leave_ranks()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def files_below(folder: Path) -> set[str]:
    """Names of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
