"""Which function `--agent` names: `FILE.py:name`, or `package.module:name`."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from lake import ids
from lake.errors import UsageError
from pipelines.collect.agents import Agent

_EXAMPLE = "agent.py:agent, or package.module:agent"


def load_agent(name: str) -> Agent:
    """The function that a name stands for.

    Args:
        name: a file or a module, a colon, and what it defines: a function or any other callable, sync or async.

    Raises:
        UsageError: there is no such file, module or function, it cannot be imported, or it cannot be called with a task
            and a client.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise UsageError(f"--agent {name!r} names no function; valid: {_EXAMPLE}")
    module = _of_file(Path(place)) if place.endswith(".py") else _of_package(place)
    agent = getattr(module, function, None)
    if agent is None:
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{place} has no {function!r}; it has {', '.join(found[:20]) or 'no function'}")
    if inspect.isclass(agent) or not callable(agent):
        what = "a class" if inspect.isclass(agent) else f"of type {type(agent).__name__}"
        raise UsageError(f"{name} is {what}; valid: a function agent(task, client), or an object that is called so")
    _check_signature(name, agent)
    return agent  # type: ignore[no-any-return]


def _of_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UsageError(f"{file} is no file; valid: {_EXAMPLE}")
    # Under a name of its own: two files of one name are two modules, and pickled classes find theirs.
    name = f"trajlake_agent_{ids.to_text(ids.text_hash(str(file.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python FILE` has it: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"{file} cannot be imported: {_told(error)}") from error
    return module


def _of_package(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"the module {name!r} cannot be imported: {error}; valid: {_EXAMPLE}") from error
    except Exception as error:
        raise UsageError(f"the module {name!r} cannot be imported: {_told(error)}") from error


def _check_signature(name: str, agent: Agent) -> None:
    try:
        signature = inspect.signature(agent)
    except (TypeError, ValueError):
        return  # of C, say: it tells nothing
    try:
        signature.bind(object(), object())
    except TypeError as error:
        raise UsageError(f"{name}{signature} cannot be called with a task and a client: {error}") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
