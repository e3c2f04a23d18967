"""Bubblewrap in Landlock's place: namespaces in which nothing exists but what the policy lets a process read."""

import os
import shutil
import sys
from pathlib import Path

from lake.isolation import Policy

_MACHINE = ("/proc/", "/sys/", "/dev/")
_LIBRARIES = ("/lib", "/lib64")
"""Where a program looks for its loader, often links to /usr."""


def program() -> str | None:
    """Where bubblewrap is installed; None if it is not."""
    return shutil.which("bwrap")


def wrapped(command: list[str], policy: Policy) -> list[str]:
    """The command line that runs a Python command in a namespace that holds what the policy names, read-only.

    Args:
        command: of `lake.isolation.command`.
        policy: what it may read; the listed folders are there with what can be read of them.
    """
    binds = [f for path in policy.read if not path.startswith(_MACHINE) for f in ("--ro-bind", path, path)]
    for path in (*_interpreter(), command[-1]):
        binds += ["--ro-bind", path, path]
    for path in _LIBRARIES:
        if Path(path).exists():
            binds += ["--ro-bind", os.path.realpath(path), path]
    inside = ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [program() or "bwrap", "--unshare-all", "--die-with-parent", *binds, *inside, "--", *command]


def _interpreter() -> list[str]:
    """The folders of the program and of all links to it, and the file that tells of its virtual environment."""
    link = Path(sys.executable)
    found = [str(link.parent)]
    while link.is_symlink():
        link = link.parent / link.readlink()
        found.append(str(link.parent))
    settings = Path(sys.prefix, "pyvenv.cfg")
    return [*dict.fromkeys(found), *([str(settings)] if settings.exists() else [])]
