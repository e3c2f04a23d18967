"""The user's own Python: what `FILE.py:name` and `package.module:name` stand for, and where a fault in it is.

It is imported and run in this process, outside any sandbox: environments and agents are as trusted as the shell that
names them. A fault in it is told in one sentence, with the line of the user's file; the whole traceback is logged at
DEBUG.
"""

import asyncio
import importlib
import importlib.util
import logging
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lake import ids
from lake.errors import UsageError

_log = logging.getLogger("trajlake")
FAULTS = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""What the user's code may raise as its own fault. Of KeyboardInterrupt it is not the author."""


class UserObject(NamedTuple):
    """What a target names."""

    value: Any
    target: str
    """As the user wrote it."""
    file: Path | None
    """The file that holds it; None if its module has none."""


def load(target: str, option: str) -> UserObject:
    """What `FILE.py:name` or `package.module:name` names; its module is imported now, from its file each time.

    Modules beside FILE.py and, for a package, in the working directory are found as `python FILE.py` would find them.

    Args:
        target: as given on the command line.
        option: where it was given, for messages: `--env`.

    Raises:
        UsageError: no such form, file, module or name, or importing it fails.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise UsageError(f"{option} {target}: write FILE.py:NAME or package.module:NAME")
    module = _from_file(place, option) if place.endswith(".py") else _from_package(place, option)
    file = Path(module.__file__) if module.__file__ else None
    if not hasattr(module, name):
        raise UsageError(f"{option} {target}: {place} has no `{name}`; it has {_callables(module)}")
    return UserObject(getattr(module, name), target, file)


def _from_file(place: str, option: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise UsageError(f"{option}: there is no file {place}")
    _search(path.parent)
    name = f"{path.stem}_{ids.to_text(ids.text_hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except FAULTS as error:
        del sys.modules[name]
        raise UsageError(f"{option} {place} cannot be imported: {fault(error, path)}") from error
    return module


def _from_package(place: str, option: str) -> ModuleType:
    _search(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise UsageError(f"{option}: there is no module {error.name}, installed or in {Path.cwd()}") from error
        raise UsageError(f"{option} {place} cannot be imported: {fault(error, None)}") from error
    except FAULTS as error:
        raise UsageError(f"{option} {place} cannot be imported: {fault(error, None)}") from error


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _callables(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    return ", ".join(own) or "nothing that could be called"


def is_cancellation(error: BaseException) -> bool:
    """Whether somebody cancelled the task that runs; else the user's code raised CancelledError by itself."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def fault(error: BaseException, file: Path | None) -> str:
    """An exception of user code in one sentence, with its place: the deepest line of `file`, else the deepest line."""
    _log.debug("a fault in code of the user", exc_info=error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and Path(frame.filename) == file]
    if not own and not frames:
        return text
    frame = (own or frames)[-1]
    return f"{text} ({frame.filename} line {frame.lineno}, in {frame.name})"
