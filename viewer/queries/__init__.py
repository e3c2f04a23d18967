"""Every read of the viewer, one module per subject: pure functions (lake, arguments) -> small Polars frame.

Nothing here knows Streamlit. Values are bound parameters, never pasted into SQL; filters, order and paging happen in
SQL with LIMIT, and texts are cut there, so that no screen depends on the size of the lake. Ids are int64; unknown stays
NULL.
"""

from dataclasses import dataclass
from typing import Any

import polars as pl

from lake.read.snapshot import Reads

__all__ = ["EXCERPT", "PAGE_ROWS", "Params", "Reads", "Row", "Window", "count", "like", "only_row"]

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


def only_row(frame: pl.DataFrame) -> Row | None:
    """The first row as a dictionary, or None of an empty frame."""
    return frame.row(0, named=True) if frame.height else None


def count(lake: Reads, query: str, params: Params | None = None) -> int:
    """The value of a query that counts."""
    return int(lake.sql(query, params).item())


def like(pattern: str) -> str:
    r"""A LIKE pattern (ESCAPE '\') for a text in which `*` stands for anything."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%")
