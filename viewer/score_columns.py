"""Columns of what scorers say, beside the rows of a list."""

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from viewer import tables
from viewer.plain import number, one_line

SCORERS = 6
"""Columns at most."""


def beside(
    frame: pl.DataFrame, scores: pl.DataFrame, outcome: str | None, *, means: bool = False
) -> tuple[pl.DataFrame, dict[str, tables.Column]]:
    """A page of a list with a column for each scorer, and these columns.

    Args:
        frame: the page.
        scores: what scorers say of its rows: the column that names a row, scorer, value.
        outcome: the scorer that has a column of the list's own.
        means: a row is of several episodes, and the values are means over these.
    """
    (key,) = set(scores.columns) - {"scorer", "value"}
    names = [name for name in scores["scorer"].unique().sort() if name != outcome]
    if len(names) > SCORERS:
        st.caption(f"Columns of {SCORERS} of {number(len(names))} scorers; an episode's page has all of its scores.")
    columns = {}
    for position, name in enumerate(names[:SCORERS]):
        column = f"score-{position}"
        values = scores.filter(pl.col("scorer") == name).select(key, pl.col("value").alias(column))
        frame = frame.join(values, on=key, how="left", maintain_order="left")
        said = f"The mean of what the scorer {name} says of its episodes." if means else f"What the scorer {name} says."
        columns[column] = tables.value(f"{'Mean ' if means else ''}{one_line(name, 24)}", said)
    return frame, columns
