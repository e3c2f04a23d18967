"""Addresses of the viewer's pages, and links to them that keep the session (`navigation.js` says how)."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from streamlit.runtime.state import get_session_state  # noqa: TID253

from viewer import pinned
from viewer.links import PARAMETERS, Page, given
from viewer.plain import one_line

_VISIT, _VISITS, _HERE, _RUN = "navigation-visit", "navigation-visits", "here", "looked-at-run"
Value = str | int | float | Sequence[str] | None

_SCRIPT = st.components.v2.component("trajlake_navigation", js=Path(__file__).with_name("navigation.js").read_text())


def install(path: str) -> None:
    """Make plain clicks on links of the page that is drawn keep the session.

    Args:
        path: of that page, without the slash.
    """
    st.session_state[_HERE] = f"/{path}"
    if (run := given("run")) is not None:
        look_at(run)
    data: dict[str, Any] = {"pages": [_path(page) for page in Page], "run": str(time.time_ns())}
    if (target := st.session_state.pop(_VISIT, None)) is not None:
        st.session_state[_VISITS] = number = st.session_state.get(_VISITS, 0) + 1
        data["visit"] = {"target": target, "number": number}
    with st.container(key="navigation"):
        _SCRIPT(key="navigation-script", data=data)


@contextmanager
def parameters_of_its_own() -> Iterator[None]:
    """A page's run, after which no parameter is bound to a widget of that page any more: the next run binds anew.

    Streamlit takes out of the address of another page what a widget of this one is bound to. A link, or Back, from the
    list of episodes would lead to groups of all runs, and to the page of a group without the group.
    """
    try:
        yield
    finally:
        with get_session_state().query_params() as parameters:
            for name in PARAMETERS:
                if (binding := parameters.get_binding_for_param(name)) is not None:
                    parameters.unbind_widget(binding.widget_id)


def visit(target: str) -> None:
    """Have the browser follow a link, for what cannot be one, such as a point of a chart; only within a callback."""
    st.session_state[_VISIT] = target


def here() -> str:
    """The path of the page that is drawn."""
    return str(st.session_state.get(_HERE, "/"))


def look_at(run: str) -> None:
    """Remember the run that the reader looks at: links of the menu bar carry no parameters."""
    st.session_state[_RUN] = run


def looked_at() -> str | None:
    """The run that the reader looked at last in this session; None: at none yet."""
    found: str | None = st.session_state.get(_RUN)
    return found


def into_view(name: str) -> None:
    """Have the browser scroll here, once for each name: what stands here is what the reader has just asked for."""
    with st.container(key="into-view"):
        _SCRIPT(key=f"into-view-{name}", data={"here": name})


def href(page: Page, /, **values: Value) -> str:
    """The address of a page with the query parameters that are set; ids are given as text (`lake.ids.to_text`)."""
    return address(pinned.when(), page, **values)


def address(older: str | None, page: Page, /, **values: Value) -> str:
    """As `href`, outside of a session: `older` is the state that the reader looks at (`pinned.when`)."""
    return _path(page) + _query(values, older)


def to_newest(page: Page, /, **values: str) -> str:
    """The address of a page that shows the newest state, whatever the reader looks at."""
    return f"{_path(page)}?{urlencode(values)}"


def query(**values: Value) -> str:
    """The query parameters that are set as the end of an address.

    Where the reader looks at an older state, so does the page that the link leads to, also in a tab of its own.
    """
    return _query(values, pinned.when())


def _query(values: Mapping[str, Value], older: str | None) -> str:
    given = {name: value for name, value in values.items() if value not in (None, "", ())}
    if older is not None:
        given[pinned.AS_OF] = older
    return f"?{urlencode(given, doseq=True)}" if given else ""


def changed(**values: Value) -> str:
    """The present address with some parameters set, or taken out (None)."""
    return f"?{urlencode(_changed(values), doseq=True)}"


def go(**values: Value) -> None:
    """Go to `changed`: one entry of the browser's history, however many parameters differ; only within a callback."""
    st.query_params.from_dict(_changed(values))


def _changed(values: Mapping[str, Value]) -> dict[str, Any]:
    present = {name: st.query_params.get_all(name) for name in st.query_params}
    return {name: value for name, value in (present | dict(values)).items() if value not in (None, "", [])}


def anchor(text: str, target: str, *, key: str | None = None) -> str:
    """HTML of a link with a plain text; `key` follows it."""
    follows = f' data-key="{escape(key)}" title="key {escape(key)}"' if key else ""
    return f'<a href="{escape(target)}"{follows}>{escape(text)}</a>'


def chip_link(text: str, target: str, *, chosen: bool = False) -> str:
    """HTML of a link that looks like a chip, with a plain text in one line."""
    return f'<a href="{escape(target)}"{" class=chosen" if chosen else ""}>{escape(one_line(text, 90))}</a>'


def _path(page: Page) -> str:
    return "/" if page is Page.RUNS else f"/{Path(page).stem}"


PATHS = frozenset(map(_path, Page))
"""Paths of all pages."""
