"""Saved views: the names that a team gives to pages with their filters, on the bar of every page.

A view is an address, and whoever can write to the lake can save one. So what is followed is made anew of the parts that
are known: one of our pages, and parameters that pages have.

Of several lakes that are open together the views of all are listed, the first lake's where two have one name. A view is
saved in the first, as everything is that is about all of them, and a name is removed where it stands.
"""

from urllib.parse import parse_qs, urlencode, urlsplit

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.care.saved_views import LONGEST, drop_view, has_view, in_order, save_view, saved_views
from lake.errors import TrajlakeError
from viewer import navigation, pinned
from viewer.author import author
from viewer.environment import is_read_only
from viewer.links import PARAMETERS
from viewer.navigation import chip_link
from viewer.plain import chip

_FAULT = "view-fault"
_OF_A_MOMENT = frozenset(["opened", "page"])
"""Parameters that say where a reader was, and not what they looked at."""


def harmless(address: str) -> str | None:
    """The address of one of our pages with the parameters that pages have; None of any other."""
    try:
        parts = urlsplit(address)
        values = parse_qs(parts.query)
    except ValueError:
        return None
    if parts.scheme or parts.netloc or parts.path not in navigation.PATHS:
        return None
    known = {name: found for name, found in values.items() if name in PARAMETERS}
    return parts.path + (f"?{urlencode(known, doseq=True)}" if known else "")


def bar() -> None:
    """The button that opens them."""
    opener = st.popover("Views", icon=":material/bookmark:", key="views", on_change="rerun", width="content")
    if opener.open:
        with opener:
            _list()
            if not is_read_only():
                _form()
            if (fault := st.session_state.pop(_FAULT, None)) is not None:
                st.error(chip(fault, 400), icon=":material/error:")


def _list() -> None:
    views = {view.name: view for place in reversed(pinned.objects()) for view in saved_views(place)}
    links = [
        chip_link(view.name, target)
        for view in sorted(views.values(), key=in_order)
        if (target := harmless(view.address)) is not None
    ]
    if links:
        st.html(f'<div class="trajlake-chips">{"".join(links)}</div>')
    else:
        st.caption("No views are saved yet.")


def _form() -> None:
    with st.form("view", border=False):
        st.text_input("Name", key="view-name", max_chars=LONGEST, help="Saving again under a name replaces the view.")
        with st.container(horizontal=True):
            st.form_submit_button("Save this page", on_click=_save)
            st.form_submit_button("Remove the name", on_click=_remove)


def _save() -> None:
    given = {name: st.query_params.get_all(name) for name in st.query_params if name not in _OF_A_MOMENT}
    address = harmless(f"{navigation.here()}?{urlencode(given, doseq=True)}")
    try:
        save_view(pinned.objects()[0], st.session_state["view-name"], address or "/", author())
    except TrajlakeError as error:
        st.session_state[_FAULT] = str(error)


def _remove() -> None:
    try:
        first, *others = pinned.objects()
        name = st.session_state["view-name"]
        drop_view(next((place for place in (first, *others) if has_view(place, name)), first), name)
    except TrajlakeError as error:
        st.session_state[_FAULT] = str(error)
