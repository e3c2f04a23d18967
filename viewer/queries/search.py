"""Where the hits of a search stand, for the rows of a page: an excerpt around the first one."""

import re

import polars as pl

from lake.errors import UsageError
from lake.search import words
from lake.search.said import said
from viewer.queries import EXCERPT, Params, Reads, Row

_STEP = {
    "action": "action",
    "tool_calls": "tool call",
    "reasoning": "reasoning",
    "state": "state",
    "context": "message",
}
"""Columns of a step in the order in which people want to hear of them, and what they are called."""
_EPISODE = {
    "error": "error",
    "initial_messages": "first messages",
    "final_observation": "last messages",
}
_BEFORE = 60
"""Characters of an excerpt before the hit."""
_DOCUMENTS = frozenset({"tool_calls", "context", "initial_messages", "final_observation"})
_SCHEMA = {"episode_id": pl.Int64, "found_in": pl.String, "excerpt": pl.String}


def hits(text: str) -> re.Pattern[str]:
    """What of an excerpt is marked. Raises UsageError: the text has no letter and no digit."""
    return re.compile("|".join(re.escape(term.text) for term in words.terms(text)), re.IGNORECASE)


def longest(text: str) -> str:
    """The longest of the terms of a search, for what marks one text; empty if there is none in it."""
    try:
        return max((term.text for term in words.terms(text)), key=len)
    except UsageError:
        return ""


def excerpts(lake: Reads, text: str, page: pl.DataFrame) -> pl.DataFrame:
    """episode_id, found_in (what holds the text), excerpt, of the rows of a page that was searched for."""
    pattern = hits(text)
    rows = [*_rows(lake, page, "steps", _STEP), *_rows(lake, page, "episodes", _EPISODE)]
    found = {row["episode_id"]: _excerpt(row, pattern) for row in rows}
    beside = said(lake, words.terms(text), page["episode_id"].to_list())
    without_step = set(page.filter(pl.col("found_step").is_null())["episode_id"])
    for row in beside.iter_rows(named=True):
        episode = row["episode_id"]
        if episode in without_step or found.get(episode) is None:
            found[episode] = f"said by {row['by']}", _around(row["text"], pattern)
    shown = [(episode, *(told or (None, None))) for episode, told in found.items()]
    return pl.DataFrame(shown, schema=_SCHEMA, orient="row")


def _rows(lake: Reads, page: pl.DataFrame, table: str, columns: dict[str, str]) -> list[Row]:
    """The texts that were found: of steps, or of whole episodes."""
    is_step = table == "steps"
    wanted = page.filter(pl.col("found_step").is_not_null() if is_step else pl.col("found_step").is_null())
    if wanted.is_empty():
        return []
    # Named one by one, no other row is read; of an OR of places all texts around them would be.
    condition = f"episode_id IN ({', '.join(map(str, wanted['episode_id']))})"
    params: Params = {}
    if is_step:
        condition += (
            " AND (episode_id, step_index) IN (SELECT (unnest($episodes::BIGINT[]), unnest($steps::INTEGER[])))"
        )
        params = {"episodes": wanted["episode_id"].to_list(), "steps": wanted["found_step"].to_list()}
    query = f"SELECT episode_id, {', '.join(columns)} FROM {table} WHERE {condition}"
    return lake.sql(query, params or None).to_dicts()


def _excerpt(row: Row, pattern: re.Pattern[str]) -> tuple[str, str | None] | None:
    for name, called in (_STEP | _EPISODE).items():
        text = words.document(row.get(name)) if name in _DOCUMENTS else row.get(name)
        if (told := _around(text, pattern)) is not None:
            return called, told
    return None


def _around(text: str | None, pattern: re.Pattern[str]) -> str | None:
    """The text around its first hit; None without one."""
    flat = " ".join((text or "").split())
    found = pattern.search(flat)
    if found is None:
        return None
    begin = max(found.start() - _BEFORE, 0)
    before = "\N{HORIZONTAL ELLIPSIS}" if begin else ""
    after = "\N{HORIZONTAL ELLIPSIS}" if len(flat) > begin + EXCERPT else ""
    return before + flat[begin : begin + EXCERPT] + after
