"""What a worker process keeps from one part to the next: a model, a sandbox, an open snapshot.

Parts of one job come to a process one after another, and what they need is expensive to make. One thing of each kind
is kept; another one takes its place, and it is closed if it can be. Only for processes of an executor: they run one
part at a time, and what they hold ends with them.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Thing = TypeVar("Thing")
_held: dict[str, tuple[Hashable, Any]] = {}


def held(kind: str, key: Hashable, make: Callable[[], Thing]) -> Thing:
    """The thing of a kind that this process holds under a key; made where it holds another or none."""
    known, thing = _held.pop(kind, (None, None))
    if known != key:
        if thing is not None and hasattr(thing, "close"):
            thing.close()
        thing = make()
    _held[kind] = key, thing
    found: Thing = thing
    return found
