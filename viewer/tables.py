"""Tables: a page of a list, whose rows are links and whose headings order the whole list.

A table is plain HTML. A row opens with a click anywhere, in another tab with ctrl or the middle button, and with Enter
when it has the focus (`viewer.navigation`). Order and page are in the address; the server applies them to the whole
list. Every cell is foreign text: one line, escaped, with visible control characters. An unknown value is a dash. Ids
of episodes, groups and jobs are links, also in a row that opens something else.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import partial
from html import escape
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.cli.options import format_ids
from viewer.components import warn_of_missing
from viewer.navigation import Page, change_address, get_parameter
from viewer.navigation import href as build_href
from viewer.plain import chip, format_aligned, grade, name_rollout, number, one_line, seconds, signed
from viewer.queries import Row, Sort

CELL = 400
"""Maximum number of characters of a cell."""
OPENED = "opened"
"""Query parameter of a list's address: the row that was opened last."""
_ID_PAGES = {"episode_id": Page.EPISODE, "group_id": Page.GROUP, "job_id": Page.JOB}
_UNKNOWN = '<span class="unknown" title="not known">\N{EN DASH}</span>'


class Kind(StrEnum):
    """How the values of a column are written."""

    TEXT = "text"
    WIDE = "wide"
    """Text that takes the remaining width."""
    EXCERPT = "excerpt"
    """Text of which two lines are shown, and the rest where the pointer is."""
    NUMBER = "number"
    OUTCOME = "outcome"
    """Number in a colour: from 1, between, up to 0."""
    DURATION = "duration"
    """Seconds, as minutes and hours."""
    SIGNED = "signed"
    SHARE = "share"
    """Number from 0 to 1, with a bar."""
    TIME = "time"
    MARK = "mark"
    """True or false."""
    ID = "id"


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table."""

    label: str
    explanation: str | None = None
    kind: Kind = Kind.TEXT
    digits: int = 3
    """Maximum number of decimals."""
    hits: re.Pattern[str] | None = None
    """Pattern of the parts of its texts that are marked."""
    under: str | None = None
    """The column below which it is drawn in small type, if the table has that; a number then has its label."""
    is_even: bool = False
    """Write a value that its digits would hide as less than the smallest number, not with an exponent."""


text = partial(TableColumn, kind=Kind.TEXT)
"""Column of names and words."""
wide = partial(TableColumn, kind=Kind.WIDE)
"""Column of texts of several words."""
excerpt = partial(TableColumn, kind=Kind.EXCERPT)
"""Column of the beginnings of texts."""
outcome = partial(TableColumn, kind=Kind.OUTCOME, explanation="A dash means not scored, which is not 0.")
"""Column of outcomes."""
duration = partial(TableColumn, kind=Kind.DURATION)
"""Column of seconds."""
value = partial(TableColumn, kind=Kind.NUMBER)
"""Column of numbers and counts."""
advantage = partial(TableColumn, kind=Kind.SIGNED, explanation="A dash means unknown, which is not 0.")
"""Column of signed values."""
share = partial(TableColumn, kind=Kind.SHARE, digits=2)
"""Column of shares from 0 to 1."""
time = partial(TableColumn, kind=Kind.TIME)
"""Column of times in UTC."""
mark = partial(TableColumn, kind=Kind.MARK)
"""Column that marks the rows where it is true."""
ident = partial(TableColumn, kind=Kind.ID)
"""Column of ids with all 13 characters, to be read and copied."""


def read_order(parameter: str = "sort") -> Sort | None:
    """Return the order that the address names."""
    return Sort.parse(get_parameter(parameter))


def select_filled(
    frame: pl.DataFrame, columns: Mapping[str, TableColumn], order: Sort | None = None
) -> dict[str, TableColumn]:
    """Return the columns that have a value in some row, or a mark on some row.

    The column that orders the list stays, because its heading ends the order.
    """

    def says(name: str, column: TableColumn) -> bool:
        if order is not None and order.column == name:
            return True
        return bool(frame[name].any() if column.kind is Kind.MARK else frame[name].count())

    return {name: column for name, column in columns.items() if says(name, column)}


def draw_table(
    frame: pl.DataFrame,
    columns: Mapping[str, TableColumn],
    *,
    label: str,
    href: Callable[[Row], str] | None = None,
    key: str | None = None,
    selected: str | None = None,
    sortable: Collection[str] = (),
    parameter: str = "sort",
    page: str = "page",
) -> None:
    """Draw a page of a list.

    Args:
        frame: the rows, with ids as numbers.
        columns: the columns to show, in order.
        label: name of the list, for screen readers.
        href: function from a row, with ids as text, to the address that it opens; empty: it opens none.
        key: the column that names a row. The row that was opened last is marked when the list is shown again.
        selected: name of the row that the page shows in detail; it is marked.
        sortable: columns that can order the whole list.
        parameter: query parameter of the order.
        page: query parameter of the page; another order begins at the first page.
    """
    if sortable and (order := read_order(parameter)) is not None and order.column not in sortable:
        warn_of_missing(
            f"{chip(f'{parameter}={order}')} of the address was left out: nothing is ordered by {chip(order.column)}."
        )
    rows = format_ids(frame)
    if "rollout_index" in rows.columns:
        rollouts = [name_rollout(index) for index in rows["rollout_index"]]
        rows = rows.with_columns(pl.Series("rollout_index", rollouts, pl.String))
    columns = {name: _fit_digits(column, frame[name]) for name, column in columns.items()}
    marked = selected if selected is not None else get_parameter(OPENED)
    by_lead: dict[str, list[tuple[str, TableColumn]]] = {}
    for name, column in columns.items():
        by_lead.setdefault(column.under if column.under in columns else name, []).append((name, column))
    stacks = list(by_lead.values())
    headings = "".join(_heading(stack, sortable, parameter, page) for stack in stacks)
    body = "".join(_row(row, stacks, href, key, marked) for row in rows.iter_rows(named=True))
    st.html(
        f'<div class="trajlake-table" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _fit_digits(column: TableColumn, values: pl.Series) -> TableColumn:
    """Return the column with digits that let its values be compared.

    Without a fraction in any value it has no decimals, so that points stand in a line. If some value fits its digits,
    smaller ones have no exponents.
    """
    if column.kind not in (Kind.NUMBER, Kind.OUTCOME, Kind.SIGNED) or not values.dtype.is_float():
        return column
    if column.kind is not Kind.SIGNED and (values.drop_nulls() % 1 == 0).all():
        return replace(column, digits=0)
    return replace(column, is_even=bool((values.abs() >= 10**-column.digits).any()))


def _heading(stack: list[tuple[str, TableColumn]], sortable: Collection[str], parameter: str, page: str) -> str:
    """Return a heading; clicks order by it: largest numbers first, then the reverse, then the usual order."""
    order, parts = "", []
    for name, column in stack:
        inner = escape(column.label)
        if name in sortable:
            now = read_order(parameter)
            falls_first = column.kind not in (Kind.TEXT, Kind.WIDE, Kind.EXCERPT)
            turns = [Sort(name, falls_first), Sort(name, not falls_first), None]
            position = turns.index(now) if now in turns else 2
            if (following := turns[position]) is not None:
                order = f' aria-sort="{"descending" if following.descending else "ascending"}"'
                arrow = "\N{DOWNWARDS ARROW}" if following.descending else "\N{UPWARDS ARROW}"
                inner += f' <span aria-hidden="true">{arrow}</span>'
            target = turns[(position + 1) % 3]
            address = change_address(**{parameter: None if target is None else str(target), page: None})
            inner = f'<a href="{escape(address)}">{inner}</a>'
        explained = f' title="{escape(column.explanation)}"' if column.explanation else ""
        parts.append((f' data-column="{escape(name)}"{explained}', inner))
    (attributes, lead), *under = parts
    small = " \N{MIDDLE DOT} ".join(f"<span{attributes_}>{inner}</span>" for attributes_, inner in under)
    below = f"<small>{small}</small>" if under else ""
    return f'<th scope="col" class="{stack[0][1].kind}"{attributes}{order}>{lead}{below}</th>'


def _row(
    row: Row,
    stacks: list[list[tuple[str, TableColumn]]],
    href: Callable[[Row], str] | None,
    key: str | None,
    marked: str | None,
) -> str:
    name = None if key is None else str(row[key])
    is_marked = name is not None and name == marked
    address = href(row) if href is not None else ""
    opened = f' data-opened="{escape(name)}"' if name is not None else ""
    cells = []
    for position, stack in enumerate(stacks):
        parts = []
        for depth, (field, column) in enumerate(stack):
            inner, target = _cell(row[field], column), ""
            if position == depth == 0:
                target = address
            elif column.kind is Kind.ID and row[field] is not None and (id_page := _ID_PAGES.get(field)):
                target = build_href(id_page, **{str(id_page): row[field]})
                # The address of the row keeps the list, so that previous and next stay in it.
                target = address if address.startswith(f"/{id_page}?{id_page}={row[field]}") else target
            if target:
                inner = f'<a href="{escape(target)}"{opened if target == address else ""}>{inner}</a>'
            if depth and row[field] is None:
                inner = f"<span data-cell hidden>{inner}</span>"
            elif depth:
                label = f"{escape(column.label.lower())} " if column.kind is Kind.NUMBER else ""
                inner = f"<span>{label}<span data-cell>{inner}</span></span>"
            parts.append(inner)
        lead, *under = parts
        below = f"<small>{''.join(under)}</small>" if under else ""
        cells.append(f'<td class="{stack[0][1].kind}">{lead}{below}</td>')
    attributes = ' class="opened" aria-current="true"' if is_marked else ""
    return f"<tr{attributes}>{''.join(cells)}</tr>"


def _cell(value: Any, column: TableColumn) -> str:
    """Return a value as HTML."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return _UNKNOWN
    text = _write(value, column)
    html = escape(text) or '<span class="unknown">(empty)</span>'
    if column.kind is Kind.SHARE:
        width = 100 * min(max(float(value), 0.0), 1.0)
        html = f'<span class="bar"><span style="width:{width:.1f}%"></span></span>{text}'
    elif column.kind is Kind.MARK:
        html = f'<span title="yes">{text}</span>' if value else ""
    elif column.kind is Kind.OUTCOME:
        html = f'<span class="{grade(value)}">{html}</span>'
    elif column.kind is Kind.TIME:
        html = " ".join(f"<span>{part}</span>" for part in html.split())
    elif column.kind is Kind.EXCERPT:
        html = f'<span class="lines" title="{escape(text)}">{html}</span>'
    elif column.hits is not None and text:
        pieces, at = [], 0
        for match in column.hits.finditer(text):
            pieces += [escape(text[at : match.start()]), f"<mark>{escape(match.group())}</mark>"]
            at = match.end()
        html = "".join([*pieces, escape(text[at:])])
    return html


def _write(value: Any, column: TableColumn) -> str:
    """Return a value as plain text."""
    if column.kind is Kind.SHARE:
        text = f"{float(value):.{column.digits}f}"
    elif column.kind is Kind.MARK:
        text = "\N{CHECK MARK}"
    elif column.kind is Kind.DURATION:
        text = seconds(float(value))
    elif isinstance(value, datetime):
        text = f"{value:%Y-%m-%d %H:%M:%S}"
    elif isinstance(value, float) and column.is_even and 0 < abs(value) < 10**-column.digits:
        sign = "+" if column.kind is Kind.SIGNED else ""
        least = f"{10**-column.digits:.{column.digits}f}"
        text = f">\N{MINUS SIGN}{least}" if value < 0 else f"<{sign}{least}"
    elif isinstance(value, int | float):
        text = signed(value, column.digits) if column.kind is Kind.SIGNED else format_aligned(value, column.digits)
    else:
        text = one_line(str(value), CELL)
    return text


MAX_SCORE_COLUMNS = 6
"""Maximum number of columns of scores."""


def add_score_columns(
    frame: pl.DataFrame, scores: pl.DataFrame, outcome: str | None, *, means: bool = False
) -> tuple[pl.DataFrame, dict[str, TableColumn]]:
    """Add a column for each scorer to a page of a list; return the frame and the columns added.

    Args:
        frame: the page.
        scores: scores of its rows: the column that names a row, scorer, value.
        outcome: the scorer that already has a column in the list.
        means: a row stands for several episodes, and the values are means over these.
    """
    (key,) = set(scores.columns) - {"scorer", "value"}
    names = [name for name in scores["scorer"].unique().sort() if name != outcome]
    if len(names) > MAX_SCORE_COLUMNS:
        st.caption(
            f"Columns of {MAX_SCORE_COLUMNS} of {number(len(names))} scorers; an episode's page has all of its scores."
        )
    columns = {}
    for position, name in enumerate(names[:MAX_SCORE_COLUMNS]):
        column = f"score-{position}"
        values = scores.filter(pl.col("scorer") == name).select(key, pl.col("value").alias(column))
        frame = frame.join(values, on=key, how="left", maintain_order="left")
        explanation = (
            f"The mean of what the scorer {name} says of its episodes." if means else f"What the scorer {name} says."
        )
        columns[column] = value(f"{'Mean ' if means else ''}{one_line(name, 24)}", explanation)
    return frame, columns
