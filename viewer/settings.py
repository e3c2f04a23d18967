"""Parameters of two jobs side by side: what differs first, and of two runs only that."""

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from viewer import components as ui
from viewer import tables
from viewer.links import Page
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import word
from viewer.queries import lineage

_ROWS = 200


def table(frame: pl.DataFrame, one: str, other: str) -> None:
    """The rows of `lineage.beside` under two headings."""
    columns = {
        "setting": tables.text("Parameter"),
        "a": tables.wide(one),
        "b": tables.wide(other),
        "differs": tables.mark("Differs"),
    }
    differing = int(frame["differs"].sum())
    st.caption(f"{differing} of {frame.height} parameters differ.")
    tables.table(ui.first(frame, _ROWS, "parameters"), columns, label="Parameters side by side")


def of_runs(one: str, other: str) -> None:
    """What the newest jobs of two runs, kind by kind, were told differently."""
    parts, same = [], []
    for row in read(lineage.jobs_of_runs, one, other).iter_rows(named=True):
        found = lineage.beside(row["a_parameters"], row["b_parameters"]).filter("differs")
        if found.is_empty():
            same.append(word(row["kind"]))
        more = {"kind": pl.lit(row["kind"]), "job": pl.lit(row["a"]), "beside": pl.lit(row["b"])}
        parts.append(found.with_columns(**more))
    if not parts:
        return
    frame = pl.concat(parts)
    st.subheader("Settings that differ", anchor=False)
    if frame.height:
        columns = {
            "kind": tables.text("Job", "The newest of its kind in each run."),
            "setting": tables.text("Parameter"),
            "a": tables.wide("A"),
            "b": tables.wide("B"),
        }
        tables.table(
            ui.first(frame, _ROWS, "parameters"),
            columns,
            label="Settings that differ",
            href=lambda row: href(Page.JOB, job=ids.to_text(row["job"]), beside=ids.to_text(row["beside"])),
        )
    if same:
        st.caption(f"The same in both: all parameters of {', '.join(same)}.")
