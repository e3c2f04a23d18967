"""Annotations of the episode that a page shows: what was said, and a form to say more.

The form is the one place where the viewer writes: rows are added to `annotations`, as `trajlake annotate` adds them
(`lake.write.annotations`), and the page then shows the newest state of the lake. `trajlake view --read-only` has none.
"""

import getpass
import os

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

import lake
from lake.errors import TrajlakeError
from lake.write.annotations import RATING, Annotation, annotate
from viewer import pinned, tables
from viewer.environment import READ_ONLY
from viewer.navigation import changed
from viewer.plain import chip
from viewer.queries import annotations

_AUTHOR = "annotation-author"
_FAULT = "annotation-fault"


def show(episode_id: int, step: int | None) -> None:
    """What people said of an episode, folded.

    Args:
        episode_id: of the episode.
        step: that the address names; what is said is of it, unless the reader chooses the whole episode.
    """
    frame = pinned.read(annotations.of_episode, episode_id)
    with st.expander(f"Annotations ({frame.height})", icon=":material/edit_note:"):
        if frame.height:
            columns = {
                "step_index": tables.value("Step", "A dash: the whole episode."),
                "label": tables.text("Label"),
                "value": tables.value("Number"),
                "text": tables.wide("Words"),
                "author": tables.text("Author"),
                "at": tables.time("At (UTC)"),
            }
            tables.table(frame, columns, label="Annotations", href=lambda row: changed(step=row["step_index"]))
        if os.environ.get(READ_ONLY) != "1":
            _form(episode_id, step)


def _form(episode_id: int, step: int | None) -> None:
    known = list(dict.fromkeys([RATING, *pinned.read(annotations.labels)]))
    places = ["the whole episode"] if step is None else [f"step {step}", "the whole episode"]
    with st.form(f"annotate-{episode_id}-{step}", clear_on_submit=True, border=False):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            st.selectbox("Of", places, key=_key("of"), width=180)
            st.selectbox("Label", known, accept_new_options=True, key=_key("label"), width=200)
            st.number_input(
                "Number",
                value=None,
                placeholder="none",
                key=_key("value"),
                width=150,
                help="Numbers are scores: those of `rating` of the scorer `human`, of any label L of `human.L`.",
            )
            st.text_input("Words", key=_key("text"))
            st.text_input("Author", value=st.session_state.get(_AUTHOR) or _user(), key=_key("author"), width=160)
        with st.container(horizontal=True):
            st.form_submit_button("Add", on_click=_write, args=(episode_id, step))
            st.form_submit_button(
                "Take back",
                on_click=_write,
                args=(episode_id, step, True),
                help="What this author said under this label, there, does not count any more.",
            )
    if (fault := st.session_state.pop(_FAULT, None)) is not None:
        st.error(chip(fault, 400), icon=":material/error:")


def _write(episode_id: int, step: int | None, takes_back: bool = False) -> None:
    """Write what the form holds; what is wrong with it is shown when the page is drawn."""
    of, label, value, text, author = (
        st.session_state[_key(name)] for name in ("of", "label", "value", "text", "author")
    )
    st.session_state[_AUTHOR] = author
    if not takes_back and value is None and not text.strip():
        st.session_state[_FAULT] = "say a number, words, or both"
        return
    said = Annotation(
        episode_id=episode_id,
        label=label or "",
        step_index=step if of.startswith("step") else None,
        value=None if takes_back else value,
        text=None if takes_back else text.strip() or None,
    )
    try:
        annotate(lake.open(pinned.uri()), [said], author)
    except TrajlakeError as error:
        st.session_state[_FAULT] = str(error)
        return
    pinned.refresh()


def _user() -> str:
    """The name of whoever runs the viewer; nothing where the system knows none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def _key(name: str) -> str:
    return f"annotation-{name}"
