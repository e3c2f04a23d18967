"""Processes that end with the one that started them, also when that is killed.

Linux lets a process ask for a signal at its parent's death; the wish survives `exec`, so this file, run as a program,
asks and then becomes the command. What tells is the death of the thread that started the process: start children in a
thread that lives as long as they are needed. Elsewhere than on Linux a killed parent leaves its children behind.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def with_parent(command: Sequence[str]) -> list[str]:
    """A command as a child that the kernel kills when this process dies."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(parent: int, command: list[str]) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
