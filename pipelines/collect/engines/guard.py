"""The process between ours and an engine's: whatever becomes of ours, all processes of the engine end.

Run as a script, of the standard library alone: `python guard.py PID COMMAND...`. It starts the command in a session of
its own and ends it when it is told to (SIGTERM), or when its parent, PID, is gone, also after kill -9. vLLM is three
processes, of which the others outlive the first one if that is killed: the guard adopts what is orphaned below it, and
ends when nothing is left. It asks for its parent instead of having the kernel signal its end, because that signal
follows the thread that started the guard, and not the process.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 0.3
_LEAVING_SECONDS = 15.0
"""For the engine to end by itself."""


def main(parent: int, command: list[str]) -> int:
    """Run a command until it ends, is to end, or the parent has gone; its exit status."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # One thread, so that what runs between fork and exec finds nothing locked.
    engine = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_guard, stdin=subprocess.DEVNULL)  # noqa: PLW1509
    while engine.poll() is None and not told.is_set() and os.getppid() == parent:
        told.wait(_LOOK_SECONDS)
    if engine.poll() is None:
        engine.terminate()
        with suppress(subprocess.TimeoutExpired):
            engine.wait(_LEAVING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()
    _end_orphans()
    return engine.returncode if engine.returncode >= 0 else 128 - engine.returncode


def _end_with_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_orphans() -> None:
    """Kill what is left below this process, and what that leaves behind."""
    while True:
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
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
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
