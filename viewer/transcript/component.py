"""Mounting a transcript: all its lines are sent once; what a step shows is fetched when it is opened (`route`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from viewer import pinned, plain
from viewer.navigation import changed, query
from viewer.queries import Window
from viewer.transcript import opened, outline, route
from viewer.transcript.told import Told

LINES = 2000
"""Lines of a transcript at most; a longer one has pages."""

_FOLDER = Path(__file__).parent
_SCRIPTS = ("transcript.js", "asking.js", "line.js", "body.js", "text.js", "find.js", "overview.js", "tokens.js")
_TRANSCRIPT = st.components.v2.component(
    "trajlake_transcript",
    js="\n".join((_FOLDER / name).read_text() for name in _SCRIPTS),
    css=(_FOLDER / "transcript.css").read_text(),
    isolate_styles=False,
)


def show(told: Told, window: Window, selected: int | None, hidden: Sequence[str]) -> None:
    """Draw the transcript.

    Args:
        told: what it is of.
        window: which steps have a line.
        selected: the step that is opened at first.
        hidden: kinds of text that are not shown.
    """
    data = drawn(told, window, selected) | {"hidden": hidden, "address": changed(step=None), "asks": _asks(told)}
    # A page whose versions this process has forgotten says so, and is run again: that names them.
    _TRANSCRIPT(key=f"transcript-{data['name']}", data=data, on_lost_change=lambda: None)


def drawn(told: Told, window: Window, selected: int | None) -> dict[str, Any]:
    """What the page needs to draw the lines, and the step that is opened at first."""
    rows, credit = told.lines(window), told.advantages
    scale = told.scale
    by_step = {row["step_index"]: row for row in credit.iter_rows(named=True)}
    return {
        "name": f"{ids.to_text(told.episode_id)}-{window.offset}",
        "lines": outline.lines(rows, by_step, told.scores, scale, told.branches),
        "repeats": outline.repeats(rows),
        "ends": _ends(told, window),
        "rewarded": scale.rewarded,
        "credited": told.credit is not None,
        "selected": selected,
        "opened": [] if selected is None else opened.steps(told, [selected]),
    }


def _asks(told: Told) -> str:
    """The address of everything that the page asks of this transcript, but for the question."""
    return route.PATH + query(of=pinned.name(), episode=ids.to_text(told.episode_id), credit=told.chosen)


def _ends(told: Told, window: Window) -> list[dict[str, Any]]:
    """What stands before the first line and after the last: the messages outside the steps."""
    found = []
    if window.offset == 0 and (messages := told.before):
        found.append({"index": opened.BEFORE, "text": f"Before the first step: {_roles(messages)}"})
    if window.offset + window.limit >= told.count and (messages := told.after):
        found.append({"index": told.count, "text": f"After the last step: {_roles(messages)}"})
    return found


def _roles(messages: list[Any]) -> str:
    roles = ", ".join(plain.role(one) for one in messages[:5])
    return plain.one_line(f"{roles}{', ...' if len(messages) > 5 else ''}", 80)
