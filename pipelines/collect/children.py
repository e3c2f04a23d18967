"""Processes that end with the one that started them, and whatever they started too, also when that is killed.

This file, run as a program, stands between the two: it starts the command in a session of its own and ends it when it
is told to (SIGTERM), or when its parent is gone, also after kill -9. vLLM is three processes, of which the others
outlive the first one if that is killed: what is orphaned below this process is adopted, and it ends when nothing is
left. It asks for its parent instead of having the kernel signal its end, because that signal follows the thread that
started it, and not the process.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 0.3
_LEAVING_SECONDS = 15.0
"""To end by itself."""


def guarded(command: Sequence[str], *, leaving: float = _LEAVING_SECONDS) -> list[str]:
    """A command as a child that ends with this process.

    Its exit status is the command's; of one that a signal ended, 128 and the signal's number.

    Args:
        command: the program and its arguments.
        leaving: seconds that it has to end by itself when the child is told to (SIGTERM).
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(leaving), *command]


def _main(parent: int, leaving: float, command: list[str]) -> int:
    """Run a command until it ends, is to end, or the parent has gone; its exit status."""
    if os.getppid() != parent:  # it died before we could ask
        return 1
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # One thread, so that what runs between fork and exec finds nothing locked.
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_this, stdin=subprocess.DEVNULL)  # noqa: PLW1509
    while child.poll() is None and not told.is_set() and os.getppid() == parent:
        told.wait(_LOOK_SECONDS)
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(leaving if told.is_set() else _LEAVING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    _end_orphans()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_with_this() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_orphans() -> None:
    """Kill what is left below this process, and what that leaves behind."""
    while True:
        for orphan in _children():
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            time.sleep(0.02)


def _children() -> list[int]:
    """Processes whose parent this one is; where there is no /proc nothing is adopted."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(stat.read_text("utf-8", "replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
