"""Rejects: input that could not be taken, why, and its raw text."""

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from viewer import components as ui
from viewer import tables, taking
from viewer.links import Page, given
from viewer.navigation import changed
from viewer.pinned import read
from viewer.plain import chip, number, visible, word
from viewer.queries import lineage

_COLUMNS = {
    "reason": tables.text("Reason"),
    "source_uri": tables.text("Source"),
    "position": tables.value("Position", "Line number from 1 (JSONL), or index from 0 in an array."),
    "message": tables.wide("Message"),
    "source_format": tables.text("Format"),
    "run_id": tables.text("Run"),
    "at": tables.time("At (UTC)"),
    "reject_id": tables.ident("Reject"),
}


def show() -> None:
    """The page."""
    ui.header("Rejects")
    reasons = read(lineage.reject_reasons)
    if not reasons:
        st.success("Every input record was taken: there are no rejects.", icon=":material/check_circle:")
        return
    reason = st.segmented_control("Reason", list(reasons), format_func=word, key="reason", **ui.FILTER)
    st.caption(", ".join(f"{chip(name)} {number(count)}" for name, count in reasons.items()))
    run = given("run")
    total = read(lineage.rejects_total, reason, run)
    if not total:
        st.info("No reject matches.", icon=":material/filter_alt_off:")
        return
    order = tables.ordered_by()
    frame = read(lineage.rejects_page, reason, run, ui.pager(total, "rejects"), order)
    tables.table(
        frame,
        tables.known(frame, _COLUMNS, order),
        label="Rejects",
        href=lambda row: changed(reject=row["reject_id"]),
        key="reject_id",
        chosen=given("reject"),
        sortable=lineage.REJECT_ORDERS,
    )
    taking.rows("rejects", order, reason=reason, run=run)
    _raw()


def _raw() -> None:
    """The raw text of the reject that the address names."""
    text = given("reject")
    if text is None:
        st.caption("Choose a reject to see its text.")
        return
    found = read(lineage.reject, ids.from_text(text)) if ids.is_text(text) else None
    if found is None:
        ui.missing(f"This lake holds no reject {chip(text)}.")
        return
    place = f"position {number(found['position'])} of " if found["position"] is not None else ""
    st.subheader(f"Reject: {place}{chip(found['source_uri'])}", anchor=False)
    st.text(visible(found["message"]))
    st.code(
        visible(found["raw"]), language=None, wrap_lines=True, height=420 if len(found["raw"]) > 3000 else "content"
    )
    if found["raw_length"] > len(found["raw"]):
        st.caption(f"The first {len(found['raw']):,} of {found['raw_length']:,} characters.")
    ui.link(Page.JOB, "The job that rejected it", "account_tree", job=ids.to_text(found["job_id"]))


show()
