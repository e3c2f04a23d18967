"""Choose the isolation of a function's workers, and prepare their command line, environment and readable files.

Levels from strong to weak: `strong` (all layers of `lake.locked.isolation`), `bwrap` (bubblewrap instead of Landlock;
its namespaces contain only what a process may read), `basic` (limits and seccomp), `none` (limits). A trial process
shows which levels this machine offers, once per process.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path

import lake
import pipelines
from lake.errors import SandboxUnavailableError, UsageError
from lake.locked import isolation
from lake.locked.isolation import LockPolicy
from pipelines.score.sandbox import frames
from pipelines.score.sandbox.contract import FunctionSource, Level, SandboxLimits

_MACHINE = ("/proc/", "/sys/", "/dev/")
_LIBRARIES = ("/lib", "/lib64")
"""Folders of a program's loader, often links to /usr."""


def find_bwrap() -> str | None:
    """Return the path of bubblewrap; None if it is not installed."""
    return shutil.which("bwrap")


def wrap_command(command: list[str], policy: LockPolicy) -> list[str]:
    """Return the command line that runs a Python command in a namespace with the policy's files, read-only."""
    binds = [f for path in policy.read if not path.startswith(_MACHINE) for f in ("--ro-bind", path, path)]
    for path in (*_list_interpreter_paths(), command[-1]):
        binds += ["--ro-bind", path, path]
    for path in _LIBRARIES:
        if Path(path).exists():
            binds += ["--ro-bind", os.path.realpath(path), path]
    inside = ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [find_bwrap() or "bwrap", "--unshare-all", "--die-with-parent", *binds, *inside, "--", *command]


def _list_interpreter_paths() -> list[str]:
    """Return the folders of the program and of all links to it, and the configuration of its virtual environment."""
    link = Path(sys.executable)
    folders = [str(link.parent)]
    while link.is_symlink():
        link = link.parent / link.readlink()
        folders.append(str(link.parent))
    settings = Path(sys.prefix, "pyvenv.cfg")
    return [*dict.fromkeys(folders), *([str(settings)] if settings.exists() else [])]


ORDER: tuple[Level, ...] = ("none", "basic", "bwrap", "strong")
LAYERS: dict[Level, tuple[str, ...]] = {
    "none": ("rlimits",),
    "basic": tuple(layer for layer in isolation.LAYERS if layer != "landlock"),
    "bwrap": tuple(layer for layer in isolation.LAYERS if layer != "landlock"),
    "strong": isolation.LAYERS,
}
"""Layers of `lake.locked.isolation` for each level."""
_TRIAL_SECONDS = 30.0
_TRIAL_MODULE = "keyword"
"""A module of the standard library without effects, which must run in a locked process."""


def choose_level(limits: SandboxLimits) -> Level:
    """Return the strongest level of this machine, up to `max_level`; SandboxUnavailableError if below `min_level`."""
    if ORDER.index(limits.max_level) < ORDER.index(limits.min_level):
        msg = f"max_level={limits.max_level!r} is weaker than min_level={limits.min_level!r}; lower min_level as well"
        raise SandboxUnavailableError(msg)
    reasons: dict[Level, str] = {}
    best = None
    for level in reversed(ORDER[: ORDER.index(limits.max_level) + 1]):
        if (reason := find_obstacle(level)) is None:
            best = level
            break
        reasons[level] = reason
    if best is not None and ORDER.index(best) >= ORDER.index(limits.min_level):
        return best
    why = "; ".join(f"{level}: {reason}" for level, reason in reasons.items())
    available = "no level is available"
    if best is not None:
        available = f"only level {best} is available"
        why += f"; run it on a machine that offers the missing layers, or, if you trust it, set min_level = {best!r}"
    msg = f"user code requires isolation level {limits.min_level} (min_level); here {available}: {why}"
    raise SandboxUnavailableError(msg)


def try_choose_level(limits: SandboxLimits) -> tuple[Level | None, str]:
    """Return the level of `choose_level` on this machine; None and the reason if nothing may run here."""
    try:
        return choose_level(limits), ""
    except SandboxUnavailableError as error:
        return None, str(error)


def pick_weaker(level: Level, bound: Level | None) -> Level:
    """Return the weaker of two levels; a bound of None does not count."""
    return level if bound is None else min(level, bound, key=ORDER.index)


@cache
def find_obstacle(level: Level) -> str | None:
    """Return why this machine does not offer a level; None if a trial process ran at that level."""
    absent = isolation.find_missing_layers()
    if missing := [f"no {layer}: {absent[layer]}" for layer in LAYERS[level] if layer in absent]:
        return ", ".join(missing)
    if level == "bwrap" and find_bwrap() is None:
        return "no bubblewrap: the program bwrap is not installed"
    policy = isolation.LockPolicy(read=isolation.list_runtime_folders(), layers=LAYERS[level])
    command = isolation.build_command()
    if level == "bwrap":
        command = wrap_command(command, policy)
    try:
        done = subprocess.run(
            command,
            input=isolation.encode_orders(_TRIAL_MODULE, policy, {}),
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


_PACKAGES = {package.__name__: package.__path__[0] for package in (lake, pipelines)}
"""Packages of this project that a function may import, with their folders."""
_ENVIRONMENT = {
    "HOME": "/",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
"""Environment of a worker: one working thread per library, and a fixed order of sets."""
_SPARE_TASKS = 256
_RENEWAL_SECONDS = 60.0
"""Minimum lifetime of a worker that works properly."""
_MAX_READABLE = 5_000
"""Maximum files and folders in the folder of a function's module; each is a rule of the lock."""


@dataclass(frozen=True)
class Launch:
    """Everything needed to start a worker, repeatedly."""

    level: Level
    command: tuple[str, ...]
    environment: dict[str, str]
    """The worker's whole environment."""
    orders: bytes
    """Bytes to write to stdin before the worker's orders: the lock's orders."""
    function: FunctionSource
    limits: SandboxLimits
    renewal_seconds: float = _RENEWAL_SECONDS
    """Age at which a worker is replaced, so that no honest worker reaches its limit of processor time."""

    def encode_orders(self, sequence: int) -> bytes:
        """Return what a new worker reads from stdin: how to lock itself in, and which function to load."""
        orders = {**asdict(self.function), "locked": "seccomp" in LAYERS[self.level]}
        return self.orders + frames.pack_request(sequence, [json.dumps(orders).encode()])


def prepare_launch(function: FunctionSource, limits: SandboxLimits) -> Launch:
    """Choose the level and the files that the function's workers may read.

    UsageError for a missing file, or a folder that a function should not read; SandboxUnavailableError if isolation
    here is weaker than `min_level`.
    """
    path = Path(function.path).resolve()
    if not path.is_file() or path.suffix != ".py":
        msg = f"{function.path} is not a Python file; name the file that holds `{function.name}`"
        raise UsageError(msg)
    level = choose_level(limits)
    renewal = max(_RENEWAL_SECONDS, limits.rows_per_batch * limits.seconds_per_row)
    # Processor time of a start and a call on all processors, and of all messages on one. The parent ends calls by its
    # clock, and workers end with the parent; this limit stops what escapes both. A worker that uses several processors
    # for long may reach it; it is then replaced, and no call gets the blame.
    processors = os.cpu_count() or 1
    policy = isolation.LockPolicy(
        read=(*isolation.list_runtime_folders(), *_PACKAGES.values(), *_list_readable(path)),
        listed=(str(path.parent),),
        memory_bytes=limits.memory_mb << 20,
        cpu_seconds=ceil(processors * (limits.start_seconds + limits.seconds_per_row) + 2 * renewal),
        tasks=_count_tasks(limits),
        layers=LAYERS[level],
    )
    command = isolation.build_command()
    preload = {name: str(Path(folder).parent) for name, folder in _PACKAGES.items()}
    return Launch(
        level=level,
        command=tuple(wrap_command(command, policy) if level == "bwrap" else command),
        environment={**_ENVIRONMENT, **limits.environment},
        orders=isolation.encode_orders("pipelines.score.sandbox.worker", policy, preload),
        function=replace(function, path=str(path)),
        limits=limits,
        renewal_seconds=renewal,
    )


def _list_readable(path: Path) -> list[str]:
    """Return the function's file and its folder's entries, without hidden ones, links to other folders, and lakes."""
    folder = path.parent
    home = Path("~").expanduser().resolve()
    if home.is_relative_to(folder):
        msg = f"{path} lies in {folder}, and a function can read all files of its folder; put it in a separate folder"
        raise UsageError(msg)
    paths = dict.fromkeys([str(path), *map(str, _walk_readable(folder, folder))])
    if len(paths) > _MAX_READABLE:
        msg = f"{folder} holds {len(paths):,} files that {path.name} could read; put it in a separate folder"
        raise UsageError(msg)
    return list(paths)


def _walk_readable(folder: Path, root: Path) -> Iterator[Path]:
    """Yield entries of a folder that a function under `root` may read completely.

    A lake in the folder, or one folder deeper, is left out: it holds the siblings' outcomes and the answers.
    """
    for entry in sorted(folder.iterdir()):
        target = entry.resolve()
        if entry.name.startswith(".") or not target.is_relative_to(root) or _is_lake(target):
            continue
        if target.is_dir() and any(map(_is_lake, target.iterdir())):
            yield from _walk_readable(entry, root)
        elif target.is_file() or target.is_dir():
            yield entry


def _is_lake(folder: Path) -> bool:
    return (folder / "episodes" / "_delta_log").is_dir()


def _count_tasks(limits: SandboxLimits) -> int | None:
    """Return the number of this user's processes and threads, plus those that the workers may add."""
    if not sys.platform.startswith("linux"):
        return None
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                count += len(list((folder / "task").iterdir()))
    return count + limits.workers * limits.max_threads + _SPARE_TASKS
