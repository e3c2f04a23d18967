"""Jobs: everything that wrote to the lake, newest first."""

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from viewer import components as ui
from viewer import links
from viewer.links import Page
from viewer.pinned import read
from viewer.plain import word
from viewer.queries import lineage

_STATUSES = ("succeeded", "failed", "started")
_COLUMNS = {
    "kind": "Kind",
    "name": ui.name_column("What", "Estimator, scorer, reward, loss, source: what the job ran."),
    "status": st.column_config.TextColumn("Status", help="started: running, or killed before its last row."),
    "run_id": ui.name_column("Run"),
    "started_at": st.column_config.DatetimeColumn("Started (UTC)", format="YYYY-MM-DD HH:mm:ss", timezone="UTC"),
    "seconds": ui.number_column("Seconds", format="%.1f"),
    "rows_in": ui.count_column("Rows in"),
    "rows_out": ui.count_column("Rows out"),
    "rows_dropped": ui.count_column("Dropped"),
    "job_id": ui.id_column("Job"),
    "error": "Error",
}


def show() -> None:
    """The page."""
    ui.header("Jobs")
    if not read(lineage.jobs_total, None, None):
        ui.empty("No job has written to this lake yet.", "trajlake ingest FILE --lake LAKE")
        return
    with st.container(horizontal=True):
        kind = st.segmented_control("Kind", read(lineage.job_kinds), format_func=word, key="kind", **ui.FILTER)
        status = st.segmented_control("Status", _STATUSES, key="state", **ui.FILTER)
    total = read(lineage.jobs_total, kind, status)
    if not total:
        st.info("No job matches these filters.", icon=":material/filter_alt_off:")
        return
    frame = read(lineage.jobs_page, kind, status, ui.pager(total, "jobs"))
    clicked = ui.table(frame.with_columns(links.jobs(frame)), "jobs", _COLUMNS, opens="Open the job")
    if clicked is not None:
        ui.go(Page.JOB, job=ids.to_text(frame["job_id"][clicked]))


show()
