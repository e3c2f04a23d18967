"""Which isolation this machine can give: tried, not guessed, once per process.

From strong to weak: `strong` (all layers of `lake.locked.isolation`), `bwrap` (in Landlock's place bubblewrap, in whose
namespaces nothing exists but what a process may read), `basic` (limits and seccomp), `none` (limits).
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from lake.errors import SandboxUnavailableError
from lake.locked import isolation
from lake.locked.isolation import Policy
from pipelines.score.sandbox.contract import Level, SandboxLimits

_MACHINE = ("/proc/", "/sys/", "/dev/")
_LIBRARIES = ("/lib", "/lib64")
"""Where a program looks for its loader, often links to /usr."""


def program() -> str | None:
    """Where bubblewrap is installed; None if it is not."""
    return shutil.which("bwrap")


def wrapped(command: list[str], policy: Policy) -> list[str]:
    """The command line that runs a Python command in a namespace that holds what the policy names, read-only."""
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


ORDER: tuple[Level, ...] = ("none", "basic", "bwrap", "strong")
LAYERS: dict[Level, tuple[str, ...]] = {
    "none": ("rlimits",),
    "basic": tuple(layer for layer in isolation.LAYERS if layer != "landlock"),
    "bwrap": tuple(layer for layer in isolation.LAYERS if layer != "landlock"),
    "strong": isolation.LAYERS,
}
"""What a process of a level asks of `lake.locked.isolation`."""
_TRIAL_SECONDS = 30.0
_TRIAL_MODULE = "keyword"
"""A module of the standard library that does nothing: it must still run when all is locked."""


def choose(limits: SandboxLimits) -> Level:
    """The strongest level that can be had here, up to `max_level`; SandboxUnavailableError if below `min_level`."""
    if ORDER.index(limits.max_level) < ORDER.index(limits.min_level):
        msg = f"max_level={limits.max_level!r} is weaker than min_level={limits.min_level!r}; lower min_level as well"
        raise SandboxUnavailableError(msg)
    reasons: dict[Level, str] = {}
    best = None
    for level in reversed(ORDER[: ORDER.index(limits.max_level) + 1]):
        if (reason := obstacle(level)) is None:
            best = level
            break
        reasons[level] = reason
    if best is not None and ORDER.index(best) >= ORDER.index(limits.min_level):
        return best
    why = "; ".join(f"{level}: {reason}" for level, reason in reasons.items())
    instead = "it cannot be run at all"
    if best is not None:
        instead = f"it can be held at level {best}"
        why += f"; run it on a machine that has what is missing, or, if you trust it, accept less: min_level = {best!r}"
    msg = f"user code must be held at level {limits.min_level} (min_level); here {instead}: {why}"
    raise SandboxUnavailableError(msg)


def level_here(limits: SandboxLimits) -> tuple[Level | None, str]:
    """What `choose` says on the machine that this runs on; None and why, if nothing may run there."""
    try:
        return choose(limits), ""
    except SandboxUnavailableError as error:
        return None, str(error)


def weaker(one: Level, other: Level | None) -> Level:
    """The weaker of two levels; None is no bound."""
    return one if other is None else min(one, other, key=ORDER.index)


@cache
def obstacle(level: Level) -> str | None:
    """Why a level cannot be had on this machine; None if a trial process was held at that level."""
    absent = isolation.missing()
    if lacking := [f"no {layer}: {absent[layer]}" for layer in LAYERS[level] if layer in absent]:
        return ", ".join(lacking)
    if level == "bwrap" and program() is None:
        return "no bubblewrap: the program bwrap is not installed"
    policy = isolation.Policy(read=isolation.runtime_folders(), layers=LAYERS[level])
    command = isolation.command()
    if level == "bwrap":
        command = wrapped(command, policy)
    try:
        done = subprocess.run(
            command,
            input=isolation.orders(_TRIAL_MODULE, policy, {}),
            capture_output=True,
            env={"LANG": "C.UTF-8"},
            cwd="/",
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{sys.executable} could not be started: {error}"
    if done.returncode == 0:
        return None
    last_line = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return f"a trial failed: {last_line or f'exit status {done.returncode}'}"
