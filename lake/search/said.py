"""What was said of episodes and steps, which a person reads beside them: reasons of scores, notes of people.

Other than the texts of a rollout it can change, and only what counts now is found; so it is not in the index but read
for each search. Scores without a reason cost next to nothing.
"""

from collections.abc import Sequence

import polars as pl

from lake.judgements.scores import current_rows
from lake.read.snapshot import Reads
from lake.search import words

_SOURCES = {"scores": ("reason", "error"), "annotations": ("text",)}
"""Columns of texts, by table."""


def said(lake: Reads, terms: Sequence[words.Term], among: Sequence[int] | None = None) -> pl.DataFrame:
    """Scores and annotations that count, of which one text holds all terms.

    Args:
        among: ids of the episodes that are asked about; all unless given.

    Returns:
        episode_id (int64), step_index (int32; NULL: of the whole episode), `by` (the scorer, or the label and its
        author), text; an episode may have several rows.
    """
    of_them = "" if among is None else f"episode_id IN ({', '.join(map(str, among)) or 'NULL'}) AND "
    parts = []
    for table, columns in _SOURCES.items():
        for column in columns:
            each = (f"contains(lower({column}), ${number})" for number in range(1, len(terms) + 1))
            held = of_them + " AND ".join(each)
            # The longest word of a term: between its words may be any white space.
            asked = [max(term.words, key=len) for term in terms]
            if not lake.sql(f"SELECT EXISTS (SELECT 1 FROM {table} WHERE {held})", asked).item():
                continue
            counted = current_rows(lake) if table == "scores" else "latest_annotations"
            by = "scorer" if table == "scores" else "label || ' (' || author || ')'"
            query = f'SELECT episode_id, step_index, {by} AS "by", {column} AS text FROM {counted} WHERE {held}'
            found = lake.sql(query, asked)
            parts.append(found.filter(_holds(found["text"], terms)))
    schema = {"episode_id": pl.Int64, "step_index": pl.Int32, "by": pl.String, "text": pl.String}
    return pl.concat([pl.DataFrame(schema=schema), *(part.cast(schema) for part in parts)])  # type: ignore[arg-type]


def _holds(texts: pl.Series, terms: Sequence[words.Term]) -> pl.Series:
    """Which texts hold all terms, as in the index: a single letter stands for itself."""
    flat, within = words.flat(texts), words.in_texts(texts)
    holds = pl.Series([True]).new_from_index(0, len(texts))
    for term in terms:
        is_letter = len(term.text) == 1 and term.text.isascii()
        holds &= within.list.contains(term.text) if is_letter else flat.str.contains(term.text, literal=True)
    return holds
