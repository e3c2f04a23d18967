"""Jobs: everything that wrote to the lake, newest first."""

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from viewer import components as ui
from viewer import links, tables, taking
from viewer.links import JOB_STATES, Page
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import word
from viewer.queries import lineage

_COLUMNS = {
    "kind": tables.text("Kind"),
    "name": tables.text("What", "Estimator, scorer, reward, loss, source: what the job ran."),
    "status": tables.text("Status", "not ended: running, or killed."),
    "run_id": tables.text("Run"),
    "started_at": tables.time("Started (UTC)"),
    "seconds": tables.value("Seconds", digits=1),
    "rows_in": tables.value("Rows in"),
    "rows_out": tables.value("Rows out"),
    "rows_dropped": tables.value("Dropped"),
    "error": tables.text("Error"),
    "job_id": tables.ident("Job"),
}


def show() -> None:
    """The page."""
    ui.header("Jobs")
    if not read(lineage.jobs_total, None, None):
        ui.empty("No job has written to this lake yet.", "trajlake ingest FILE --lake LAKE")
        return
    with st.container(horizontal=True):
        kind = st.segmented_control("Kind", read(lineage.job_kinds), format_func=word, key="kind", **ui.FILTER)
        status = st.segmented_control("Status", JOB_STATES, format_func=ui.state, key="state", **ui.FILTER)
    total = read(lineage.jobs_total, kind, status)
    if not total:
        st.info("No job matches these filters.", icon=":material/filter_alt_off:")
        return
    order = tables.ordered_by()
    frame = read(lineage.jobs_page, kind, status, ui.pager(total, "jobs"), order)
    frame = frame.with_columns(links.jobs(frame), ui.STATE)
    tables.table(
        frame,
        tables.known(frame, _COLUMNS, order),
        label="Jobs",
        href=lambda row: href(Page.JOB, job=row["job_id"]),
        key="job_id",
        sortable=lineage.JOB_ORDERS,
    )
    taking.rows("jobs", order, kind=kind, state=status)


show()
