"""Which modules decide an estimator's numbers: its own, and whatever of this package they import.

A series is one estimator with one set of options and one code. The modules are found by reading the imports, so a
helper that is added or split is covered without anybody having to list it.
"""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

_PACKAGE = "pipelines.credit"
_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+(?P<whole>[^\n#]+)"
    r"|from[ \t]+(?P<source>[\w.]+)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#]+))",
    re.MULTILINE,
)
"""An import statement. Parsing every module would take a tenth of a small job's time."""
_COMMENT = re.compile(r"#[^\n]*")


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
    for found in _IMPORT.finditer(inspect.getsource(module)):
        source = found["source"]
        if source is not None and not source.startswith(_PACKAGE.partition(".")[0]):
            continue
        listed = _COMMENT.sub("", found["whole"] or found["names"]).strip("()\n ")
        names = [name.split()[0] for name in listed.split(",") if name.strip()]
        if source is not None:
            names = [whole if _is_module(whole := f"{source}.{name}") else source for name in names]
        yield from (name for name in names if name.startswith(f"{_PACKAGE}."))


@cache
def _is_module(name: str) -> bool:
    """Whether a dotted name of this package is a module, not something in one."""
    if not name.startswith(f"{_PACKAGE}."):
        return False
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
