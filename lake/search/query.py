"""Searching a snapshot: its index is updated first, by one thread for all that wait.

The index holds only texts of rollouts. Reasons of scores and notes of people can change, and only current ones count,
so each search reads them from the tables. Scores without a reason cost next to nothing.
"""

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from lake.errors import SearchIndexError
from lake.judgements.scores import current_scores_sql
from lake.read.joined_snapshot import JoinedSnapshot
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot, SnapshotReader
from lake.search import index
from lake.search.index import Index, Report, Term, parse_terms
from lake.storage.local_cache import CACHE_VARIABLE

_WAIT_S = 0.2
_locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
_SOURCES = {"scores": ("reason", "error"), "annotations": ("text",)}
"""Columns of texts by table."""


def search_episodes(snapshot: Snapshot, text: str, report: Report = lambda _done, _of: None) -> pl.DataFrame:
    """Find the episodes in which a step, messages outside steps, or a judgement contains a text, in any case.

    Words and parts of words match in any order, a text in quotes matches literally. The search covers states, actions,
    reasoning, tool calls, messages, reasons of scores and annotations (`search_reasons`).

    Args:
        report: called repeatedly with the progress; an error that it raises ends the search, and the index keeps the
            segments added so far.

    Returns:
        As `Index.find`, without retracted episodes.

    Raises:
        UsageError: the text has no letter and no digit.
        LakeAccessError: a file of the lake is missing or damaged.
        SearchIndexError: no space or no permission for the index.
    """
    terms = parse_terms(text)
    in_rollouts = _search_rollouts(snapshot, terms, report)
    reasons = search_reasons(snapshot, terms).group_by("episode_id")
    judged = reasons.agg(pl.col("step_index").min(), steps=pl.len().cast(pl.Int64))
    if judged.is_empty():
        return in_rollouts
    # A step with the text is the better start for a reader.
    matches = pl.concat([in_rollouts, judged.select(in_rollouts.columns)]).group_by("episode_id", maintain_order=True)
    return matches.agg(pl.col("step_index").drop_nulls().first(), pl.col("steps").sum()).sort("episode_id")


def search_reasons(lake: SnapshotReader, terms: Sequence[Term], among: Sequence[int] | None = None) -> pl.DataFrame:
    """Find current scores and annotations with a text that contains all terms.

    Args:
        among: ids of the episodes to search; None searches all.

    Returns:
        episode_id (int64), step_index (int32; NULL for the whole episode), `by` (the scorer, or the label and its
        author), text; an episode may have several rows.
    """
    condition = "" if among is None else f"episode_id IN ({', '.join(map(str, among)) or 'NULL'}) AND "
    # SQL looks for the longest word of each term only, since any white space may separate words.
    words = [max(term.words, key=len) for term in terms]
    schema = {"episode_id": pl.Int64, "step_index": pl.Int32, "by": pl.String, "text": pl.String}
    frames = [pl.DataFrame(schema=schema)]
    for table, columns in _SOURCES.items():
        for column in columns:
            contains = (f"contains(lower({column}), ${number})" for number in range(1, len(terms) + 1))
            where = condition + " AND ".join(contains)
            if not lake.sql(f"SELECT EXISTS (SELECT 1 FROM {table} WHERE {where})", words).item():
                continue
            current = current_scores_sql(lake) if table == "scores" else "latest_annotations"
            by = "scorer" if table == "scores" else "label || ' (' || author || ')'"
            query = f'SELECT episode_id, step_index, {by} AS "by", {column} AS text FROM {current} WHERE {where}'
            rows = lake.sql(query, words)
            texts, words_of_texts = index.normalise(rows["text"]), index.split_words(rows["text"])
            holds = pl.Series([True]).new_from_index(0, len(rows))
            for term in terms:
                # A single letter matches only itself, as in the index.
                is_letter = len(term.text) == 1 and term.text.isascii()
                by_word, by_text = words_of_texts.list.contains(term.text), texts.str.contains(term.text, literal=True)
                holds &= by_word if is_letter else by_text
            frames.append(rows.filter(holds).cast(schema))  # type: ignore[arg-type]
    return pl.concat(frames)


def _search_rollouts(snapshot: Snapshot, terms: Sequence[Term], report: Report) -> pl.DataFrame:
    """Return the matches in the index, without retracted episodes."""
    if isinstance(snapshot, JoinedSnapshot):
        matches = pl.concat([_search_rollouts(member, terms, report) for member in snapshot.members])
        visible = collect_rows(snapshot.scan("episodes").select("episode_id"))
        matches = matches.unique("episode_id", keep="first", maintain_order=True)
        return matches.join(visible, on="episode_id", how="semi", maintain_order="left")
    path = index.index_path(snapshot.root)
    try:
        matches = _search_index(path, snapshot, terms, report)
    except sqlite3.OperationalError as error:
        msg = (
            f"the search index {path} cannot be used: {error}. Make room for it, or name another folder in "
            f"{CACHE_VARIABLE}"
        )
        raise SearchIndexError(msg) from error
    except sqlite3.DatabaseError:
        # A damaged index is rebuilt, since it is only a cache.
        index.delete_index(snapshot.root)
        matches = _search_index(path, snapshot, terms, report)
    return matches.filter(~pl.col("episode_id").is_in(snapshot.retracted.implode()))


def _search_index(path: Path, snapshot: Snapshot, terms: Sequence[Term], report: Report) -> pl.DataFrame:
    """Update and search the index until nothing is missing; another process may drop segments in between."""
    words = Index(path)
    while True:
        with _lock_index(_locks[path], report):
            words.update(snapshot, report)
        matches = words.find(snapshot, terms, report)
        if matches is not None:
            return matches


@contextmanager
def _lock_index(lock: threading.Lock, report: Report) -> Iterator[None]:
    """Hold the lock; while a thread waits for it, `report` can end the wait with an error."""
    while not lock.acquire(timeout=_WAIT_S):
        report(0, 0)
    try:
        yield
    finally:
        lock.release()
