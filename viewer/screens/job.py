"""One job: its parameters, what it read and wrote, and what its advantages look like."""

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from viewer import choices, counts, links, settings
from viewer import components as ui
from viewer.links import Page, given
from viewer.navigation import go
from viewer.pinned import read
from viewer.plain import chip, number, one_line, percent, pretty, visible
from viewer.queries import Row, lineage, training


def show() -> None:
    """The page."""
    job_id = ui.wanted_id("job", Page.JOBS, "All jobs")
    job = read(lineage.job, job_id)
    if job is None:
        ui.not_found(f"This lake holds no job {chip(ids.to_text(job_id))}.", Page.JOBS, "All jobs")
    name = links.job(job["kind"], job["parameters"])
    ui.header(f"Job {chip(' '.join(filter(None, (job['kind'], name))), links.NAME)}")
    _facts(job)
    if job["error"]:
        st.error("The job failed.", icon=":material/error:")
        st.code(visible(job["error"]), language=None, wrap_lines=True)
    if job["kind"] == "credit" and job["status"] == "succeeded":
        _credit(job)
    _beside(job)
    left, right = st.columns(2)
    with left:
        _document("Parameters", job["parameters"])
    with right:
        _counted(job["counts"])
        _document("Table versions read", job["input_snapshot"])


def _facts(job: Row) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        ui.link(Page.JOBS, "All jobs", "arrow_back")
        ui.status_badge(job["status"])
        ui.fact("id", chip(ids.to_text(job["job_id"])))
        if job["kind"] == "credit" and job["status"] == "succeeded":
            ui.link(Page.ANCHORS, "Its anchors", "anchor", credit=ids.to_text(job["job_id"]))
        if job["run_id"] is not None:
            ui.fact("run", chip(job["run_id"]))
            ui.link(Page.RUNS, "Its run", "monitoring", run=job["run_id"])
        if job["kind"] == "train":
            ui.link(Page.TRAINING, "Metrics and batches", "model_training", job=ids.to_text(job["job_id"]))
    ui.facts(
        ("Rows in", number(job["rows_in"])),
        ("Rows out", number(job["rows_out"])),
        ("Dropped", number(job["rows_dropped"])),
        ("Seconds", number(job["seconds"], 1)),
    )
    started = f"Started {job['started_at']:%Y-%m-%d %H:%M:%S} UTC"
    ended = f", ended {job['ended_at']:%Y-%m-%d %H:%M:%S} UTC" if job["ended_at"] else ", not ended: running, or killed"
    st.caption(
        f"{started}{ended}. Series {chip(ids.to_text(job['series_id']))}, code {chip(job['code_hash'])}, "
        f"trajlake {chip(job['package_version'])}"
    )


def _credit(job: Row) -> None:
    facts = read(training.credit_summary, job["job_id"])
    whole = max(facts["steps"], 1)
    st.subheader("Its advantages", anchor=False)
    ui.facts(
        ("Steps", number(facts["steps"])),
        ("Groups", number(facts["groups"])),
        ("Dead groups", percent(facts["dead_groups"] / max(facts["groups"], 1)), "All scored siblings the same."),
        ("Shared states", percent(facts["shared"] / whole), "Steps whose state two siblings or more passed."),
        ("Positive", percent(facts["positive"] / whole)),
        ("Negative", percent(facts["negative"] / whole)),
        ("Zero", percent(facts["zero"] / whole)),
        ("Unknown", percent(facts["undefined"] / whole), "NULL: not known, which is not 0."),
        ("Mean |A|", number(facts["mean_size"])),
    )
    choices.explain(read(training.credit_named, ids.to_text(job["series_id"])))


def _beside(job: Row) -> None:
    """Its parameters beside those of another job of its kind, which the address names or the reader chooses."""
    asked = given("beside")
    others = read(lineage.like_it, job["job_id"], ids.from_text(asked) if asked and ids.is_text(asked) else None)
    if others.is_empty():
        return
    rows = {ids.to_text(row["job_id"]): row for row in others.iter_rows(named=True)}

    def label(name: str) -> str:
        row = rows[name]
        parts = (row["run_id"], links.job(row["kind"], row["parameters"]), f"{row['started_at']:%d %b %H:%M:%S}", name)
        return "  ".join(one_line(part) for part in parts if part)

    key = f"beside-{asked}"

    def remember() -> None:
        go(beside=st.session_state[key])

    chosen = st.selectbox(
        "Parameters beside those of",
        list(rows),
        index=list(rows).index(asked) if asked in rows else None,
        format_func=label,
        placeholder=f"another {job['kind']} job",
        key=key,
        on_change=remember,
    )
    if asked is not None and asked not in rows:
        ui.missing(f"{chip(asked)} is no other job of this kind.")
    if chosen is not None:
        found = read(lineage.jobs_beside, job["job_id"], rows[chosen]["job_id"])
        settings.table(found, "This job", label(chosen))


def _counted(document: str | None) -> None:
    """What the job counted; tables among it as they are written."""
    told, nested = counts.lines(document)
    st.subheader("Counts", anchor=False)
    if told:
        st.html(told)
    if nested or not told:
        st.code(visible(pretty(nested)), language=None, wrap_lines=True)


def _document(title: str, document: str | None) -> None:
    st.subheader(title, anchor=False)
    st.code(visible(pretty(document or "{}")), language=None, wrap_lines=True)


show()
