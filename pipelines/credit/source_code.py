"""Which modules decide an estimator's numbers: its own, and whatever of this package they import.

A series is one estimator with one set of options and one code. The modules are found by reading the imports, so a
helper that is added or split is covered without anybody having to list it.
"""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

_PACKAGE = "pipelines.credit"


def deciding_modules(*roots: ModuleType) -> tuple[ModuleType, ...]:
    """The given modules and every module of `pipelines.credit` that they import, directly or not, by name.

    Imports inside functions count too.
    """
    found: dict[str, ModuleType] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module.__name__ not in found:
            found[module.__name__] = module
            waiting += [import_module(name) for name in _imported(module)]
    return tuple(found[name] for name in sorted(found))


def _imported(module: ModuleType) -> Iterator[str]:
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if _is_module(name) else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name.startswith(f"{_PACKAGE}."))


def _is_module(name: str) -> bool:
    """Whether a dotted name of this package is a module, not something in one."""
    if not name.startswith(f"{_PACKAGE}."):
        return False
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
