"""How a worker of a function is started: its command line, its environment, and what it may read."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path

import lake
import pipelines
from lake.errors import UsageError
from lake.locked import isolation
from pipelines.score.sandbox import frames
from pipelines.score.sandbox.contract import FunctionSource, Level, SandboxLimits
from pipelines.score.sandbox.levels import LAYERS, choose, wrapped

_PACKAGES = {package.__name__: package.__path__[0] for package in (lake, pipelines)}
"""Packages of ours that a function may import, and where they lie."""
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
"""All that a worker's environment holds: one working thread, and the same order of sets every time."""
_SPARE_TASKS = 256
_RENEWAL_SECONDS = 60.0
"""A worker lives for so long at least, if it does no harm."""
_MOST_BESIDE = 5_000
"""Files and folders beside a function's module; each is a rule of the lock."""


@dataclass(frozen=True)
class Launch:
    """All that is needed to start a worker, again and again."""

    level: Level
    command: tuple[str, ...]
    environment: dict[str, str]
    """All of it."""
    orders: bytes
    """Bytes to write to its stdin first (the lock's orders), before the worker's own."""
    function: FunctionSource
    limits: SandboxLimits
    renewal_seconds: float = _RENEWAL_SECONDS
    """Age at which it is replaced, so that no honest worker comes near its limit of processor time."""

    def orders_for(self, sequence: int) -> bytes:
        """What a new worker reads from stdin: how to lock itself in, and what to load."""
        orders = {**asdict(self.function), "locked": "seccomp" in LAYERS[self.level]}
        return self.orders + frames.request(sequence, [json.dumps(orders).encode()])


def prepare(function: FunctionSource, limits: SandboxLimits) -> Launch:
    """Choose the level and what the function's workers may read.

    UsageError without such a file, or in a folder that a function should not read; SandboxUnavailableError if isolation
    here is weaker than `min_level`.
    """
    path = Path(function.path).resolve()
    if not path.is_file() or path.suffix != ".py":
        msg = f"{function.path} is no Python file; name the file that holds `{function.name}`, for example rewards.py"
        raise UsageError(msg)
    level = choose(limits)
    renewal = max(_RENEWAL_SECONDS, limits.rows_per_batch * limits.seconds_per_row)
    policy = isolation.Policy(
        read=(*isolation.runtime_folders(), *_PACKAGES.values(), *_beside(path)),
        listed=(str(path.parent),),
        memory_bytes=limits.memory_mb << 20,
        cpu_seconds=_cpu_seconds(limits, renewal),
        tasks=_tasks(limits),
        layers=LAYERS[level],
    )
    command = isolation.command()
    preload = {name: str(Path(folder).parent) for name, folder in _PACKAGES.items()}
    return Launch(
        level=level,
        command=tuple(wrapped(command, policy) if level == "bwrap" else command),
        environment={**_ENVIRONMENT, **limits.environment},
        orders=isolation.orders("pipelines.score.sandbox.worker", policy, preload),
        function=replace(function, path=str(path)),
        limits=limits,
        renewal_seconds=renewal,
    )


def _cpu_seconds(limits: SandboxLimits, renewal: float) -> int:
    """Processor time of one worker: its start and a call on all processors, and all its messages on one.

    The parent's clock ends calls and its own death ends workers: this holds what escapes both. A worker that uses
    several processors for long may reach it, and is replaced without blame.
    """
    processors = os.cpu_count() or 1
    return ceil(processors * (limits.start_seconds + limits.seconds_per_row) + 2 * renewal)


def _beside(path: Path) -> list[str]:
    """The function's file, and what lies in its folder: nothing hidden, nothing a link has elsewhere, no lake."""
    folder = path.parent
    home = Path("~").expanduser().resolve()
    if home.is_relative_to(folder):
        msg = f"{path} lies in {folder}, and a function can read all files of its folder; put it in a folder of its own"
        raise UsageError(msg)
    found = dict.fromkeys([str(path), *map(str, _readable(folder, folder))])
    if len(found) > _MOST_BESIDE:
        msg = f"{folder} holds {len(found):,} files that {path.name} could read; put it in a folder of its own"
        raise UsageError(msg)
    return list(found)


def _readable(folder: Path, root: Path) -> Iterator[Path]:
    """Entries of a folder that a function under `root` may read whole.

    A lake beside it, or one folder deeper, holds the siblings' outcomes and the answers: it is left out.
    """
    for entry in sorted(folder.iterdir()):
        place = entry.resolve()
        if entry.name.startswith(".") or not place.is_relative_to(root) or _is_lake(place):
            continue
        if place.is_dir() and any(map(_is_lake, place.iterdir())):
            yield from _readable(entry, root)
        elif place.is_file() or place.is_dir():
            yield entry


def _is_lake(folder: Path) -> bool:
    return (folder / "episodes" / "_delta_log").is_dir()


def _tasks(limits: SandboxLimits) -> int | None:
    """Processes and threads this user has now, and what the workers may add."""
    if not sys.platform.startswith("linux"):
        return None
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                count += len(list((folder / "task").iterdir()))
    return count + limits.workers * limits.max_threads + _SPARE_TASKS
