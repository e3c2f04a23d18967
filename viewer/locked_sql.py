"""SQL that a reader types, or that an address brings: run in locked processes, few at a time, the last answers kept.

A link can hold any query, and whoever follows it runs it. So nothing here rests on who wrote it: a query reads this one
snapshot and nothing else, writes nothing, and ends after `lake.locked.query.SECONDS` (`lake.locked`).
"""

import threading

import polars as pl

from lake.locked.query import LockedReader
from lake.read.snapshot import Snapshot
from viewer.remembered import Remembered

MOST_ROWS = 10_000
"""Rows of an answer; a query with more is refused, and told to add LIMIT."""
_MOST_BYTES = 64 << 20
_MOST_KEPT = 8
# Of all sessions: a page full of links must not take all processors and all memory.
_running = threading.BoundedSemaphore(2)


class Answers:
    """What a snapshot answers to SELECTs of strangers."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._kept: Remembered[pl.DataFrame] = Remembered(_MOST_KEPT)

    def rows(self, query: str) -> pl.DataFrame:
        """Rows of one SELECT, at most `MOST_ROWS`.

        Raises:
            QueryError: it is none, has no result, or takes more than a locked query may.
            UsageError: this machine cannot lock a process in, or the lake is not in a local folder.
        """
        known = self._kept.get(query)
        if known is None:
            with _running:
                known = LockedReader(self._snapshot, max_rows=MOST_ROWS, max_bytes=_MOST_BYTES).sql(query)
            self._kept.put(query, known)
        return known
