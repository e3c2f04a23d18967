"""Searching a snapshot: the index of its lake is brought up to it first, once for all who wait."""

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from lake.errors import SearchIndexError
from lake.read.joined_snapshot import JoinedSnapshot
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.search import place
from lake.search.index import Index, Report
from lake.search.said import said
from lake.search.words import Term, terms

_WAIT_S = 0.2
_building: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


def holding(snapshot: Snapshot, text: str, report: Report = lambda _done, _of: None) -> pl.DataFrame:
    """The episodes in which a step, messages of their own, or what was said of them hold a text, whatever the case.

    Words and parts of words are looked for in any order, a text in quotes as it stands: in states, actions, reasoning,
    tool calls, messages, reasons of scores and annotations (`lake.search.said`).

    Args:
        report: told again and again how far the work is; what it raises ends it, and what was indexed by then stays.

    Returns:
        As `Index.find`, without retracted episodes.

    Raises:
        UsageError: the text has no letter and no digit.
        LakeAccessError: a file of the lake is gone or damaged.
        SearchIndexError: there is no room for the index, or no permission to write it.
    """
    wanted = terms(text)
    found = _in_rollouts(snapshot, wanted, report)
    beside = (
        said(snapshot, wanted).group_by("episode_id").agg(pl.col("step_index").min(), steps=pl.len().cast(pl.Int64))
    )
    if beside.is_empty():
        return found
    # A step that holds it is the better place to begin to read.
    both = pl.concat([found, beside.select(found.columns)]).group_by("episode_id", maintain_order=True)
    return both.agg(pl.col("step_index").drop_nulls().first(), pl.col("steps").sum()).sort("episode_id")


def _in_rollouts(snapshot: Snapshot, wanted: Sequence[Term], report: Report) -> pl.DataFrame:
    """What the index finds."""
    if isinstance(snapshot, JoinedSnapshot):
        found = pl.concat([_in_rollouts(member, wanted, report) for member in snapshot.members])
        shown = snapshot.scan("episodes").select("episode_id")
        return found.unique("episode_id", keep="first", maintain_order=True).join(
            collected(shown), on="episode_id", how="semi", maintain_order="left"
        )
    path = place.path(snapshot.root)
    try:
        found = _found(path, snapshot, wanted, report)
    except sqlite3.OperationalError as error:
        msg = (
            f"the search index {path} cannot be used: {error}. Make room for it, or name another folder in "
            f"{place.ENVIRONMENT}"
        )
        raise SearchIndexError(msg) from error
    except sqlite3.DatabaseError:
        # Damaged, and nothing but a cache.
        place.delete(snapshot.root)
        found = _found(path, snapshot, wanted, report)
    return found.filter(~pl.col("episode_id").is_in(snapshot.retracted.implode()))


def _found(path: Path, snapshot: Snapshot, wanted: Sequence[Term], report: Report) -> pl.DataFrame:
    """What is found once nothing is missing: another process may take apart what was put together here."""
    index = Index(path)
    while True:
        with _alone(_building[path], report):
            index.update(snapshot, report)
        found = index.find(snapshot, wanted, report)
        if found is not None:
            return found


@contextmanager
def _alone(lock: threading.Lock, report: Report) -> Iterator[None]:
    """One thread at a time; those that wait can be ended by what they report."""
    while not lock.acquire(timeout=_WAIT_S):
        report(0, 0)
    try:
        yield
    finally:
        lock.release()
