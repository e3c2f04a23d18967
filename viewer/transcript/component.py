"""Mounting a transcript: all its lines are sent once; what a step shows is fetched when it is opened (`route`)."""

from collections.abc import Sequence

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from viewer import pinned
from viewer.navigation import changed, query
from viewer.queries import Window
from viewer.transcript import drawn, route
from viewer.transcript.told import Told

_TRANSCRIPT = st.components.v2.component(
    "trajlake_transcript", js=drawn.script(), css=drawn.STYLE, isolate_styles=False
)


def show(
    told: Told, window: Window, selected: int | None, hidden: Sequence[str], *, tells: bool, find: str = ""
) -> None:
    """Draw the transcript.

    Args:
        told: what it is of.
        window: which steps have a line.
        selected: the step that is opened at first.
        hidden: kinds of text that are not shown.
        tells: the page is run again with each step that the reader opens, which its address names then.
        find: a text that is found and marked at first.
    """
    data = drawn.lines(told, window, selected)
    data |= {"hidden": hidden, "address": changed(step=None), "asks": _asks(told), "tells": tells, "find": find}
    key = f"transcript-{data['name']}"

    def open_step() -> None:
        st.query_params["step"] = str(st.session_state[key]["step"])

    # A page whose versions this process has forgotten says so, and is run again: that names them.
    _TRANSCRIPT(key=key, data=data, on_lost_change=lambda: None, on_step_change=open_step)


def _asks(told: Told) -> str:
    """The address of everything that the page asks of this transcript, but for the question."""
    return route.PATH + query(of=pinned.name(), episode=ids.to_text(told.episode_id), credit=told.chosen)
