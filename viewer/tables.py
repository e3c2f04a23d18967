"""Tables: the page of a list, whose rows are links and whose headings order the whole list.

Plain HTML: a row opens with a click anywhere, in a new tab with ctrl or the middle button, and with Enter when it has
the focus (`viewer.navigation`). Order and page are in the address, and the server applies them to the list, not to the
rows that happen to be shown. Every cell is foreign text: one line, escaped, its control characters visible. What is
not known is a dash.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from html import escape
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.cli.options import readable
from viewer.components import missing
from viewer.links import given
from viewer.navigation import changed
from viewer.plain import aligned, chip, one_line, signed
from viewer.queries import Row, Sort

CELL = 400
"""Characters of a cell."""
OPENED = "opened"
"""Parameter of a list's address: the row that was opened from it last."""
_UNKNOWN = '<span class="unknown" title="not known">\N{EN DASH}</span>'


class Kind(StrEnum):
    """How a column's values are written."""

    TEXT = "text"
    WIDE = "wide"
    """Text that takes what room there is."""
    NUMBER = "number"
    SIGNED = "signed"
    SHARE = "share"
    """From 0 to 1, with a bar."""
    TIME = "time"
    MARK = "mark"
    """True or not."""
    ID = "id"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    label: str
    kind: Kind = Kind.TEXT
    explanation: str | None = None
    digits: int = 3
    """After the point, at most."""
    hits: re.Pattern[str] | None = None
    """What is marked in its texts."""
    is_even: bool = False
    """What its digits would hide is written as less than their least, and not with an exponent."""


def text(label: str, explanation: str | None = None) -> Column:
    """Names and words."""
    return Column(label, Kind.TEXT, explanation)


def wide(label: str, explanation: str | None = None, *, hits: re.Pattern[str] | None = None) -> Column:
    """Texts of several words."""
    return Column(label, Kind.WIDE, explanation, hits=hits)


def value(label: str, explanation: str | None = None, *, digits: int = 3) -> Column:
    """Numbers and counts."""
    return Column(label, Kind.NUMBER, explanation, digits)


def advantage(label: str) -> Column:
    """Signed values."""
    return Column(label, Kind.SIGNED, "A dash means unknown, which is not 0.")


def share(label: str, explanation: str | None = None) -> Column:
    """Shares from 0 to 1."""
    return Column(label, Kind.SHARE, explanation, 2)


def time(label: str) -> Column:
    """Times in UTC."""
    return Column(label, Kind.TIME)


def mark(label: str, explanation: str | None = None) -> Column:
    """What is true of some rows."""
    return Column(label, Kind.MARK, explanation)


def ident(label: str) -> Column:
    """Ids, all 13 characters, to be read and copied."""
    return Column(label, Kind.ID)


def ordered_by(parameter: str = "sort") -> Sort | None:
    """The order that the address names."""
    return Sort.named(given(parameter))


def known(frame: pl.DataFrame, columns: Mapping[str, Column], order: Sort | None = None) -> dict[str, Column]:
    """The columns that say something: not those where nothing is known, nor marks that no row bears.

    The one that the list is ordered by stays: its heading ends that.
    """

    def says(name: str, column: Column) -> bool:
        if order is not None and order.column == name:
            return True
        return bool(frame[name].any() if column.kind is Kind.MARK else frame[name].count())

    return {name: column for name, column in columns.items() if says(name, column)}


def table(
    frame: pl.DataFrame,
    columns: Mapping[str, Column],
    *,
    label: str,
    href: Callable[[Row], str] | None = None,
    key: str | None = None,
    chosen: str | None = None,
    sortable: Collection[str] = (),
    parameter: str = "sort",
    page: str = "page",
) -> None:
    """Draw a page of a list.

    Args:
        frame: its rows, with ids as numbers.
        columns: which of its columns, in order.
        label: what the list holds, for readers that speak.
        href: the address that a row opens, of the row with ids as text; empty: it opens nothing. None: no row does.
        key: the column that names a row; the row that was opened last is marked where the list is shown again.
        chosen: name of the row that the page shows more of; it is marked.
        sortable: columns that the whole list can be ordered by.
        parameter: of the address, which holds the order.
        page: of the address, which holds the page; another order begins at the first.
    """
    if sortable and (asked := ordered_by(parameter)) is not None and asked.column not in sortable:
        missing(
            f"{chip(f'{parameter}={asked}')} of the address was left out: nothing is ordered by {chip(asked.column)}."
        )
    shown = readable(frame)
    columns = {name: _as_wide_as_needed(column, frame[name]) for name, column in columns.items()}
    marked = chosen if chosen is not None else given(OPENED)
    headings = "".join(_heading(name, column, sortable, parameter, page) for name, column in columns.items())
    body = "".join(_row(row, columns, href, key, marked) for row in shown.iter_rows(named=True))
    st.html(
        f'<div class="trajlake-table" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _as_wide_as_needed(column: Column, values: pl.Series) -> Column:
    """The column as its values are best compared.

    It has no digits after the point if none of its values has any, so that points stand in a line, and no exponents
    among numbers that need none.
    """
    if column.kind not in (Kind.NUMBER, Kind.SIGNED) or not values.dtype.is_float():
        return column
    if column.kind is Kind.NUMBER and (values.drop_nulls() % 1 == 0).all():
        return replace(column, digits=0)
    return replace(column, is_even=bool((values.abs() >= 10**-column.digits).any()))


def _heading(name: str, column: Column, sortable: Collection[str], parameter: str, page: str) -> str:
    """A column's label; a click orders by it: numbers first from the largest, then the other way, then as usual."""
    explained = f' title="{escape(column.explanation)}"' if column.explanation else ""
    inner, order = escape(column.label), ""
    if name in sortable:
        now = ordered_by(parameter)
        falls_first = column.kind not in (Kind.TEXT, Kind.WIDE)
        turns = [Sort(name, falls_first), Sort(name, not falls_first), None]
        position = turns.index(now) if now in turns else 2
        if (following := turns[position]) is not None:
            order = f' aria-sort="{"descending" if following.descending else "ascending"}"'
            arrow = "\N{DOWNWARDS ARROW}" if following.descending else "\N{UPWARDS ARROW}"
            inner += f' <span aria-hidden="true">{arrow}</span>'
        target = turns[(position + 1) % 3]
        address = changed(**{parameter: None if target is None else str(target), page: None})
        inner = f'<a href="{escape(address)}">{inner}</a>'
    return f'<th scope="col" class="{column.kind}" data-column="{escape(name)}"{order}{explained}>{inner}</th>'


def _row(
    row: Row,
    columns: Mapping[str, Column],
    href: Callable[[Row], str] | None,
    key: str | None,
    marked: str | None,
) -> str:
    name = None if key is None else str(row[key])
    is_marked = name is not None and name == marked
    cells = []
    for position, (field, column) in enumerate(columns.items()):
        inner = _cell(row[field], column)
        if position == 0 and href is not None and (address := href(row)):
            opened = f' data-opened="{escape(name)}"' if name is not None else ""
            inner = f'<a href="{escape(address)}"{opened}>{inner}</a>'
        cells.append(f'<td class="{column.kind}">{inner}</td>')
    attributes = ' class="opened" aria-current="true"' if is_marked else ""
    return f"<tr{attributes}>{''.join(cells)}</tr>"


def _cell(found: Any, column: Column) -> str:
    """A value as HTML."""
    if found is None or (isinstance(found, float) and math.isnan(found)):
        return _UNKNOWN
    if column.kind is Kind.SHARE:
        width = 100 * min(max(float(found), 0.0), 1.0)
        return f'<span class="bar"><span style="width:{width:.1f}%"></span></span>{float(found):.{column.digits}f}'
    if column.kind is Kind.MARK:
        return '<span title="yes">\N{CHECK MARK}</span>' if found else ""
    if isinstance(found, datetime):
        shown = f"{found:%Y-%m-%d %H:%M:%S}"
    elif isinstance(found, float) and column.is_even and 0 < abs(found) < 10**-column.digits:
        sign = "+" if column.kind is Kind.SIGNED else ""
        least = f"{10**-column.digits:.{column.digits}f}"
        shown = f">\N{MINUS SIGN}{least}" if found < 0 else f"<{sign}{least}"
    elif isinstance(found, int | float):
        shown = signed(found, column.digits) if column.kind is Kind.SIGNED else aligned(found, column.digits)
    else:
        shown = one_line(str(found), CELL)
    if column.hits is not None:
        return _marked(shown, column.hits)
    return escape(shown) or '<span class="unknown">(empty)</span>'


def _marked(shown: str, hits: re.Pattern[str]) -> str:
    """A text as HTML with its hits marked."""
    parts, at = [], 0
    for found in hits.finditer(shown):
        parts += [escape(shown[at : found.start()]), f"<mark>{escape(found.group())}</mark>"]
        at = found.end()
    return "".join([*parts, escape(shown[at:])])
