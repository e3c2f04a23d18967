"""Annotations of the episode that a page shows: what was said, and a form to say more.

Beside saved views (`viewer.views`) the form is the one place where the viewer writes: rows are added to `annotations`,
as `trajlake annotate` adds them (`lake.write.annotations`), and the page then shows the newest state of the lake.
`trajlake view --read-only` has none.

Where the reader works through a queue (`viewer.labelling`), label and author are the queue's, an answer that was given
before is one click or one key away, and what is added leads to the next episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.errors import TrajlakeError
from lake.write.annotations import RATING, Annotation, annotate
from viewer import choices, pinned, tables
from viewer.author import author, remember
from viewer.components import missing
from viewer.environment import is_read_only
from viewer.navigation import changed, go
from viewer.plain import chip, number, one_line
from viewer.queries import annotations

_FAULT = "annotation-fault"
_FOLD = "annotations"
_YES_OR_NO = [0.0, 1.0]
_NOWHERE = "the whole episode"


@dataclass(frozen=True, slots=True)
class Queued:
    """What a queue fixes of an annotation, and where it goes on."""

    label: str
    author: str
    following: int | None
    """The next episode that is left; None: this is the last one."""


def show(episode_id: int, step: int | None) -> bool:
    """What people said of an episode, folded unless the reader works through a queue.

    Args:
        episode_id: of the episode.
        step: that was opened last; what is said is of it, unless the reader chooses the whole episode.

    Returns:
        Whether there is a form on the page, which follows the step that is opened.
    """
    frame = pinned.read(annotations.of_episode, episode_id)
    queued = None if is_read_only() else _queued(episode_id)
    name, key = f"Annotations ({frame.height})", _FOLD if queued is None else f"{_FOLD}-of-queue"
    fold = st.expander(name, icon=":material/edit_note:", expanded=queued is not None, key=key, on_change="rerun")
    if not fold.open:
        return False
    with fold:
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
        if queued is not None:
            _answers(episode_id, step, queued)
        if not is_read_only():
            _form(episode_id, step, queued)
    return not is_read_only()


def _queued(episode_id: int) -> Queued | None:
    """The queue that the address carries; None: it carries none, or one of no author."""
    wanted, order = choices.carried()
    label, by = wanted.unlabelled or (None, None)
    if label is None or by is None:
        return None
    try:
        found = pinned.read(annotations.queue, wanted, order, episode_id)
    except TrajlakeError as error:
        missing(f"The queue of this address cannot be read: {chip(error, 400)}")
        return None
    left = (found.next, found.first, found.previous)
    return Queued(label, by, next((one for one in left if one not in (None, episode_id)), None))


def _answers(episode_id: int, step: int | None, queued: Queued) -> None:
    """What was said under the label before, each a click or a key."""
    found: Sequence[float | str] = pinned.read(annotations.answers, queued.label)
    if not found and queued.label == RATING:
        found = _YES_OR_NO
    if not found:
        return
    are_digits = all(isinstance(answer, float) and answer in range(10) for answer in found)
    with st.container(horizontal=True, vertical_alignment="center"):
        for place, answer in enumerate(found, start=1):
            shown = one_line(answer, 40) if isinstance(answer, str) else number(answer)
            st.button(
                chip(shown),
                key=f"answer-{place}",
                shortcut=shown if are_digits else str(place),
                on_click=_write,
                args=(
                    Annotation(
                        episode_id=episode_id,
                        step_index=step,
                        label=queued.label,
                        value=answer if isinstance(answer, float) else None,
                        text=answer if isinstance(answer, str) else None,
                    ),
                    queued.author,
                    queued,
                ),
            )


def _form(episode_id: int, step: int | None, queued: Queued | None) -> None:
    places = [_NOWHERE] if step is None else [f"step {step}", _NOWHERE]
    with st.form(f"annotate-{episode_id}", clear_on_submit=True, border=False):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            # Another step is another choice: the one that was just opened.
            st.selectbox("Of", places, key=_of(step), width=180)
            if queued is None:
                known = list(dict.fromkeys([RATING, *pinned.read(annotations.labels)]))
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
            if queued is None:
                st.text_input("Author", value=author(), key=_by(), width=160)
        with st.container(horizontal=True, vertical_alignment="center"):
            args = (episode_id, step, queued)
            st.form_submit_button("Add" if queued is None else "Add and go on", on_click=_submit, args=args)
            st.form_submit_button(
                "Take back",
                on_click=_submit,
                args=(*args, True),
                help="What this author said under this label, there, does not count any more.",
            )
            if queued is not None:
                st.caption(f"Label {chip(queued.label)} by {chip(queued.author)}.", width="content")
    if (fault := st.session_state.pop(_FAULT, None)) is not None:
        st.error(chip(fault, 400), icon=":material/error:")


def _submit(episode_id: int, step: int | None, queued: Queued | None, takes_back: bool = False) -> None:
    """Write what the form holds."""
    of, value, text = (st.session_state[key] for key in (_of(step), _key("value"), _key("text")))
    if queued is None:
        label, by = (st.session_state[key] for key in (_key("label"), _by()))
        remember(by)
    else:
        label, by = queued.label, queued.author
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
    _write(said, by, None if takes_back else queued)


def _write(said: Annotation, by: str, queued: Queued | None) -> None:
    """Write an annotation and go on in the queue; what is wrong with it is shown when the page is drawn."""
    try:
        annotate(pinned.home(said.episode_id), [said], by)
    except TrajlakeError as error:
        st.session_state[_FAULT] = str(error)
        return
    pinned.refresh()
    # The fold's label counts what was said: with another label it is another one.
    st.session_state[_FOLD] = True
    if queued is not None and queued.following is not None:
        go(episode=ids.to_text(queued.following), step=None)


def _key(name: str) -> str:
    return f"annotation-{name}"


def _by() -> str:
    # The form empties its fields to what they began with: of another author it is another field.
    return _key(f"author-{author()}")


def _of(step: int | None) -> str:
    return _key("of" if step is None else f"of-{step}")
