"""Jobs and rejects: the list of jobs, one job with its parameters, counts and advantages, and rejected input."""

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from viewer import components as ui
from viewer import download, filters, navigation, run_details, tables
from viewer.navigation import JOB_STATES, Page, change_address, get_parameter, go, href
from viewer.plain import chip, format_json, number, one_line, percent, visible, word
from viewer.queries import Row, lineage, training
from viewer.session import read

_JOB_COLUMNS = {
    "kind": tables.text("Kind"),
    "name": tables.text("Name", "Estimator, scorer, reward, loss or source of the job."),
    "status": tables.text("Status", "Not ended: running or killed."),
    "run_id": tables.text("Run"),
    "rounds": tables.text(
        "Rounds", "Collection rounds that it recorded; the page of a job also has those that it read."
    ),
    "started_at": tables.time("Started (UTC)"),
    "seconds": tables.value("Seconds", digits=1),
    "rows_in": tables.value("Rows in"),
    "rows_out": tables.value("Rows out"),
    "rows_dropped": tables.value("Dropped"),
    "error": tables.text("Error"),
    "job_id": tables.ident("Job"),
}
_FIRST, _LAST = pl.col("first_round"), pl.col("last_round")
_ROUNDS = (
    pl.when(_FIRST == _LAST)
    .then(pl.format("{}", _FIRST))
    .otherwise(pl.format("{}\N{EN DASH}{}", _FIRST, _LAST))
    .alias("rounds")
)


def show_jobs() -> None:
    """Draw the list of jobs, newest first by default."""
    ui.draw_header("Jobs")
    if not read(lineage.count_jobs, None, None):
        ui.draw_empty("No job has written to this lake yet.", "trajlake ingest FILE --lake LAKE")
        return
    with st.container(horizontal=True):
        kind = st.segmented_control("Kind", read(lineage.list_job_kinds), format_func=word, key="kind", **ui.FILTER)
        status = st.segmented_control("Status", JOB_STATES, format_func=ui.describe_state, key="state", **ui.FILTER)
    total = read(lineage.count_jobs, kind, status)
    if not total:
        st.info("No job matches these filters.", icon=":material/filter_alt_off:")
        return
    order = tables.read_order()
    frame = read(lineage.read_jobs, kind, status, ui.draw_pager(total, "jobs"), order)
    frame = frame.with_columns(navigation.name_jobs(frame), ui.STATE, _ROUNDS)
    tables.draw_table(
        frame,
        tables.select_filled(frame, _JOB_COLUMNS, order),
        label="Jobs",
        href=lambda row: href(Page.JOB, job=row["job_id"]),
        key="job_id",
        sortable=lineage.JOB_ORDERS,
    )
    download.draw_csv_link("jobs", order, kind=kind, state=status)


def show_job() -> None:
    """Draw one job: its parameters, its input and output, and figures of its advantages."""
    job_id = ui.read_required_id("job", Page.JOBS, "All jobs")
    job = read(lineage.read_job, job_id)
    if job is None:
        ui.end_with_not_found(f"This lake holds no job {chip(ids.to_text(job_id))}.", Page.JOBS, "All jobs")
    name = navigation.name_job(job["kind"], job["parameters"])
    ui.draw_header(f"Job {chip(' '.join(filter(None, (job['kind'], name))), navigation.MAX_NAME)}")
    _draw_facts(job)
    if job["error"]:
        st.error("The job failed.", icon=":material/error:")
        st.code(visible(job["error"]), language=None, wrap_lines=True)
    if job["kind"] == "credit" and job["status"] == "succeeded":
        facts = read(training.summarise_credit, job["job_id"])
        total_steps = max(facts["steps"], 1)
        st.subheader("Its advantages", anchor=False)
        ui.draw_facts(
            ("Steps", number(facts["steps"])),
            ("Groups", number(facts["groups"])),
            ("Dead groups", percent(facts["dead_groups"] / max(facts["judged_groups"], 1)), run_details.DEAD_MEANING),
            ("Shared states", percent(facts["shared"] / total_steps), "Steps whose state two or more siblings passed."),
            *((name.capitalize(), percent(facts[name] / total_steps)) for name in ("positive", "negative", "zero")),
            ("Unknown", percent(facts["undefined"] / total_steps), "NULL: unknown, which is not 0."),
            ("Mean |A|", number(facts["mean_size"])),
        )
        filters.explain_credit(read(training.look_up_credit, ids.to_text(job["series_id"])))
    if (missing := read(lineage.count_missing_scores, job["job_id"])).height:
        columns = {"scorer": tables.text("Scorer"), "reason": tables.wide("Reason"), "scores": tables.value("Scores")}
        tables.draw_table(missing, columns, label="Scores without a value")
    _draw_settings(job)
    parameters_column, counts_column = st.columns(2)
    with parameters_column:
        _draw_document("Parameters", job["parameters"])
    with counts_column:
        summary, details = run_details.render_counts(job["counts"])
        st.subheader("Counts", anchor=False)
        if summary:
            st.html(summary)
        if details or not summary:
            st.code(visible(format_json(details)), language=None, wrap_lines=True)
        _draw_document("Table versions read", job["input_snapshot"])


def _draw_facts(job: Row) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        ui.draw_link(Page.JOBS, "All jobs", "arrow_back")
        ui.draw_status_badge(job["status"])
        ui.draw_fact("id", chip(ids.to_text(job["job_id"])))
        if job["kind"] == "credit" and job["status"] == "succeeded":
            ui.draw_link(Page.ANCHORS, "Its anchors", "anchor", credit=ids.to_text(job["job_id"]))
        if job["run_id"] is not None:
            ui.draw_fact("run", chip(job["run_id"]))
            ui.draw_link(Page.RUNS, "Its run", "monitoring", run=job["run_id"])
        if job["kind"] == "train":
            ui.draw_link(Page.TRAINING, "Metrics and batches", "model_training", job=ids.to_text(job["job_id"]))
    of_job = read(lineage.read_job_rounds, (job["job_id"],))
    rounds = of_job.select(_ROUNDS).item() if of_job.height else "unknown"
    ui.draw_facts(
        ("Rows in", number(job["rows_in"])),
        ("Rows out", number(job["rows_out"])),
        ("Dropped", number(job["rows_dropped"])),
        ("Seconds", number(job["seconds"], 1)),
        ("Rounds", rounds, "Collection rounds that it collected, or whose episodes it read; of all its runs."),
    )
    started = f"Started {job['started_at']:%Y-%m-%d %H:%M:%S} UTC"
    ended = f", ended {job['ended_at']:%Y-%m-%d %H:%M:%S} UTC" if job["ended_at"] else ", not ended: running or killed"
    st.caption(
        f"{started}{ended}. Series {chip(ids.to_text(job['series_id']))}, code {chip(job['code_hash'])}, "
        f"trajlake {chip(job['package_version'])}"
    )


def _draw_settings(job: Row) -> None:
    """Draw the job's parameters next to those of another job of its kind, from the address or the reader's choice."""
    beside = get_parameter("beside")
    beside_id = ids.from_text(beside) if beside and ids.is_text(beside) else None
    similar_jobs = read(lineage.list_similar_jobs, job["job_id"], beside_id)
    if similar_jobs.is_empty():
        return
    rows = {ids.to_text(row["job_id"]): row for row in similar_jobs.iter_rows(named=True)}

    def label(name: str) -> str:
        row = rows[name]
        job_name = navigation.name_job(row["kind"], row["parameters"])
        words = (row["run_id"], job_name, f"{row['started_at']:%d %b %H:%M:%S}", name)
        return "  ".join(one_line(part) for part in words if part)

    key = f"compared-job-{beside}"
    choice = st.selectbox(
        "Compare parameters with",
        list(rows),
        index=list(rows).index(beside) if beside in rows else None,
        format_func=label,
        placeholder=f"another {job['kind']} job",
        key=key,
        on_change=lambda: go(beside=st.session_state[key]),
    )
    if beside is not None and beside not in rows:
        ui.warn_of_missing(f"{chip(beside)} is not another job of this kind.")
    if choice is not None:
        frame = read(lineage.compare_jobs, job["job_id"], rows[choice]["job_id"])
        run_details.draw_settings(frame, "This job", label(choice))


def _draw_document(title: str, document: str | None) -> None:
    st.subheader(title, anchor=False)
    st.code(visible(format_json(document or "{}")), language=None, wrap_lines=True)


_REJECT_COLUMNS = {
    "reason": tables.text("Reason"),
    "source_uri": tables.text("Source"),
    "position": tables.value("Position", "Line number from 1 (JSONL), or index from 0 in an array."),
    "message": tables.wide("Message"),
    "source_format": tables.text("Format"),
    "run_id": tables.text("Run"),
    "at": tables.time("At (UTC)"),
    "reject_id": tables.ident("Reject"),
}


def show_rejects() -> None:
    """Draw the rejected input: the reasons, and the text of the chosen reject."""
    ui.draw_header("Rejects")
    reasons = read(lineage.count_reject_reasons)
    if not reasons:
        st.success("The lake accepted every input record: there are no rejects.", icon=":material/check_circle:")
        return
    reason = st.segmented_control("Reason", list(reasons), format_func=word, key="reason", **ui.FILTER)
    st.caption(", ".join(f"{chip(name)} {number(count)}" for name, count in reasons.items()))
    run = get_parameter("run")
    total = read(lineage.count_rejects, reason, run)
    if not total:
        st.info("No reject matches.", icon=":material/filter_alt_off:")
        return
    order = tables.read_order()
    frame = read(lineage.read_rejects, reason, run, ui.draw_pager(total, "rejects"), order)
    tables.draw_table(
        frame,
        tables.select_filled(frame, _REJECT_COLUMNS, order),
        label="Rejects",
        href=lambda row: change_address(reject=row["reject_id"]),
        key="reject_id",
        selected=get_parameter("reject"),
        sortable=lineage.REJECT_ORDERS,
    )
    download.draw_csv_link("rejects", order, reason=reason, run=run)
    text = get_parameter("reject")
    if text is None:
        st.caption("Choose a reject to see its text.")
        return
    reject = read(lineage.read_reject, ids.from_text(text)) if ids.is_text(text) else None
    if reject is None:
        ui.warn_of_missing(f"This lake holds no reject {chip(text)}.")
        return
    position = f"position {number(reject['position'])} of " if reject["position"] is not None else ""
    st.subheader(f"Reject: {position}{chip(reject['source_uri'])}", anchor=False)
    st.text(visible(reject["message"]))
    raw = reject["raw"]
    st.code(visible(raw), language=None, wrap_lines=True, height=420 if len(raw) > 3000 else "content")
    if reject["raw_length"] > len(raw):
        st.caption(f"The first {len(raw):,} of {reject['raw_length']:,} characters.")
    ui.draw_link(Page.JOB, "The job that rejected it", "account_tree", job=ids.to_text(reject["job_id"]))
