"""Training: metrics of a job; a click on a point opens the batch of that update with its episodes and advantages."""

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.judgements.credit import Credit
from lake.read.text_table import count_noun
from lake.read.training import METRICS, ROUND_METRICS
from viewer import changed_data, figures, navigation, tables, training_sections
from viewer import components as ui
from viewer.figures import POSITIVE
from viewer.navigation import Page, get_int, get_last_run, get_parameter, go
from viewer.plain import chip, one_line
from viewer.queries import Row, training
from viewer.queries.training import Loop
from viewer.session import read

_FIRST_METRICS = 6
_MORE_METRICS = 30
_RATE = "learning_rate"
"""A metric that is with the first ones if it changes."""
_SPANS = {"off": 1, "10": 10, "50": 50, "200": 200}
_MEANINGS = METRICS | ROUND_METRICS


@dataclass(frozen=True, slots=True)
class ChartOptions:
    """The job of the charts, and how they are drawn."""

    job_id: int
    update: int | None
    """The marked update."""
    span: int
    """Points of the moving average; 1: no average."""
    alarms: list[tuple[int, int]]
    """Stretches of updates with an active alarm."""
    jumps: list[tuple[int, int]]
    """Updates at which the learning rate jumped, as stretches of one."""
    other_curves: pl.DataFrame
    """Curves of other jobs: job (its label), name, step, value."""
    colours: dict[str, str]
    """Colours of these jobs, by label."""


def show_training() -> None:
    """Draw a training job, or an online run with its training."""
    ui.draw_header("Training")
    jobs = _list_jobs()
    if jobs.is_empty():
        advice = "trajlake train --lake LAKE ...      # or: trajlake demo"
        ui.draw_empty("No training job has written to this lake yet.", advice)
        return
    began = time.monotonic()
    jobs = ui.draw_first_rows(
        jobs, training.JOBS, "jobs are listed: the newest and those of the address; *Jobs* lists all"
    )

    def label(row: Row) -> str:
        run = one_line(row["run_id"] or row["kind"])
        name = ("loop " if row["online"] else "") + one_line(navigation.name_job(row["kind"], row["parameters"]) or "")
        updates = count_noun(row["updates"], "update")
        state = ui.describe_state(row["status"])
        if row["status"] == "started" and row["last_at"] is not None:
            state += f", last metrics {row['last_at']:%d %b %H:%M:%S}"
        words = (run, name, updates, state, f"{row['started_at']:%d %b %H:%M:%S}", ids.to_text(row["job_id"]))
        return "  ".join(filter(None, words))

    labels = {ids.to_text(row["job_id"]): label(row) for row in jobs.iter_rows(named=True)}
    job_id, loop = _choose_job(jobs, labels)
    if loop is not None:
        training_sections.draw_loop(loop)
        st.subheader("Updates", anchor=False)
    credit = read(training.find_credit_of_job, job_id)
    update = _choose_update(job_id)
    frame = read(training.read_metrics, job_id)
    metrics = figures.sort_by_interest(frame["name"].unique())
    if _RATE in metrics[_FIRST_METRICS:] and frame.filter(name=_RATE)["value"].n_unique() > 1:
        metrics.remove(_RATE)
        metrics.insert(_FIRST_METRICS - 1, _RATE)
    options = _draw_controls(job_id, labels, update)
    _draw_grid(frame, metrics[:_FIRST_METRICS], options)
    if update is not None:
        training_sections.draw_update(job_id, update, credit, labels)
    _draw_further_metrics(frame, metrics[_FIRST_METRICS:], options)
    _draw_consumption(credit, options)
    training_sections.draw_intake(job_id)
    _draw_checkpoints(job_id)
    if loop is not None:
        training_sections.follow_loop(loop, time.monotonic() - began)


def _list_jobs() -> pl.DataFrame:
    """Return the jobs that can be chosen: the newest, and those that the address names."""
    newest = read(training.list_jobs, (), training.JOBS)
    job, update = _resolve_training_job(get_parameter("job")), get_int("update")
    job_ids = [ids.from_text(text) for text in (job, *st.query_params.get_all("beside")) if text and ids.is_text(text)]
    if job is None and update is not None:
        job_ids += read(training.list_jobs_with_update, update)[:1]
    older = tuple(job_id for job_id in job_ids if job_id not in newest["job_id"])
    is_cut = newest.height and newest["total"][0] > newest.height
    return read(training.list_jobs, older, training.JOBS) if older and is_cut else newest


def _choose_job(jobs: pl.DataFrame, labels: dict[str, str]) -> tuple[int, Loop | None]:
    """Draw the choice of the job and return it with its online run.

    The address names the job. Otherwise it is a job of the run that the reader last looked at, or else the newest job
    with updates.
    """
    options = list(labels)
    job = _resolve_training_job(get_parameter("job"))
    if job is not None and job.lower() not in options:
        ui.end_with_not_found(f"This lake holds no training job {chip(job)}.", Page.TRAINING, "The newest training job")
    rows = dict(zip(options, jobs.iter_rows(named=True), strict=True))
    newest = next((option for option in options if rows[option]["updates"] or rows[option]["online"]), options[0])
    update = get_int("update")
    if job is None and update is None:
        run = get_last_run()
        run_jobs = (
            name for name, row in rows.items() if row["run_id"] == run and (row["kind"] == "train" or row["online"])
        )
        job = None if run is None else next(run_jobs, None)
    elif job is None and update is not None:
        having = map(ids.to_text, read(training.list_jobs_with_update, update))
        newest = next((option for option in having if option in rows), newest)
    selected = job.lower() if job else newest
    # A browser remembers the label of its choice, and labels of a running job change, so they are part of the key. The
    # selected job is another part, because only the address decides it.
    key = f"training-job-{selected}-{hashlib.blake2b(str(labels).encode(), digest_size=8).hexdigest()}"

    def remember() -> None:
        go(job=st.session_state[key], update=None, round=None, rounds=None, page=None)

    choice = st.selectbox(
        "Job", options, index=options.index(selected), format_func=labels.__getitem__, key=key, on_change=remember
    )
    job_id = ids.from_text(choice)
    loop = read(training.find_loop, job_id) if rows[choice]["online"] else None
    if loop is None:
        with st.container(horizontal=True, vertical_alignment="center"):
            ui.draw_status_badge(rows[choice]["status"])
            ui.draw_link(Page.JOB, "Parameters and lineage", "account_tree", job=choice)
    return job_id, loop


def _resolve_training_job(job: str | None) -> str | None:
    """Return the job that the address names; for the job of an online run, its training job."""
    if job is None or not ids.is_text(job):
        return job
    loop = read(training.find_loop, ids.from_text(job))
    return job if loop is None else ids.to_text(loop.train_job)


def _choose_update(job_id: int) -> int | None:
    """Return the optimizer step that the address names, if the job has it."""
    bounds = read(training.find_update_range, job_id)
    if bounds is None:
        return None
    first, last = bounds
    update = get_int("update")
    if update is not None and not first <= update <= last:
        ui.warn_of_missing(f"The job has updates {first} to {last}, no update {update}.")
        update = None
    return update


def _go_to_update(job_id: int, update: int | None) -> None:
    """Put an update and its job into the address; only within a callback."""
    go(job=ids.to_text(job_id), update=update, page=None)


def _draw_controls(job_id: int, labels: dict[str, str], update: int | None) -> ChartOptions:
    """Draw the controls above the charts and return their values: update, smoothing, other jobs."""
    other_jobs = [option for option in labels if option != ids.to_text(job_id)]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        _draw_update_field(job_id, update)
        smoothing = st.segmented_control(
            "Moving average", list(_SPANS), default="off", key="average", bind="query-params", required=True
        )
        selection = _choose_other_jobs(job_id, other_jobs, labels) if other_jobs else []
    curves = [
        read(training.read_metrics, ids.from_text(option)).with_columns(job=pl.lit(labels[option]))
        for option in selection
    ]
    empty = pl.DataFrame(schema={"name": pl.String, "step": pl.Int64, "value": pl.Float64, "job": pl.String})
    colours = dict(zip((labels[option] for option in selection), figures.OTHER_COLOURS, strict=False))
    if selection:
        ui.draw_legend({labels[ids.to_text(job_id)]: POSITIVE} | colours)
    alarms, stretches = read(training.list_alarms, job_id)
    if alarms:
        cut = f"; the first {len(alarms):,} of {stretches:,} stretches" if stretches > len(alarms) else ""
        st.caption(f"Shaded: an active alarm ({count_noun(sum(b - a + 1 for a, b in alarms), 'update')}{cut}).")
    jumps = read(training.find_rate_jumps, job_id)
    if jumps:
        steps = ", ".join(f"{step:,} ({before:.3g} to {after:.3g})" for step, before, after in jumps)
        st.caption(f"Shaded in {chip(_RATE)}: a jump by more than a factor of 2 that is no warm-up, at update {steps}.")
    if (per_point := read(training.count_updates_per_point, job_id)) > 1:
        st.caption(f"Each point is the mean of {per_point:,} updates; a click opens the first of them.")
    drawn = pl.concat([empty, *(curve.select(empty.columns) for curve in curves)])
    return ChartOptions(
        job_id, update, _SPANS[str(smoothing)], alarms, [(step, step) for step, _, _ in jumps], drawn, colours
    )


def _draw_update_field(job_id: int, update: int | None) -> None:
    bounds = read(training.find_update_range, job_id)
    if bounds is None:
        st.caption("This job has recorded no batches.")
        return
    first, last = bounds
    key = f"update-field-{job_id}-{update}"
    st.session_state.setdefault(key, update)  # a default value could not be deleted from the field
    st.number_input(
        f"Update, {first} to {last}",
        min_value=first,
        max_value=last,
        value=None,
        placeholder="or click on a point",
        key=key,
        on_change=lambda: _go_to_update(job_id, st.session_state[key]),
        width=200,
        help="Shows the batch of the update. A click on a point of a chart does the same. The first update is 0, as in "
        "the tables and in the output of `trajlake train`.",
    )


def _choose_other_jobs(job_id: int, options: list[str], labels: dict[str, str]) -> list[str]:
    """Draw the choice of further jobs for the charts; the address holds it."""
    selection = [option for option in st.query_params.get_all("beside") if option in options][
        : len(figures.OTHER_COLOURS)
    ]
    key = f"other-jobs-{'-'.join(selection)}"
    st.multiselect(
        "Compare with",
        options,
        default=selection,
        format_func=labels.__getitem__,
        max_selections=len(figures.OTHER_COLOURS),
        placeholder="Other jobs",
        key=key,
        on_change=lambda: go(job=ids.to_text(job_id), beside=st.session_state[key]),
    )
    return selection


def _draw_further_metrics(frame: pl.DataFrame, metrics: list[str], options: ChartOptions) -> None:
    if not metrics:
        return
    expander = st.expander(f"{len(metrics)} more metrics", icon=":material/show_chart:", key="more", on_change="rerun")
    if not expander.open:
        return
    with expander:
        _draw_grid(frame, metrics[:_MORE_METRICS], options)
        if len(metrics) > _MORE_METRICS:
            hidden = len(metrics) - _MORE_METRICS
            st.caption(f"{hidden} further metrics have no chart; `trajlake sql` on `run_metrics` reads them.")


def _draw_grid(frame: pl.DataFrame, metrics: list[str], options: ChartOptions) -> None:
    if not metrics:
        st.info(
            "This job has written no metrics yet. They come with its checkpoints (`checkpoint_every`) and its end.",
            icon=":material/info:",
        )
        return
    grid = st.columns(3)
    for position, name in enumerate(metrics):
        column = grid[position % 3]
        column.markdown(f"**{chip(name)}**", help=_MEANINGS.get(name))
        curves = options.other_curves.filter(pl.col("name") == name)
        chart = figures.build_metric_chart(
            frame.filter(pl.col("name") == name),
            name,
            options.update,
            span=options.span,
            alarms=options.alarms + options.jumps if name == _RATE else options.alarms,
            other_curves=curves if curves.height else None,
            colours=options.colours,
            titled=False,
        )
        _draw_clickable(column, chart, f"metric-{chip(name)}", options)


def _draw_clickable(container: Any, chart: Any, key: str, options: ChartOptions) -> None:
    """Draw a chart; a click on a step puts the update into the address."""
    key = f"{key}-{options.update}"

    def choose() -> None:
        picked = st.session_state[key]["selection"].get(figures.PICK)
        if picked:
            _go_to_update(options.job_id, int(picked[0]["step"]))

    ui.draw_chart(container, chart, key, on_select=choose, selection_mode=figures.PICK)


def _draw_consumption(credit: Credit | None, options: ChartOptions) -> None:
    frame = read(training.read_consumption, options.job_id, credit)
    if frame.is_empty():
        return
    st.subheader("Consumed episodes", anchor=False)
    changed_data.warn_if_credit_is_stale(credit)
    if credit is None:
        st.caption("No credit job covers the consumed episodes, so there are only outcomes.")
    else:
        st.caption(f"With the advantages of {chip(credit.title, 300)}, as the job read them.")
    titles = {"mean_return": "Mean outcome of the batch"}
    if credit is not None:
        titles |= {"mean_size": "Mean |advantage|", "dead_share": "Steps of dead groups"}
    grid = st.columns(4 if credit else 3)
    for position, (column, title) in enumerate(titles.items()):
        curve = frame.select("step", value=column)
        _draw_clickable(
            grid[position], figures.build_metric_chart(curve, title, options.update), f"consumed-{column}", options
        )
    if credit is not None:
        _draw_clickable(grid[3], figures.build_sign_chart(frame, options.update), "signs", options)


def _draw_checkpoints(job_id: int) -> None:
    frame = read(training.read_checkpoints, job_id)
    if frame.is_empty():
        return
    with st.expander(f"Checkpoints ({frame['total'][0]:,})", icon=":material/save:"):
        columns = {
            "optimizer_step": tables.value("Updates"),
            "policy_version": tables.value("Policy version"),
            "at": tables.time("Saved at"),
            "uri": tables.text("Folder"),
            "sha256": tables.text("Weights"),
        }
        frame = ui.draw_first_rows(frame, training.CHECKPOINTS, "checkpoints, the last ones")
        tables.draw_table(frame, columns, label="Checkpoints")
