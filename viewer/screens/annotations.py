"""Annotations: labels by people, the newest first, and their agreement with each other and with scorers."""

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from viewer import components as ui
from viewer import download, tables
from viewer.navigation import Page, href
from viewer.queries import Row, annotations
from viewer.session import read

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
_KAPPA = "Agreement beyond chance (Cohen 1960). 1: full agreement, 0: as by chance, below 0: contradiction."
_AGREEMENT_COLUMNS = {
    "label": tables.text("Label"),
    "first": tables.text("First author"),
    "second": tables.text("Second author"),
    "places": tables.value("Both", "Episodes and steps that both authors labelled."),
    "same": tables.share("Same answer"),
    "kappa": tables.value("Kappa", _KAPPA),
}
_SCORER_COLUMNS = {
    "scorer": tables.text("Scorer"),
    "people": tables.text("People", "The scorer of a label: human for ratings."),
    "episodes": tables.value("Episodes", "Episodes that both judged."),
    "rank": tables.TableColumn(
        "Rank correlation",
        kind=tables.Kind.SIGNED,
        explanation="Spearman's correlation. +1: the same order, \N{MINUS SIGN}1: the reverse order.",
    ),
    "same": tables.share("Same answer", "Both high or both low."),
    "kappa": tables.TableColumn(
        "Kappa", kind=tables.Kind.SIGNED, explanation="Agreement beyond chance (Cohen 1960). Below 0: contradiction."
    ),
    "opposite": tables.mark("Opposite", "The rank correlation with people is below 0."),
    "people_from": tables.value("People high from"),
    "scorer_from": tables.value("Scorer high from"),
}


def show_annotations() -> None:
    """Draw the annotations and their agreement."""
    ui.draw_header("Annotations")
    total = read(annotations.count_annotations)
    if not total:
        advice = "trajlake annotate EPISODE --lake LAKE --value 1      # or the form on an episode's page"
        ui.draw_empty("This lake has no annotations yet.", advice)
        return
    agreement = read(annotations.compute_agreement)
    if agreement.height:
        st.subheader("Agreement", anchor=False)
        tables.draw_table(agreement, _AGREEMENT_COLUMNS, label="Agreement")
    _draw_scorers()
    st.subheader("Labels by people", anchor=False)
    order = tables.read_order()
    frame = read(annotations.read_page, ui.draw_pager(total, "annotations"), order)
    columns = tables.select_filled(frame, _COLUMNS, order)
    tables.draw_table(
        frame,
        columns,
        label="Annotations",
        href=lambda row: href(Page.EPISODE, episode=row["episode_id"], step=row["step_index"]),
        key="episode_id",
        sortable=annotations.ORDERS,
    )
    download.draw_csv_link("annotations", order)


def _draw_scorers() -> None:
    """Draw how far scorers agree with people; a row opens the episodes on which the two differ."""
    frame = read(annotations.compare_scorers)
    if frame.is_empty():
        return
    st.subheader("Scorers against people", anchor=False)

    def disagreements(row: Row) -> str:
        if row["same"] is None or row["same"] == 1:
            return ""
        named = (row["people"], row["scorer"], row["people_from"], row["scorer_from"])
        about = f"{row['scorer']} and {row['people']} differ"
        return href(Page.EPISODES, sql=annotations.build_disagreements_sql(*named), about=about)

    frame = frame.with_columns(opposite=pl.col("rank") < 0)
    tables.draw_table(
        frame, tables.select_filled(frame, _SCORER_COLUMNS), label="Scorers against people", href=disagreements
    )
    st.caption(
        "An answer is high if it is at least the middle of its side's range on these episodes. A row opens "
        "the episodes on which the two differ."
    )
