"""A queue for people: the episodes of any list that somebody has not labelled yet, one after the other.

A queue is a list whose filter says `unlabelled`, so it lives in the address, survives a reload, has previous and next
like any list, and shrinks with every label that is put on, whoever does. `viewer.annotations` has the form.
"""

from dataclasses import replace

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.write.annotations import RATING
from viewer import choices
from viewer.author import author
from viewer.environment import is_read_only
from viewer.links import Page
from viewer.navigation import chip_link, href
from viewer.pinned import read
from viewer.plain import number
from viewer.queries import Sort
from viewer.queries import annotations as said
from viewer.queries.episodes import EpisodeFilter


def offered(wanted: EpisodeFilter, order: Sort | None) -> None:
    """A button on a list that leads into a queue of its episodes, for a label and an author."""
    if is_read_only():
        return
    choice = st.popover("Annotate", icon=":material/edit_note:", key="annotate-these", on_change="rerun")
    if not choice.open:
        return
    with choice:
        known = list(dict.fromkeys([RATING, *read(said.labels)]))
        label = st.selectbox("Label", known, accept_new_options=True, key="queue-label")
        by = st.text_input("Author", value=author(), key="queue-author").strip()
        if not label or not by:
            return
        queued = replace(wanted, unlabelled=(label, by))
        found = read(said.queue, queued, order)
        st.caption(f"{number(found.left)} of {number(found.total)} episodes of this list are left to label.")
        if found.first is not None:
            first = href(Page.EPISODE, episode=ids.to_text(found.first), list=choices.packed(queued, order))
            st.html(f'<div class="trajlake-chips">{chip_link("Annotate these", first)}</div>')
