"""Searching a snapshot: the index of its lake is brought up to it first, once for all who wait."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from lake.read.snapshot import Snapshot
from lake.search import place
from lake.search.index import Index, Report
from lake.search.words import terms

_WAIT_S = 0.2
_building: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


def holding(snapshot: Snapshot, text: str, report: Report = lambda _done, _of: None) -> pl.DataFrame:
    """The episodes in which a step, or messages of their own, hold a text, whatever the case.

    Words and parts of words are looked for in any order, a text in quotes as it stands: in states, actions, reasoning,
    tool calls and messages.

    Args:
        report: told again and again how far the work is; what it raises ends it, and what was indexed by then stays.

    Returns:
        As `Index.find`, without retracted episodes.

    Raises:
        UsageError: the text has no letter and no digit.
        LakeAccessError: a file of the lake is gone or damaged.
    """
    wanted = terms(text)
    path = place.path(snapshot.root)
    index = Index(path)
    with _alone(_building[path], report):
        index.update(snapshot, report)
    hidden = snapshot.retracted.implode()
    return index.find(snapshot, wanted, report).filter(~pl.col("episode_id").is_in(hidden))


@contextmanager
def _alone(lock: threading.Lock, report: Report) -> Iterator[None]:
    """One thread at a time; those that wait can be ended by what they report."""
    while not lock.acquire(timeout=_WAIT_S):
        report(0, 0)
    try:
        yield
    finally:
        lock.release()
