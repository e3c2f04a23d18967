"""Annotations: what people said, the newest first, and how far they agree."""

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from viewer import components as ui
from viewer import tables, taking
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
_BEYOND = "Agreement beyond chance (Cohen 1960): 1 is all, 0 what chance would give, less is contradiction."
_AGREEMENT = {
    "label": tables.text("Label"),
    "first": tables.text("One"),
    "second": tables.text("The other"),
    "places": tables.value("Both", "Episodes and steps that both have labelled."),
    "same": tables.share("Same answer"),
    "kappa": tables.value("Kappa", _BEYOND),
}
_SCORERS = {
    "scorer": tables.text("Scorer"),
    "people": tables.text("People", "The scorer that stands for their label: human for ratings."),
    "episodes": tables.value("Episodes", "That both have judged."),
    "rank": tables.Column(
        "Rank correlation", tables.Kind.SIGNED, "Spearman's: +1 the same order, \N{MINUS SIGN}1 reversed."
    ),
    "same": tables.share("Same answer", "High or low."),
    "kappa": tables.Column(
        "Kappa", tables.Kind.SIGNED, "Agreement beyond chance (Cohen 1960); negative: they contradict."
    ),
    "opposite": tables.mark("Says the opposite", "Its rank correlation with people is below 0."),
    "people_from": tables.value("People high from"),
    "scorer_from": tables.value("Scorer high from"),
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
    _scorers()
    st.subheader("What people said", anchor=False)
    order = tables.ordered_by()
    frame = read(annotations.page, ui.pager(total, "annotations"), order)
    columns = tables.known(frame, _COLUMNS, order)
    tables.table(frame, columns, label="Annotations", href=_episode, key="episode_id", sortable=annotations.ORDERS)
    taking.rows("annotations", order)


def _scorers() -> None:
    """How far scorers agree with people; a row opens the episodes on which they do not."""
    frame = read(annotations.scorers)
    if frame.is_empty():
        return
    st.subheader("Scorers against people", anchor=False)

    def disagreements(row: Row) -> str:
        if row["same"] is None or row["same"] == 1:
            return ""
        named = (row["people"], row["scorer"], row["people_from"], row["scorer_from"])
        about = f"{row['scorer']} and {row['people']} differ"
        return href(Page.EPISODES, sql=annotations.disagreed(*named), about=about)

    frame = frame.with_columns(opposite=pl.col("rank") < 0)
    tables.table(frame, tables.known(frame, _SCORERS), label="Scorers against people", href=disagreements)
    st.caption(
        "A side's answer is high from the middle of its range on these episodes, else low. A row opens the episodes on "
        "which the two differ."
    )


def _episode(row: Row) -> str:
    return href(Page.EPISODE, episode=row["episode_id"], step=row["step_index"])


show()
