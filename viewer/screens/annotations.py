"""Annotations: what people said, the newest first, and how far they agree."""

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from viewer import components as ui
from viewer import tables
from viewer.links import Page
from viewer.navigation import href
from viewer.pinned import read
from viewer.queries import Row, annotations

_COLUMNS = {
    "at": tables.time("At (UTC)"),
    "author": tables.text("Author"),
    "label": tables.text("Label"),
    "value": tables.value("Number"),
    "text": tables.wide("Words"),
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task"),
    "rollout_index": tables.value("Rollout"),
    "step_index": tables.value("Step", "A dash: the whole episode."),
    "episode_id": tables.ident("Episode"),
}
_AGREEMENT = {
    "label": tables.text("Label"),
    "first": tables.text("One"),
    "second": tables.text("The other"),
    "places": tables.value("Both", "Episodes and steps that both have labelled."),
    "same": tables.share("Same answer"),
    "kappa": tables.value("Kappa", "Agreement beyond chance (Cohen 1960): 1 is all, 0 what chance would give."),
}


def show() -> None:
    """The page."""
    ui.header("Annotations")
    total = read(annotations.total)
    if not total:
        advice = "trajlake annotate EPISODE --lake LAKE --value 1      # or the form on an episode's page"
        ui.empty("Nobody has said anything of this lake's episodes yet.", advice)
        return
    agreement = read(annotations.agreement)
    if agreement.height:
        st.subheader("Agreement", anchor=False)
        tables.table(agreement, _AGREEMENT, label="Agreement")
    frame = read(annotations.page, ui.pager(total, "annotations"), tables.ordered_by())
    tables.table(frame, _COLUMNS, label="Annotations", href=_episode, key="episode_id", sortable=annotations.ORDERS)


def _episode(row: Row) -> str:
    return href(Page.EPISODE, episode=row["episode_id"], step=row["step_index"])


show()
