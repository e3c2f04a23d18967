"""Every read of the viewer, one module per subject: pure functions (lake, arguments) -> small Polars frame.

Nothing here knows Streamlit. Values are bound parameters, never pasted into SQL; filters, order and paging happen in
SQL with LIMIT, and texts are cut there, so that no screen depends on the size of the lake. Ids are int64; unknown stays
NULL.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from lake.read import snapshot

__all__ = [
    "EXCERPT",
    "PAGE_ROWS",
    "Params",
    "Reads",
    "Row",
    "Sort",
    "Window",
    "count",
    "like",
    "literal",
    "only_row",
    "order_by",
]


class Reads(snapshot.Reads, Protocol):
    """What queries are asked of: `viewer.pinned.Reader`."""

    def holding(self, text: str) -> pl.DataFrame:
        """The episodes that hold a text; see `lake.search.find.holding`."""
        ...

    def members(self, group_id: int) -> list[int]:
        """The episodes of a group as it was collected, those among them that readers do not see any more; sorted."""
        ...

    def locked(self, query: str) -> pl.DataFrame:
        """Rows of one SELECT that nobody vouches for; see `viewer.locked_sql.Answers.rows`."""
        ...


Params = dict[str, Any]
Row = dict[str, Any]

EXCERPT = 240
"""Characters of a text in a table cell."""
PAGE_ROWS = 25
"""Rows of a table page."""


@dataclass(frozen=True, slots=True)
class Window:
    """A page of a list: `limit` rows after the first `offset`."""

    limit: int = PAGE_ROWS
    offset: int = 0

    @classmethod
    def page(cls, number: int, rows: int = PAGE_ROWS) -> "Window":
        """The page with a number from 1."""
        return cls(rows, (number - 1) * rows)

    def params(self) -> Params:
        """Values of $limit and $offset."""
        return {"limit": self.limit, "offset": self.offset}


@dataclass(frozen=True, slots=True)
class Sort:
    """The column that orders a list."""

    column: str
    descending: bool = False

    @classmethod
    def named(cls, text: str | None) -> "Sort | None":
        """What an address calls it: the column's name, after a `-` if the largest come first."""
        name = (text or "").removeprefix("-")
        return cls(name, (text or "").startswith("-")) if name else None

    def __str__(self) -> str:
        return f"-{self.column}" if self.descending else self.column


def order_by(sort: Sort | None, columns: Mapping[str, tuple[str, ...]], usual: str) -> str:
    """What a list is ordered by: a column, what is not known last, then as usual.

    Args:
        columns: SQL of what may order it, by name; further terms decide among equals of the first. Any other name
            changes nothing.
    """
    if sort is None or sort.column not in columns:
        return usual
    direction = "DESC" if sort.descending else "ASC"
    terms = [f"{term} {direction} NULLS LAST" for term in columns[sort.column]]
    return ", ".join([*terms, usual])


def themselves(*names: str) -> dict[str, tuple[str, ...]]:
    """Columns that are ordered by their own values, for `order_by`."""
    return {name: (f'"{name}"',) for name in names}


def replies(where: str) -> str:
    """SQL of what came back from steps: episode_id, step_index (of the step that was answered), is_error, is_empty.

    It is the state of the next step, so the last step of an episode has no row.

    Args:
        where: a condition on the next step.
    """
    return f"""(
        SELECT episode_id, step_index - 1 AS step_index, state_is_error AS is_error,
               is_empty_state(state_hash) AS is_empty
        FROM steps WHERE {where}
    )"""


def only_row(frame: pl.DataFrame) -> Row | None:
    """The first row as a dictionary, or None of an empty frame."""
    return frame.row(0, named=True) if frame.height else None


def count(lake: Reads, query: str, params: Params | None = None) -> int:
    """The value of a query that counts."""
    return int(lake.sql(query, params).item())


def literal(value: Any) -> str:
    """A value as SQL, for queries that leave the viewer: on its own pages values are bound."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def taken(steps: str) -> str:
    """SQL of what a step did: its text and its tool calls, without the ids of calls, which are random."""
    return f"({steps}.action, without_call_ids({steps}.tool_calls))"


def in_spans(frame: pl.DataFrame, most: int = 400) -> pl.DataFrame:
    """Rows along `x` (integers), which becomes the first of its span, with `last`: `most` equal spans at most."""
    if frame.is_empty():
        return frame.with_columns(last=pl.col("x"))
    first, last = frame.select(pl.col("x").min().alias("first"), pl.col("x").max().alias("last")).row(0)
    width = -(-(last - first + 1) // most)
    start = first + (pl.col("x") - first) // width * width
    return frame.with_columns(x=start, last=start + width - 1)


def like(pattern: str) -> str:
    r"""A LIKE pattern (ESCAPE '\') for a text in which `*` stands for anything."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%")
