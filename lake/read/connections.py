"""Connections of closed sessions, kept for the next ones over the same folder: a new one costs more than a query."""

import atexit
import os
import threading
from dataclasses import dataclass
from typing import Any

import duckdb

_MOST_IDLE = 2

Bound = tuple[list[str] | None, str, tuple[int, ...], frozenset[str] | None]
"""A table's view: its files (None: rows in memory), the condition on rows, the places of which episodes are hidden, and
the columns that it can read (None: all)."""


@dataclass(slots=True)
class Idle:
    """A connection that nobody uses, and what is defined in it."""

    connection: duckdb.DuckDBPyConnection
    bound: dict[str, Bound]
    """The tables' views."""
    defined: set[str]
    """The shipped views that are there."""
    bytes: int
    """Of files that were ever bound."""


_idle: dict[tuple[Any, ...], Idle] = {}
_lock = threading.Lock()


def take(key: tuple[Any, ...]) -> Idle | None:
    """The connection that was kept for a key; whoever takes it has it alone."""
    with _lock:
        return _idle.pop(key, None)


def keep(key: tuple[Any, ...], idle: Idle) -> None:
    """Put a connection aside, and close what there are too many of. The first part of the key is the process's id."""
    with _lock:
        surplus = [_idle.pop(key)] if key in _idle else []
        _idle[key] = idle
        while len(_idle) > _MOST_IDLE:
            surplus.append(_idle.pop(next(iter(_idle))))
    for left in surplus:
        left.connection.close()


@atexit.register
def _close() -> None:
    while _idle:
        key, idle = _idle.popitem()
        if key[0] == os.getpid():
            idle.connection.close()
