"""Start a command again as several ranks on this machine, and end with them.

No rank outlives its launcher: the kernel kills it when the launcher dies, however that comes about. Ranks have a
session of their own, so Ctrl-C reaches the launcher alone, which passes it on to rank 0: one process says how the run
goes on, and lets go of what it holds.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from trainer.backends.ranks import LAUNCHER, STORE

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 20.0
"""For rank 0 to say what it has to say, after Ctrl-C or after another one failed."""

Rank = subprocess.Popen[bytes]


def launch_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `trajlake ARGUMENTS` in several processes that know each other, and wait for their end.

    Args:
        count: number of processes.
        arguments: of the command line, the command's name first.

    Returns:
        0, or the exit status of rank 0, or else of the first rank that failed; the others are then ended.
    """
    with tempfile.TemporaryDirectory(prefix="trajlake-ranks-") as folder:
        ranks = [_start(rank, count, arguments, Path(folder) / "store") for rank in range(count)]
        try:
            return _wait(ranks)
        except KeyboardInterrupt:
            ranks[0].send_signal(signal.SIGINT)
            _until_ended(ranks[0])
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
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    environment = threads | os.environ | own
    return subprocess.Popen([sys.executable, "-m", "trainer", *arguments], env=environment, start_new_session=True)


def _wait(ranks: Sequence[Rank]) -> int:
    """Wait until all ranks have ended, or one has failed."""
    while not any(rank.poll() for rank in ranks):
        if all(rank.returncode == 0 for rank in ranks):
            return 0
        time.sleep(_LOOK_SECONDS)
    failed = next(rank for rank in ranks if rank.returncode)
    status = failed.returncode
    if status < 0:
        name = signal.Signals(-status).name
        said = f"rank {ranks.index(failed)} was ended by {name}; the same command with --resume goes on"
        click.echo(f"trajlake: {said} from the last checkpoint", err=True)
        return 128 - status
    _until_ended(ranks[0])
    return max(ranks[0].returncode or 0, 0) or status


def _until_ended(rank: Rank) -> None:
    """Wait for the end of a rank, but not for ever."""
    with suppress(subprocess.TimeoutExpired):
        rank.wait(_GRACE_SECONDS)
