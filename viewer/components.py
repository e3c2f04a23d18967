"""Components of every page: header, saved views, facts, badges, links, page switches, and empty states.

A saved view is an address with a name, and everyone who can write to the lake can save one. So a link to it is built
again from its known parts: a page of the viewer, and parameters that pages have. With several lakes the views of all
are listed; of two with one name, that of the first lake. A view is saved in the first lake. A name is removed in the
lake that has it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlencode, urlsplit

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from streamlit.delta_generator import DeltaGenerator  # noqa: TID253

from lake.care.saved_views import MAX_NAME_LENGTH, drop_view, has_view, read_saved_views, save_view, view_sort_key
from lake.errors import TrajlakeError, UsageError
from viewer import navigation, session
from viewer.figures import PICK, STATUS_COLOURS, Chart
from viewer.navigation import (
    PARAMETERS,
    Page,
    Value,
    anchor,
    build_address,
    chip_link,
    get_id,
    get_int,
    get_parameter,
    go,
    href,
    list_invalid_parameters,
    visit,
)
from viewer.plain import chip, one_line, slug, visible
from viewer.queries import PAGE_ROWS, ListWindow, Row
from viewer.server import is_read_only
from viewer.session import get_author

_VIEW_FAULT = "view-fault"
_UNSAVED_PARAMETERS = frozenset(["opened", "page"])
"""Parameters of a moment: they do not change what the page shows."""


def sanitize_address(address: str) -> str | None:
    """Return an address of a page with the parameters that pages have; None for any other address."""
    try:
        url = urlsplit(address)
        query = parse_qs(url.query)
    except ValueError:
        return None
    if url.scheme or url.netloc or url.path not in navigation.PATHS:
        return None
    parameters = {name: texts for name, texts in query.items() if name in PARAMETERS}
    return url.path + (f"?{urlencode(parameters, doseq=True)}" if parameters else "")


def draw_saved_views() -> None:
    """Draw the button that opens the saved views."""
    opener = st.popover("Views", icon=":material/bookmark:", key="views", on_change="rerun", width="content")
    if opener.open:
        with opener:
            lakes = reversed(session.get_viewed_lake().objects)
            by_name = {view.name: view for objects in lakes for view in read_saved_views(objects)}
            views = sorted(by_name.values(), key=view_sort_key)
            targets = [(view.name, sanitize_address(view.address)) for view in views]
            links = [chip_link(name, target) for name, target in targets if target is not None]
            if links:
                st.html(f'<div class="trajlake-chips">{"".join(links)}</div>')
            else:
                st.caption("No views are saved yet.")
            if not is_read_only():
                with st.form("view", border=False):
                    advice = "Saving again under a name replaces the view."
                    st.text_input("Name", key="view-name", max_chars=MAX_NAME_LENGTH, help=advice)
                    with st.container(horizontal=True):
                        st.form_submit_button("Save this page", on_click=_save_view)
                        st.form_submit_button("Remove the name", on_click=_remove_view)
            if (fault := st.session_state.pop(_VIEW_FAULT, None)) is not None:
                st.error(chip(fault, 400), icon=":material/error:")


def _save_view() -> None:
    parameters = {name: st.query_params.get_all(name) for name in st.query_params if name not in _UNSAVED_PARAMETERS}
    address = sanitize_address(f"{navigation.get_path()}?{urlencode(parameters, doseq=True)}")
    try:
        save_view(session.get_viewed_lake().objects[0], st.session_state["view-name"], address or "/", get_author())
    except TrajlakeError as error:
        st.session_state[_VIEW_FAULT] = str(error)


def _remove_view() -> None:
    try:
        first, *rest = session.get_viewed_lake().objects
        name = st.session_state["view-name"]
        drop_view(next((objects for objects in (first, *rest) if has_view(objects, name)), first), name)
    except TrajlakeError as error:
        st.session_state[_VIEW_FAULT] = str(error)


_NEWS_SECONDS = 20.0
"""Seconds between two checks for newer data."""
_NO_SUCH_STATE = "no-such-state"
_STATES = {"started": "not ended"}
STATE = pl.col("status").replace(_STATES)
"""Expression: `describe_state` of a column of states."""


@contextmanager
def show_errors() -> Iterator[None]:
    """Show an error that the reader can act on as a sentence, without a traceback."""
    try:
        yield
    except TrajlakeError as error:
        is_no_state = isinstance(error, UsageError) and get_parameter(session.AS_OF) is not None
        lake = session.format_lake_option().replace("--lake ", "")
        sentence = "There is no such state." if is_no_state else f"The lake {chip(lake, 200)} could not be read."
        st.error(sentence, icon=":material/error:")
        st.code(visible(str(error)), language=None, wrap_lines=True)
        st.button("Try again with the newest data", icon=":material/refresh:", on_click=session.refresh)


def name_tab(name: str) -> None:
    """Name the browser's tab; the text may be foreign."""
    st.set_page_config(page_title=f"{one_line(name, 80)} - Trajlake")


def draw_header(title: str) -> None:
    """Draw the page's title, the age of the data and the refresh button; `chip` foreign text in the title."""
    name_tab(title.replace("`", ""))
    with st.container(horizontal=True, vertical_alignment="center", key="header"):
        st.header(title, anchor=False, width="stretch")
        draw_saved_views()
        _draw_age()
    _warn_of_invalid_parameters()


def draw_bar(content: str) -> None:
    """Draw the same in one line that stays on the screen: HTML with the title as its `h1`, foreign text escaped."""
    with st.container(horizontal=True, vertical_alignment="center", key="bar"):
        st.html(f'<div class="trajlake-bar">{content}</div>', width="stretch")
        draw_saved_views()
        _draw_age()
    _warn_of_invalid_parameters()


def _warn_of_invalid_parameters() -> None:
    """Name the parameters of the address that have invalid values."""
    for name, value, valid in list_invalid_parameters():
        warn_of_missing(f"{chip(f'{name}={value}')} of the address was left out: `{name}` takes {valid}.")


def _draw_age() -> None:
    """Draw the time of the data, a link to what changed since, and the way to an older state."""
    state = session.get_session()
    at, older = state.pinned_at, state.older
    label = f"As of {chip(older)}" if older else f"Data of {at:%H:%M:%S} UTC"
    with st.popover(label, width="content", help="Newer data, or an older state."):
        st.button("Read the newest state", icon=":material/refresh:", key="refresh", on_click=session.refresh)
        st.selectbox(
            "As of",
            [snapshot.name for snapshot in reversed(state.viewed.lake.snapshots())],
            index=None,
            accept_new_options=True,
            placeholder="snapshot, time (UTC) or version",
            key="as-of",
            on_change=_go_back,
            help="`trajlake snapshot NAME` names the state of a lake; any time works as long as nothing was vacuumed.",
        )
        since = older or f"{at:%Y-%m-%dT%H:%M:%S.%f}"
        target = build_address(None, Page.SINCE, since=since)
        st.html(f'<span class="trajlake-turn">{anchor("What changed since", target)}</span>')
        if (fault := st.session_state.pop(_NO_SUCH_STATE, None)) is not None:
            warn_of_missing(chip(fault, 400))
    if older is None:
        _draw_news()


def _go_back() -> None:
    try:
        session.pin(st.session_state["as-of"])
    except TrajlakeError as error:
        st.session_state[_NO_SUCH_STATE] = str(error)


@st.fragment(run_every=_NEWS_SECONDS)
def _draw_news() -> None:
    """Draw what is newer in the lake as a button; the page stays as it is until the reader clicks it."""
    try:
        new = session.get_session().describe_newer_data()
    except TrajlakeError:
        return  # the lake cannot be read any more; the next read of the page shows the error
    if new:
        st.button(new, icon=":material/refresh:", key="news", on_click=session.refresh)


def draw_empty(sentence: str, advice: str) -> None:
    """Draw an empty page: why, and a command line for the next step, whose `--lake LAKE` becomes the lake."""
    st.info(sentence, icon=":material/inbox:")
    st.code(visible(advice.replace("--lake LAKE", session.format_lake_option(first=True))), language=None)


def read_required_id(name: str, back: Page, back_label: str) -> int:
    """Return an id that the page needs from its address; without a valid one, end the page with a message."""
    try:
        value = get_id(name)
    except ValueError:
        end_with_not_found(
            f"{chip(get_parameter(name))} is not an id: ids have 13 characters of base32.", back, back_label
        )
    if value is None:
        end_with_not_found(f"The address names no {name} (`?{name}=...`).", back, back_label)
    return value


def draw_link(page: Page, label: str, icon: str, /, **parameters: Value) -> None:
    """Draw a link to a page, with the query parameters that are set; `chip` foreign text in the label."""
    st.markdown(f":material/{icon}: [{label}]({href(page, **parameters)})", width="content")


def draw_turn(label: str, address: str | None, key: str) -> None:
    """Draw a link to the previous or next item, which a key follows; without an address, only the label."""
    content = anchor(label, address, key=key) if address is not None else escape(label)
    st.html(f'<span class="trajlake-turn">{content}</span>', width="content")


def draw_fact(label: str, value: Any) -> None:
    """Draw a fact in a line of facts; `chip` foreign text in the value."""
    st.markdown(f":gray[{label}] {value}", width="content")


def draw_chart(container: DeltaGenerator, spec: Chart, key: str, **options: Any) -> Any:
    """Draw a chart of `viewer.figures`; options and result are those of Streamlit's `vega_lite_chart`."""
    return container.vega_lite_chart(spec=spec, key=key, **options)


def draw_episode_chart(container: DeltaGenerator, spec: Chart, key: str, address: Callable[[Row], str]) -> None:
    """Draw a chart with a selection `PICK`; `address` maps the fields that a click picks to the episodes to open."""

    def follow() -> None:
        picked = st.session_state[key]["selection"].get(PICK)
        if picked:
            visit(address(picked[0]))

    draw_chart(container, spec, key, on_select=follow, selection_mode=PICK)


def draw_legend(colours: Mapping[str, str]) -> None:
    """Draw a line that says which colour stands for what."""
    marks = (
        f'<span class="trajlake-legend"><i style="background:{escape(colour)}"></i>{escape(visible(label))}</span>'
        for label, colour in colours.items()
    )
    st.html("".join(marks))


def warn_of_missing(sentence: str) -> None:
    """Warn that something that the address names does not exist."""
    st.warning(sentence, icon=":material/search_off:")


def end_with_not_found(sentence: str, back: Page, back_label: str) -> NoReturn:
    """Warn that something that the address names does not exist, draw a link back, and end the page."""
    warn_of_missing(sentence)
    draw_link(back, back_label, "arrow_back")
    st.stop()


Figure = tuple[str, str] | tuple[str, str, str]
"""Label, value, and optionally an explanation; plain text, which may be foreign."""


def draw_facts(*figures: Figure) -> None:
    """Draw a line of facts."""
    html = []
    for label, value, *explanation in figures:
        why = f' title="{escape(explanation[0])}"' if explanation else ""
        html.append(f"<div{why}><dt>{escape(visible(label))}</dt> <dd>{escape(visible(value))}</dd></div>")
    st.html(f'<dl class="trajlake-facts">{"".join(html)}</dl>')


def draw_badge(label: str, colour: str = "gray", *, icon: str | None = None, explanation: str | None = None) -> None:
    """Draw a badge; `slug` foreign text in the label."""
    st.badge(label, color=colour, icon=icon, help=explanation)  # type: ignore[arg-type]


def describe_state(status: str) -> str:
    """Return a job's or an episode's state in words: a started job may run, or may have been killed."""
    return _STATES.get(status, status)


def draw_status_badge(status: str) -> None:
    """Draw the badge of an episode's or a job's state."""
    why = "It runs, or was killed: nothing in a lake tells these apart." if status == "started" else None
    draw_badge(slug(describe_state(status)), STATUS_COLOURS.get(status, "red"), explanation=why)


def draw_pager(total: int, noun: str, *, rows: int = PAGE_ROWS, name: str = "page") -> ListWindow:
    """Return the page of a list that the address names; draw its position, and a switch if there are several."""
    pages = max(1, -(-total // rows))
    number = min(max(get_int(name) or 1, 1), pages)
    window = ListWindow.page(number, rows)
    first, last = min(window.offset + 1, total), min(window.offset + rows, total)
    with st.container(horizontal=True, vertical_alignment="center"):
        # The noun of the rows ends at a comma, or before what they are in.
        rest = re.sub(r"s(?=,| in |$)", "", noun, count=1) if total == 1 else noun
        position = f"{first:,} to {last:,} of {total:,} {rest}" if total > 1 else f"{total} {rest}"
        st.caption(position, width="stretch")
        if pages > 1:
            draw_page_switch(pages, number, name, lambda page: page)
    return window


def draw_first_rows(frame: pl.DataFrame, limit: int, noun: str) -> pl.DataFrame:
    """Return the first rows of a list without pages, and say so if the list has more.

    Args:
        frame: the list; if a query cut it, with a column `total`.
        limit: maximum number of rows.
        noun: noun of the rows, in the plural.
    """
    total = int(frame["total"][0]) if "total" in frame.columns and frame.height else frame.height
    if total > limit:
        st.caption(f"The first {limit:,} of {total:,} {noun}.")
    return frame.head(limit)


def draw_page_switch(pages: int, number: int, name: str, page_value: Callable[[int], int]) -> None:
    """Draw a switch between pages, counted from 1, that writes to the address."""
    # The page shown is part of the key: a list that starts over takes its page from the address, not from the widget.
    key = f"{name}-{pages}-{number}"

    def turn() -> None:
        page = st.session_state[key]
        go(**{name: None if page == 1 else page_value(page)})

    st.pagination(pages, default=number, key=key, on_change=turn, width=340)


def turn_to_first_page() -> None:
    """Turn a list back to its first page, because its rows have changed."""
    st.query_params.pop("page", None)


FILTER: dict[str, Any] = {"bind": "query-params", "on_change": turn_to_first_page}
"""Options of a widget that filters a list: the address has its value, and a change turns to the first page."""
