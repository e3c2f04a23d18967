"""One job: its parameters, what it read and wrote, and what its advantages look like."""

import json

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from viewer import links
from viewer.components import header, not_found, status_badge, tiles, wanted_id
from viewer.links import Page, parameters
from viewer.pinned import read
from viewer.plain import chip, number, percent, visible
from viewer.queries import credit, lineage
from viewer.queries.base import Row


def show() -> None:
    """The page."""
    job_id = wanted_id("job", Page.JOBS, "All jobs")
    job = read(lineage.job, job_id)
    if job is None:
        not_found(f"This lake holds no job {chip(ids.to_text(job_id))}.", Page.JOBS, "All jobs")
    name = links.job(job["kind"], job["parameters"])
    header(f"Job {chip(' '.join(filter(None, (job['kind'], name))), links.NAME)}")
    _facts(job)
    if job["error"]:
        st.error("The job failed.", icon=":material/error:")
        st.code(visible(job["error"]), language=None, wrap_lines=True)
    if job["kind"] == "credit" and job["status"] == "succeeded":
        _credit(job_id)
    left, right = st.columns(2)
    with left:
        _document("Parameters", job["parameters"])
    with right:
        _document("Counts", job["counts"])
        _document("Table versions read", job["input_snapshot"])


def _facts(job: Row) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        st.page_link(Page.JOBS, label="All jobs", icon=":material/arrow_back:")
        status_badge(job["status"])
        st.markdown(f":gray[id] {chip(ids.to_text(job['job_id']))}", width="content")
        if job["run_id"] is not None:
            st.markdown(f":gray[run] {chip(job['run_id'])}", width="content")
            st.page_link(
                Page.RUNS, label="Its run", icon=":material/monitoring:", query_params=parameters(run=job["run_id"])
            )
        if job["kind"] == "train":
            here = parameters(job=ids.to_text(job["job_id"]))
            st.page_link(
                Page.TRAINING, label="Metrics and batches", icon=":material/model_training:", query_params=here
            )
    tiles(
        [
            ("Rows in", number(job["rows_in"]), None),
            ("Rows out", number(job["rows_out"]), None),
            ("Dropped", number(job["rows_dropped"]), None),
            ("Seconds", number(job["seconds"], 1), None),
        ]
    )
    started = f"Started {job['started_at']:%Y-%m-%d %H:%M:%S} UTC"
    ended = f", ended {job['ended_at']:%Y-%m-%d %H:%M:%S} UTC" if job["ended_at"] else ", not ended: running, or killed"
    st.caption(
        f"{started}{ended}. Series {chip(ids.to_text(job['series_id']))}, code {chip(job['code_hash'])}, "
        f"trajlake {chip(job['package_version'])}"
    )


def _credit(job_id: int) -> None:
    facts = read(credit.summary, job_id)
    whole = max(facts["steps"], 1)
    st.subheader("Its advantages", anchor=False)
    tiles(
        [
            ("Steps", number(facts["steps"]), None),
            ("Groups", number(facts["groups"]), None),
            ("Dead groups", percent(facts["dead_groups"] / max(facts["groups"], 1)), "All scored siblings the same."),
            ("Shared states", percent(facts["shared"] / whole), "Steps whose state two siblings or more passed."),
            ("Positive", percent(facts["positive"] / whole), None),
            ("Negative", percent(facts["negative"] / whole), None),
            ("Zero", percent(facts["zero"] / whole), None),
            ("Unknown", percent(facts["undefined"] / whole), "NULL: not known, which is not 0."),
            ("Mean |A|", number(facts["mean_size"]), None),
        ]
    )


def _document(title: str, document: str | None) -> None:
    st.subheader(title, anchor=False)
    try:
        text = json.dumps(json.loads(document or "{}"), ensure_ascii=False, indent=2)
    except (ValueError, RecursionError):
        text = document or ""
    st.code(visible(text), language="json", wrap_lines=True)


show()
