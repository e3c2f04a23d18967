"""The processes of one training run: which one this is, what the others have, and what rank 0 alone does.

Ranks are started by `torchrun -m trainer ...` or `trajlake train --ranks N`. Rank 0 alone touches the lake and the run
folder; the others get its results.

No rank outlives its launcher: the kernel kills it when the launcher dies, however that comes about. Ranks have a
session of their own, so Ctrl-C reaches the launcher alone, which passes it on to rank 0: one process says how the run
continues, and releases its locks.
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
from lake.execution.cores import usable_cores

T = TypeVar("T")
LAUNCHER, STORE = "TRAJLAKE_LAUNCHER", "TRAJLAKE_RANKS_STORE"
"""Environment of ranks that `trajlake train --ranks` started: the process that did, and the file they meet in."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    """Number of this process."""
    world_size: int = 1
    """Number of processes."""
    device: str = "cpu"
    """This process's device."""
    joined: bool = False
    """A process group connects them (also a single one)."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which touches the lake and the run folder."""
        return self.rank == 0

    def on_rank_zero(self, compute: Callable[[], T]) -> T:
        """Run `compute` on rank 0 alone, and give all ranks its result, which must pickle.

        A SystemExit on the other ranks, where rank 0 failed: it says why.
        """
        if self.world_size == 1:
            return compute()
        import torch
        from torch import distributed

        told: list[Any] = [None, False]
        if self.rank == 0:
            try:
                told = [compute(), True]
            except TrajlakeError:
                distributed.broadcast_object_list(told, src=0, device=torch.device("cpu"))
                raise
        distributed.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        if not told[1]:
            raise SystemExit(1)
        result: T = told[0]
        return result

    def summed(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sums by name, added over all ranks; a rank may lack names."""
        if self.world_size == 1:
            return dict(sums)
        from torch import distributed

        parts: list[Any] = [None] * self.world_size
        distributed.all_gather_object(parts, dict(sums))
        total: dict[str, float] = {}
        for part in parts:
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def wait(self) -> None:
        """Return when every rank has come here."""
        if self.world_size > 1:
            from torch import distributed

            distributed.barrier()


ALONE = Ranks()
"""One process, no process group."""


def launched() -> bool:
    """Whether this process was started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Whether this process is the one that says what concerns all of a run's: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0" or not launched()


@contextmanager
def reported_once() -> Iterator[None]:
    """What every rank finds wrong by itself, such as a setting, is said by rank 0; the others exit (SystemExit)."""
    try:
        yield
    except TrajlakeError:
        if not is_first_rank():
            raise SystemExit(1) from None
        raise


def join_ranks(device: str) -> Ranks:
    """Connect to the other ranks, if this process was started as one of several.

    Args:
        device: cpu, or cuda: then each process takes the GPU of its number on this machine.

    Raises:
        UsageError: there is no such GPU.
    """
    if not launched():
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
    """Disconnect from the other ranks; says which of them this was."""
    if not launched():
        return ALONE
    from torch import distributed

    if not distributed.is_initialized():
        return ALONE
    was = Ranks(distributed.get_rank(), distributed.get_world_size())
    distributed.destroy_process_group()
    return was


_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0
"""For rank 0 to say what it has to say, after Ctrl-C or after another one failed."""

Rank = subprocess.Popen[bytes]


def launch_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `trajlake ARGUMENTS` in several processes that know each other, and wait for their end.

    Returns 0, or the exit status of rank 0, or else of the first rank that failed; the others are then ended.
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
    """Let the kernel kill this process when the one that started it dies, also if it has died already."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)


def _start(rank: int, count: int, arguments: Sequence[str], store: Path) -> Rank:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        LAUNCHER: str(os.getpid()),
        STORE: str(store),
    }
    # As torchrun does: the cores are shared out.
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // count))}
    environment = threads | os.environ | own
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
        said = f"rank {ranks.index(failed)} was ended by {name}; the same command with --resume goes on"
        click.echo(f"trajlake: {said} from the last checkpoint", err=True)
        return 128 - status
    _wait_for_exit(ranks[0])
    return max(ranks[0].returncode or 0, 0) or status


def _wait_for_exit(rank: Rank) -> None:
    """Wait for the end of a rank, but not for ever."""
    with suppress(subprocess.TimeoutExpired):
        rank.wait(_GRACE_SECONDS)
