"""Annotations of an episode, the form that adds them, and queues of episodes to annotate.

Besides saved views (`viewer.components`) only this form writes: it adds rows to `annotations`, as `trajlake annotate`
does (`lake.write.scores`). The page then shows the newest state of the lake. `trajlake view --read-only` has no form.

A queue is a list whose filter has `unlabelled`: the episodes of any list that an author has not labelled. So it lives
in the address, survives a reload, has previous and next like any list, and shrinks with every label. In a queue the
label and the author are fixed, an earlier answer is one click or key away, and the next episode follows an annotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.errors import TrajlakeError
from lake.read.text_table import format_count
from lake.write.scores import RATING, Annotation, annotate
from viewer import filters, session, tables
from viewer.components import warn_of_missing
from viewer.navigation import Page, change_address, chip_link, go, href
from viewer.plain import chip, number, one_line
from viewer.queries import Sort, annotations
from viewer.queries.episodes import EpisodeFilter
from viewer.server import is_read_only
from viewer.session import get_author, read, remember_author

_FAULT = "annotation-fault"
_FOLD = "annotations"
_YES_OR_NO = [0.0, 1.0]
_WHOLE_EPISODE = "the whole episode"


@dataclass(frozen=True, slots=True)
class LabelQueue:
    """Label and author of a queue, and its next episode."""

    label: str
    author: str
    following: int | None
    """The next unlabelled episode; None after the last one."""


def draw_annotations(episode_id: int, step: int | None) -> bool:
    """Draw the annotations of an episode, folded unless the reader works through a queue.

    Args:
        episode_id: the episode.
        step: the step that was opened last; an annotation is of it, unless the reader chooses the whole episode.

    Returns:
        Whether the page has a form, which follows the open step.
    """
    frame = read(annotations.read_annotations_of, episode_id)
    queue = None if is_read_only() else _read_queue(episode_id)
    name, key = f"Annotations ({frame.height})", _FOLD if queue is None else f"{_FOLD}-of-queue"
    fold = st.expander(name, icon=":material/edit_note:", expanded=queue is not None, key=key, on_change="rerun")
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
            tables.draw_table(
                frame, columns, label="Annotations", href=lambda row: change_address(step=row["step_index"])
            )
        if queue is not None:
            _draw_answer_buttons(episode_id, step, queue)
        if not is_read_only():
            _draw_annotation_form(episode_id, step, queue)
    return not is_read_only()


def _read_queue(episode_id: int) -> LabelQueue | None:
    """Return the queue of the address; None without one, or without its author."""
    episode_filter, order = filters.read_carried_filter()
    label, author = episode_filter.unlabelled or (None, None)
    if label is None or author is None:
        return None
    try:
        queue = read(annotations.read_queue, episode_filter, order, episode_id)
    except TrajlakeError as error:
        warn_of_missing(f"The queue of this address cannot be read: {chip(error, 400)}")
        return None
    neighbours = (queue.next, queue.first, queue.previous)
    return LabelQueue(
        label, author, next((neighbour for neighbour in neighbours if neighbour not in (None, episode_id)), None)
    )


def _draw_answer_buttons(episode_id: int, step: int | None, queue: LabelQueue) -> None:
    """Draw a button with a key for each earlier answer under the label."""
    answers: Sequence[float | str] = read(annotations.list_answers, queue.label)
    if not answers and queue.label == RATING:
        answers = _YES_OR_NO
    if not answers:
        return
    are_digits = all(isinstance(answer, float) and answer in range(10) for answer in answers)
    with st.container(horizontal=True, vertical_alignment="center"):
        for position, answer in enumerate(answers, start=1):
            label = one_line(answer, 40) if isinstance(answer, str) else number(answer)
            st.button(
                chip(label),
                key=f"answer-{position}",
                shortcut=label if are_digits else str(position),
                on_click=_write_annotation,
                args=(
                    Annotation(
                        episode_id=episode_id,
                        step_index=step,
                        label=queue.label,
                        value=answer if isinstance(answer, float) else None,
                        text=answer if isinstance(answer, str) else None,
                    ),
                    queue.author,
                    queue,
                ),
            )


def _draw_annotation_form(episode_id: int, step: int | None, queue: LabelQueue | None) -> None:
    targets = [_WHOLE_EPISODE] if step is None else [f"step {step}", _WHOLE_EPISODE]
    with st.form(f"annotate-{episode_id}", clear_on_submit=True, border=False):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            # Each step has a separate widget, so that the step that was just opened is selected.
            st.selectbox("Of", targets, key=_build_step_key(step), width=180)
            if queue is None:
                labels = list(dict.fromkeys([RATING, *read(annotations.list_labels)]))
                st.selectbox("Label", labels, accept_new_options=True, key="annotation-label", width=200)
            st.number_input(
                "Number",
                value=None,
                placeholder="none",
                key="annotation-value",
                width=150,
                help="A number is a score: of the scorer `human` for the label `rating`, of `human.L` for any label L.",
            )
            st.text_input("Words", key="annotation-text")
            if queue is None:
                st.text_input("Author", value=get_author(), key=_build_author_key(), width=160)
        with st.container(horizontal=True, vertical_alignment="center"):
            args = (episode_id, step, queue)
            st.form_submit_button("Add" if queue is None else "Add, next", on_click=_submit_annotation, args=args)
            st.form_submit_button(
                "Take back",
                on_click=_submit_annotation,
                args=(*args, True),
                help="Retract what this author added under this label there.",
            )
            if queue is not None:
                st.caption(f"Label {chip(queue.label)} by {chip(queue.author)}.", width="content")
    if (fault := st.session_state.pop(_FAULT, None)) is not None:
        st.error(chip(fault, 400), icon=":material/error:")


def _submit_annotation(episode_id: int, step: int | None, queue: LabelQueue | None, takes_back: bool = False) -> None:
    """Write the annotation in the form."""
    target, value, text = (
        st.session_state[key] for key in (_build_step_key(step), "annotation-value", "annotation-text")
    )
    if queue is None:
        label, author = (st.session_state[key] for key in ("annotation-label", _build_author_key()))
        remember_author(author)
    else:
        label, author = queue.label, queue.author
    if not takes_back and value is None and not text.strip():
        st.session_state[_FAULT] = "enter a number, words, or both"
        return
    annotation = Annotation(
        episode_id=episode_id,
        label=label or "",
        step_index=step if target.startswith("step") else None,
        value=None if takes_back else value,
        text=None if takes_back else text.strip() or None,
    )
    _write_annotation(annotation, author, None if takes_back else queue)


def _write_annotation(annotation: Annotation, author: str, queue: LabelQueue | None) -> None:
    """Write an annotation and open the next episode of the queue; the page shows an error when it is drawn."""
    try:
        annotate(session.get_viewed_lake().lake.home(annotation.episode_id), [annotation], author)
    except TrajlakeError as error:
        st.session_state[_FAULT] = str(error)
        return
    session.refresh()
    # The count in the fold's label has changed, which makes another widget of it: open that one too.
    st.session_state[_FOLD] = True
    if queue is not None and queue.following is not None:
        go(episode=ids.to_text(queue.following), step=None)


def _build_author_key() -> str:
    # The form resets its fields to their first values, so each author has a separate field.
    return f"annotation-author-{get_author()}"


def _build_step_key(step: int | None) -> str:
    return "annotation-of" if step is None else f"annotation-of-{step}"


def draw_queue_button(episode_filter: EpisodeFilter, order: Sort | None) -> None:
    """Draw a button on a list that opens a queue of its episodes, for a label and an author."""
    if is_read_only():
        return
    choice = st.popover("Annotate", icon=":material/edit_note:", key="annotate-these", on_change="rerun")
    if not choice.open:
        return
    with choice:
        labels = list(dict.fromkeys([RATING, *read(annotations.list_labels)]))
        label = st.selectbox("Label", labels, accept_new_options=True, key="queue-label")
        author = st.text_input("Author", value=get_author(), key="queue-author").strip()
        if not label or not author:
            return
        queue_filter = replace(episode_filter, unlabelled=(label, author))
        queue = read(annotations.read_queue, queue_filter, order)
        st.caption(
            f"{number(queue.unlabelled)} of {format_count(queue.total, 'episode')} of this list "
            f"{'is' if queue.unlabelled == 1 else 'are'} left to label."
        )
        if queue.first is not None:
            first = href(Page.EPISODE, episode=ids.to_text(queue.first), list=filters.pack_filter(queue_filter, order))
            st.html(f'<div class="trajlake-chips">{chip_link("Annotate these", first)}</div>')
