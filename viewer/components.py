"""What every page is made of: header, figures, badges, tables that open something, and friendly empty states."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.cli.options import readable
from lake.errors import TrajlakeError
from viewer import pinned
from viewer.links import Page, given, given_id, given_int, parameters
from viewer.plain import chip, one_line, slug, visible
from viewer.queries import PAGE_ROWS, Window
from viewer.theme import STATUS_COLOURS, STYLE

Config = Mapping[str, Any]
CELL = 400
"""Characters of a table cell."""
OPEN = "open"
"""Column of the buttons that open a row."""
OPEN_WIDTH = 42
"""Its width in pixels."""
ID_WIDTH, NAME_WIDTH = 130, 170
"""Widths of columns of ids and of names in pixels."""


@contextmanager
def friendly() -> Iterator[None]:
    """Show a fault that the reader can do something about as a sentence instead of a traceback."""
    try:
        yield
    except TrajlakeError as error:
        st.error("The lake could not be read.", icon=":material/error:")
        st.code(visible(str(error)), language=None, wrap_lines=True)
        st.button("Try again with the newest data", icon=":material/refresh:", on_click=pinned.refresh)


def header(title: str) -> None:
    """The page's title (foreign text in it goes through `chip`), the age of the data, and the button that renews it."""
    st.html(STYLE)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.header(title, anchor=False, width="stretch")
        st.caption(f"Data of {pinned.pinned_at():%H:%M:%S} UTC", width="content")
        st.button(
            "Refresh",
            icon=":material/refresh:",
            key="refresh",
            help="Read the newest state of the lake.",
            on_click=pinned.refresh,
        )


def empty(sentence: str, advice: str) -> None:
    """Nothing to show: why, and what to do next (a command line of our own)."""
    st.info(sentence, icon=":material/inbox:")
    st.code(advice, language=None)


def wanted_id(name: str, back: Page, back_label: str) -> int:
    """An id that the page needs from its address; ends the page with a friendly message if it is not there."""
    try:
        value = given_id(name)
    except ValueError:
        not_found(f"{chip(given(name))} is not an id: ids have 13 characters of base32.", back, back_label)
    if value is None:
        not_found(f"The address names no {name} (`?{name}=...`).", back, back_label)
    return value


def link(page: Page, label: str, icon: str, **values: str | int | None) -> None:
    """A link to a page, with the query parameters that are set."""
    st.page_link(page, label=label, icon=f":material/{icon}:", query_params=parameters(**values))


def go(page: Page, **values: str | int | None) -> None:
    """Switch to a page, with the query parameters that are set."""
    st.switch_page(page, query_params=parameters(**values))


def fact(label: str, value: Any) -> None:
    """A fact in a line of them; foreign text in the value goes through `chip`."""
    st.markdown(f":gray[{label}] {value}", width="content")


def missing(sentence: str) -> None:
    """Say that what the address names is not there."""
    st.warning(sentence, icon=":material/search_off:")


def not_found(sentence: str, back: Page, back_label: str) -> NoReturn:
    """Say that what the address names is not there, offer the way back, and end the page."""
    missing(sentence)
    link(back, back_label, "arrow_back")
    st.stop()


def tiles(*figures: tuple[str, str] | tuple[str, str, str]) -> None:
    """A row of figures: label, value, and perhaps an explanation."""
    with st.container(horizontal=True, gap="small"):
        for label, value, *explanation in figures:
            st.metric(label, value, help="".join(explanation) or None, border=True, width="content")


def badge(label: str, colour: str = "gray", *, icon: str | None = None, explanation: str | None = None) -> None:
    """A badge; foreign text in the label goes through `slug`."""
    st.badge(label, color=colour, icon=icon, help=explanation)  # type: ignore[arg-type]


def status_badge(status: str) -> None:
    """The badge of an episode's or a job's state."""
    badge(slug(status), STATUS_COLOURS.get(status, "red"))


def table(frame: pl.DataFrame, key: str, columns: Config, *, opens: str | None = None) -> int | None:
    """A table of a page's rows; NULL is a dash. Returns the position of the row whose button was just clicked.

    Args:
        key: of the buttons. What is shown is part of it, so that no click survives from other rows.
        columns: column name -> configuration of `st.column_config`, or a label.
        opens: what a button in front of each row does ("Open the episode"); without it there is none.
    """
    shown = readable(frame.select(list(columns)))
    # Cells are one line. In Python from end to end: a function that Polars calls back may wait for ever (`readable`).
    shown = shown.with_columns(
        pl.Series(name, [v if v is None else one_line(v, CELL) for v in shown[name].to_list()], dtype=pl.String)
        for name, dtype in shown.schema.items()
        if dtype == pl.String
    )
    config = dict(columns)
    click = f"{key}-{hashlib.blake2b(str(shown.rows()).encode(), digest_size=8).hexdigest()}"
    if opens is not None:
        shown = shown.select(pl.lit(":material/arrow_forward:").alias(OPEN), pl.all())
        config[OPEN] = st.column_config.ButtonColumn(
            "", help=opens, type="tertiary", width=OPEN_WIDTH, pinned=True, key=click
        )
    st.dataframe(shown, column_config=config, hide_index=True, height="content", placeholder="\N{EN DASH}")
    clicked = st.session_state.get(click) if opens is not None else None
    return None if clicked is None else int(clicked["row"])


def pager(total: int, shown: str, *, rows: int = PAGE_ROWS, name: str = "page") -> Window:
    """The page of a list that the address names; draws the switch if there are several, and says x of y."""
    pages = max(1, -(-total // rows))
    number = min(max(given_int(name) or 1, 1), pages)
    window = Window.page(number, rows)
    first, last = min(window.offset + 1, total), min(window.offset + rows, total)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"{first:,} to {last:,} of {total:,} {shown}" if total else f"0 {shown}", width="stretch")
        if pages > 1:
            page_switch(pages, number, name, lambda chosen: chosen)
    return window


def page_switch(pages: int, number: int, name: str, value: Callable[[int], int]) -> None:
    """A switch between pages, the one shown counted from 1, that writes to the address."""
    # The page shown is part of the key: a list that starts over takes its page from the address, not from the widget.
    key = f"{name}-{pages}-{number}"

    def turn() -> None:
        chosen = st.session_state[key]
        if chosen == 1:
            st.query_params.pop(name, None)
        else:
            st.query_params[name] = str(value(chosen))

    st.pagination(pages, default=number, key=key, on_change=turn, width=340)


def first_page() -> None:
    """Turn a list back to its first page: what it lists has changed."""
    st.query_params.pop("page", None)


FILTER: dict[str, Any] = {"bind": "query-params", "on_change": first_page}
"""Of a widget that filters a list: its value stands in the address, and a change turns to the first page."""


def id_column(label: str) -> Any:
    """A column of ids, wide enough for all 13 characters, so that they can be read and copied."""
    return st.column_config.TextColumn(label, width=ID_WIDTH)


def name_column(label: str, help: str | None = None) -> Any:  # noqa: A002 - Streamlit's name
    """A column of names of which most rows may have none: left to itself it is as narrow as those."""
    return st.column_config.TextColumn(label, help=help, width=NAME_WIDTH)


def number_column(label: str, help: str | None = None, *, format: str = "%.3f") -> Any:  # noqa: A002 - Streamlit's names
    """A numeric column."""
    return st.column_config.NumberColumn(label, help=help, format=format)


def count_column(label: str, help: str | None = None) -> Any:  # noqa: A002 - Streamlit's name
    """A column of counts."""
    return st.column_config.NumberColumn(label, help=help, format="localized")


def advantage_column(label: str, help: str | None = None) -> Any:  # noqa: A002 - Streamlit's name
    """A column of signed values; a dash means unknown, which is not 0."""
    return st.column_config.NumberColumn(label, help=help or "A dash means unknown, which is not 0.", format="%+.3f")


def share_column(label: str, help: str | None = None) -> Any:  # noqa: A002 - Streamlit's name
    """A column of shares from 0 to 1, as bars."""
    return st.column_config.ProgressColumn(label, help=help, format="%.2f", min_value=0.0, max_value=1.0)
