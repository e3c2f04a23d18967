"""What every page is made of: header, figures, badges, links, page switches, and friendly empty states."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any, NoReturn

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from streamlit.delta_generator import DeltaGenerator  # noqa: TID253

from lake.errors import TrajlakeError, UsageError
from viewer import pinned, views
from viewer.figures import PICK, Chart
from viewer.links import Page, given, given_id, given_int, nonsense
from viewer.navigation import Value, anchor, go, href, to_newest, visit
from viewer.plain import chip, slug, visible
from viewer.queries import PAGE_ROWS, Row, Window
from viewer.theme import STATUS_COLOURS, STYLE

_LOOK_SECONDS = 20.0
"""Between two looks for newer data."""
_NO_SUCH_STATE = "no-such-state"
_STATES = {"started": "not ended"}
STATE = pl.col("status").replace(_STATES)
"""`state` of a column of them."""


@contextmanager
def friendly() -> Iterator[None]:
    """Show a fault that the reader can do something about as a sentence instead of a traceback."""
    try:
        yield
    except TrajlakeError as error:
        is_no_state = isinstance(error, UsageError) and given(pinned.AS_OF) is not None
        said = "There is no such state." if is_no_state else "The lake could not be read."
        st.error(said, icon=":material/error:")
        st.code(visible(str(error)), language=None, wrap_lines=True)
        st.button("Try again with the newest data", icon=":material/refresh:", on_click=pinned.refresh)


def header(title: str) -> None:
    """The page's title (foreign text in it goes through `chip`), the age of the data, and the button that renews it."""
    st.html(STYLE)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.header(title, anchor=False, width="stretch")
        views.bar()
        _age()
    _say_nonsense()


def bar(content: str) -> None:
    """The same in one line that stays on the screen: HTML whose foreign text is escaped, with the title as its `h1`."""
    st.html(STYLE)
    with st.container(horizontal=True, vertical_alignment="center", key="bar"):
        st.html(f'<div class="trajlake-bar">{content}</div>', width="stretch")
        views.bar()
        _age()
    _say_nonsense()


def _say_nonsense() -> None:
    """Name the parameters of the address that no page makes anything of."""
    for name, value, valid in nonsense():
        missing(f"{chip(f'{name}={value}')} of the address was left out: `{name}` takes {valid}.")


def _age() -> None:
    """Of when the data is; what came since; and the way to an older state."""
    at = pinned.pinned_at()  # first: it takes up what the address asks for
    older = pinned.when()
    label = f"As of {chip(older)}" if older else f"Data of {at:%H:%M:%S} UTC"
    with st.popover(label, width="content", help="Newer data, or an older state."):
        st.button("Read the newest state", icon=":material/refresh:", key="refresh", on_click=pinned.refresh)
        st.selectbox(
            "As of",
            pinned.snapshots(),
            index=None,
            accept_new_options=True,
            placeholder="snapshot, time (UTC) or version",
            key="as-of",
            on_change=_go_back,
            help="`trajlake snapshot NAME` names the state of a lake; any time works as long as nothing was vacuumed.",
        )
        since = older or f"{at:%Y-%m-%dT%H:%M:%S.%f}"
        target = to_newest(Page.SINCE, since=since)
        st.html(f'<span class="trajlake-turn">{anchor("What changed since", target)}</span>')
        if (fault := st.session_state.pop(_NO_SUCH_STATE, None)) is not None:
            missing(chip(fault, 400))
    if older is None:
        _news()


def _go_back() -> None:
    try:
        pinned.show(st.session_state["as-of"])
    except TrajlakeError as error:
        st.session_state[_NO_SUCH_STATE] = str(error)


@st.fragment(run_every=_LOOK_SECONDS)
def _news() -> None:
    """Say what is newer, and leave the page as it is until the reader wants it."""
    try:
        new = pinned.news()
    except TrajlakeError:
        return  # the lake cannot be read any more: whatever the page reads next says so
    if new:
        st.button(new, icon=":material/refresh:", key="news", on_click=pinned.refresh)


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


def link(page: Page, label: str, icon: str, /, **values: Value) -> None:
    """A link to a page, with the query parameters that are set; foreign text in the label goes through `chip`."""
    st.markdown(f":material/{icon}: [{label}]({href(page, **values)})", width="content")


def turn(label: str, address: str | None, key: str) -> None:
    """A link to the one before or after, followed by a key; None: there is none."""
    st.html(
        f'<span class="trajlake-turn">{escape(label) if address is None else anchor(label, address, key=key)}</span>',
        width="content",
    )


def list_and_detail() -> tuple[DeltaGenerator, DeltaGenerator]:
    """A list on the left, what it has chosen on the right; on narrow screens one below the other (`style.css`)."""
    with st.container(key="list-and-detail"):
        left, right = st.columns([2, 3], gap="medium")
    return left, right


def fact(label: str, value: Any) -> None:
    """A fact in a line of them; foreign text in the value goes through `chip`."""
    st.markdown(f":gray[{label}] {value}", width="content")


def chart(place: DeltaGenerator, drawn: Chart, key: str, **options: Any) -> Any:
    """A chart of `viewer.figures`; what `vega_lite_chart` of Streamlit takes and gives."""
    return place.vega_lite_chart(spec=drawn, key=key, **options)


def chart_of_episodes(place: DeltaGenerator, drawn: Chart, key: str, address: Callable[[Row], str]) -> None:
    """A chart whose points open their episodes.

    Args:
        place: where it stands.
        drawn: of `viewer.figures`, with a selection `PICK`.
        key: of the chart.
        address: of the episodes of a point, by the fields that the selection picks.
    """

    def follow() -> None:
        picked = st.session_state[key]["selection"].get(PICK)
        if picked:
            visit(address(picked[0]))

    chart(place, drawn, key, on_select=follow, selection_mode=PICK)


def legend(colours: Mapping[str, str]) -> None:
    """A line that says which colour stands for what."""
    marks = (
        f'<span class="trajlake-legend"><i style="background:{escape(colour)}"></i>{escape(visible(label))}</span>'
        for label, colour in colours.items()
    )
    st.html("".join(marks))


def missing(sentence: str) -> None:
    """Say that what the address names is not there."""
    st.warning(sentence, icon=":material/search_off:")


def not_found(sentence: str, back: Page, back_label: str) -> NoReturn:
    """Say that what the address names is not there, offer the way back, and end the page."""
    missing(sentence)
    link(back, back_label, "arrow_back")
    st.stop()


Figure = tuple[str, str] | tuple[str, str, str]
"""Label, value, and perhaps an explanation; plain text, which may be foreign."""


def facts(*figures: Figure) -> None:
    """A line of figures."""
    parts = []
    for label, value, *explanation in figures:
        why = f' title="{escape(explanation[0])}"' if explanation else ""
        parts.append(f"<div{why}><dt>{escape(visible(label))}</dt> <dd>{escape(visible(value))}</dd></div>")
    st.html(f'<dl class="trajlake-facts">{"".join(parts)}</dl>')


def badge(label: str, colour: str = "gray", *, icon: str | None = None, explanation: str | None = None) -> None:
    """A badge; foreign text in the label goes through `slug`."""
    st.badge(label, color=colour, icon=icon, help=explanation)  # type: ignore[arg-type]


def state(status: str) -> str:
    """A job's or an episode's state in words: a job that has begun may run or have been killed."""
    return _STATES.get(status, status)


def status_badge(status: str) -> None:
    """The badge of an episode's or a job's state."""
    why = "It runs, or was killed: nothing in a lake tells these apart." if status == "started" else None
    badge(slug(state(status)), STATUS_COLOURS.get(status, "red"), explanation=why)


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


def first(frame: pl.DataFrame, most: int, what: str) -> pl.DataFrame:
    """The first rows of a list that has no pages, and a sentence if these are not all of them.

    Args:
        frame: the list; where a query cut it, with a column `total`.
        most: rows that are shown.
        what: it is a list of.
    """
    total = int(frame["total"][0]) if "total" in frame.columns and frame.height else frame.height
    if total > most:
        st.caption(f"The first {most:,} of {total:,} {what}.")
    return frame.head(most)


def page_switch(pages: int, number: int, name: str, value: Callable[[int], int]) -> None:
    """A switch between pages, the one shown counted from 1, that writes to the address."""
    # The page shown is part of the key: a list that starts over takes its page from the address, not from the widget.
    key = f"{name}-{pages}-{number}"

    def turn() -> None:
        chosen = st.session_state[key]
        go(**{name: None if chosen == 1 else value(chosen)})

    st.pagination(pages, default=number, key=key, on_change=turn, width=340)


def first_page() -> None:
    """Turn a list back to its first page: what it lists has changed."""
    st.query_params.pop("page", None)


FILTER: dict[str, Any] = {"bind": "query-params", "on_change": first_page}
"""Of a widget that filters a list: its value stands in the address, and a change turns to the first page."""
