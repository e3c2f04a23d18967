"""The processes of one training run, their exchange of results, and the work that only rank 0 does.

Ranks are started by `torchrun -m trainer ...` or `trajlake train --ranks N`. Only rank 0 touches the lake and the run
folder; the other ranks get its results.

A rank ends with its launcher: the kernel kills it when the launcher dies. Ranks run in separate sessions, so Ctrl-C
reaches only the launcher, which passes it on to rank 0: one process says how the run continues, and releases its locks.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from lake.errors import TrajlakeError
from lake.execution.local import count_usable_cores

T = TypeVar("T")
LAUNCHER, STORE = "TRAJLAKE_LAUNCHER", "TRAJLAKE_RANKS_STORE"
"""Environment variables of ranks: the process id of `trajlake train --ranks`, and the file of their process group."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process and the number of processes of the run."""

    rank: int = 0
    """Index of this process."""
    world_size: int = 1
    """Number of processes."""
    device: str = "cpu"
    """Device of this process."""
    joined: bool = False
    """Whether a process group connects the processes (also a single one)."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def on_rank_zero(self, compute: Callable[[], T]) -> T:
        """Run `compute` on rank 0 only, and return its result, which must pickle, on all ranks.

        Raises:
            SystemExit: on the other ranks, where rank 0 failed and reports the error.
        """
        if self.world_size == 1:
            return compute()
        import torch
        from torch import distributed

        message: list[Any] = [None, False]
        if self.rank == 0:
            try:
                message = [compute(), True]
            except TrajlakeError:
                distributed.broadcast_object_list(message, src=0, device=torch.device("cpu"))
                raise
        distributed.broadcast_object_list(message, src=0, device=torch.device("cpu"))
        if not message[1]:
            raise SystemExit(1)
        result: T = message[0]
        return result

    def sum_over_ranks(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add sums by name over all ranks; a rank may lack names."""
        if self.world_size == 1:
            return dict(sums)
        from torch import distributed

        gathered: list[Any] = [None] * self.world_size
        distributed.all_gather_object(gathered, dict(sums))
        total: dict[str, float] = {}
        for rank_sums in gathered:
            for name, number in rank_sums.items():
                total[name] = total.get(name, 0.0) + number
        return total

    def wait(self) -> None:
        """Wait until every rank calls this."""
        if self.world_size > 1:
            from torch import distributed

            distributed.barrier()


ALONE = Ranks()
"""One process, no process group."""


def is_launched() -> bool:
    """Return whether this process was started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Return whether this process reports for all ranks: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0" or not is_launched()


@contextmanager
def report_once() -> Iterator[None]:
    """Report errors that every rank finds, such as a wrong setting, on rank 0 only; the others exit (SystemExit)."""
    try:
        yield
    except TrajlakeError:
        if not is_first_rank():
            raise SystemExit(1) from None
        raise


def join_ranks(device: str) -> Ranks:
    """Connect to the other ranks, if this process was started as one of several.

    Args:
        device: cpu, or cuda, where each process takes the GPU of its local rank.

    Raises:
        UsageError: the GPU does not exist.
    """
    if not is_launched():
        return Ranks(device=device)
    import torch
    from torch import distributed

    if device.startswith("cuda"):
        from trainer.policy.model import check_device

        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        check_device(device)
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        store = os.environ.get(STORE)
        if store is None:
            distributed.init_process_group(backend)
        else:
            rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
            distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    return Ranks(distributed.get_rank(), distributed.get_world_size(), device, joined=True)


def leave_ranks() -> Ranks:
    """Disconnect from the other ranks; return the rank of this process."""
    if not is_launched():
        return ALONE
    from torch import distributed

    if not distributed.is_initialized():
        return ALONE
    ranks = Ranks(distributed.get_rank(), distributed.get_world_size())
    distributed.destroy_process_group()
    return ranks


_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0
"""Time for rank 0 to report, after Ctrl-C or after another rank failed."""

Rank = subprocess.Popen[bytes]


def launch_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `trajlake ARGUMENTS` in several connected processes, and wait for their end.

    Return 0, or the exit status of rank 0, or else of the first rank that failed. The other ranks are then killed.
    """
    with tempfile.TemporaryDirectory(prefix="trajlake-ranks-") as folder:
        ranks = [_start(rank, count, arguments, Path(folder) / "store") for rank in range(count)]
        try:
            return _wait(ranks)
        except KeyboardInterrupt:
            ranks[0].send_signal(signal.SIGINT)
            _wait_for_exit(ranks[0])
            return 128 + signal.SIGINT
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def die_with_launcher() -> None:
    """Let the kernel kill this process when its launcher dies, also if the launcher is dead already."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)


def _start(rank: int, count: int, arguments: Sequence[str], store: Path) -> Rank:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        LAUNCHER: str(os.getpid()),
        STORE: str(store),
    }
    # As torchrun does, divide the cores among the ranks.
    threads = {"OMP_NUM_THREADS": str(max(1, count_usable_cores() // count))}
    environment = threads | os.environ | variables
    return subprocess.Popen([sys.executable, "-m", "trainer", *arguments], env=environment, start_new_session=True)


def _wait(ranks: Sequence[Rank]) -> int:
    """Wait until all ranks have ended, or one has failed."""
    while not any(rank.poll() for rank in ranks):
        if all(rank.returncode == 0 for rank in ranks):
            return 0
        time.sleep(_POLL_SECONDS)
    failed = next(rank for rank in ranks if rank.returncode)
    status = failed.returncode
    if status < 0:
        name = signal.Signals(-status).name
        cause = f"rank {ranks.index(failed)} was ended by {name}"
        advice = "the same command with --resume continues from the last checkpoint"
        click.echo(f"trajlake: {cause}; {advice}", err=True)
        return 128 - status
    _wait_for_exit(ranks[0])
    return max(ranks[0].returncode or 0, 0) or status


def _wait_for_exit(rank: Rank) -> None:
    """Wait for the end of a rank for a limited time."""
    with suppress(subprocess.TimeoutExpired):
        rank.wait(_GRACE_SECONDS)
