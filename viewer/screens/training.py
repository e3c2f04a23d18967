"""Training: metrics of a job; click on a point and see the batch of that update, its episodes and their advantages."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.judgements.credit import Credit
from lake.read.metric_names import METRICS, OF_ROUNDS
from lake.read.text_table import counted
from viewer import batch, figures, intake, links, online, stale, tables
from viewer import components as ui
from viewer.links import Page, given, given_int
from viewer.navigation import go, looked_at
from viewer.pinned import read
from viewer.plain import chip, one_line
from viewer.queries import Row, loops, training
from viewer.queries.loops import Loop
from viewer.theme import POSITIVE

_FIRST_METRICS = 6
_MORE_METRICS = 30
_SPANS = {"off": 1, "10": 10, "50": 50, "200": 200}
_MEANINGS = METRICS | OF_ROUNDS


@dataclass(frozen=True, slots=True)
class Look:
    """What the charts are of, and how they are drawn."""

    job_id: int
    update: int | None
    """The one that is marked."""
    span: int
    """Points of the moving average; 1: none."""
    alarms: list[tuple[int, int]]
    """Stretches of updates at which an alarm was active."""
    beside: pl.DataFrame
    """Curves of other jobs: job (its label), name, step, value."""
    colours: dict[str, str]
    """Of these jobs, by label."""


def show() -> None:
    """The page."""
    ui.header("Training")
    jobs = _jobs()
    if jobs.is_empty():
        advice = "trajlake train --lake LAKE ...      # or: trajlake demo"
        ui.empty("No training job has written to this lake yet.", advice)
        return
    began = time.monotonic()
    jobs = ui.first(jobs, training.JOBS, "jobs, the newest and those of the address, can be chosen; *Jobs* lists all")
    labels = _labels(jobs)
    job_id, loop = _job(jobs, labels)
    if loop is not None:
        online.show(loop)
        st.subheader("Updates", anchor=False)
    credit = read(training.credit_of, job_id)
    update = _update(job_id)
    frame = read(training.metrics, job_id)
    metrics = figures.by_interest(frame["name"].unique())
    look = _look(job_id, labels, update)
    _grid(frame, metrics[:_FIRST_METRICS], look)
    if update is not None:
        batch.show(job_id, update, credit, labels)
    _more(frame, metrics[_FIRST_METRICS:], look)
    _consumption(credit, look)
    intake.show(job_id)
    _checkpoints(job_id)
    if loop is not None:
        online.follow(loop, time.monotonic() - began)


def _jobs() -> pl.DataFrame:
    """The jobs that can be chosen: the newest, and those that the address names."""
    newest = read(training.jobs, (), training.JOBS)
    job, update = _training_job(given("job")), given_int("update")
    named = [ids.from_text(text) for text in (job, *st.query_params.get_all("beside")) if text and ids.is_text(text)]
    if job is None and update is not None:
        named += read(training.with_update, update)[:1]
    older = tuple(one for one in named if one not in newest["job_id"])
    is_cut = newest.height and newest["total"][0] > newest.height
    return read(training.jobs, older, training.JOBS) if older and is_cut else newest


def _labels(jobs: pl.DataFrame) -> dict[str, str]:
    """What the jobs are called, by their ids."""

    def label(row: Row) -> str:
        run = one_line(row["run_id"] or row["kind"])
        what = ("loop " if row["online"] else "") + one_line(links.job(row["kind"], row["parameters"]) or "")
        updates = counted(row["updates"], "update")
        state = ui.state(row["status"])
        if row["status"] == "started" and row["last_at"] is not None:
            state += f", last metrics {row['last_at']:%d %b %H:%M:%S}"
        parts = (run, what, updates, state, f"{row['started_at']:%d %b %H:%M:%S}", ids.to_text(row["job_id"]))
        return "  ".join(filter(None, parts))

    return {ids.to_text(row["job_id"]): label(row) for row in jobs.iter_rows(named=True)}


def _job(jobs: pl.DataFrame, labels: dict[str, str]) -> tuple[int, Loop | None]:
    """The job to show, and the online run it belongs to.

    The one that the address names, else that of the run which the reader looked at, else the newest at work.
    """
    options = list(labels)
    asked = _training_job(given("job"))
    if asked is not None and asked.lower() not in options:
        ui.not_found(f"This lake holds no training job {chip(asked)}.", Page.TRAINING, "The newest training job")
    rows = dict(zip(options, jobs.iter_rows(named=True), strict=True))
    newest = next((option for option in options if rows[option]["updates"] or rows[option]["online"]), options[0])
    update = given_int("update")
    if asked is None and update is None and (mine := _of_run(looked_at(), rows)) is not None:
        asked = mine
    elif asked is None and update is not None:
        having = map(ids.to_text, read(training.with_update, update))
        newest = next((option for option in having if option in rows), newest)
    shown = asked.lower() if asked else newest
    # A browser remembers the label of its choice, and labels of a running job change: they are part of the key. So is
    # the job shown, which the address alone decides.
    key = f"training-job-{shown}-{hashlib.blake2b(str(labels).encode(), digest_size=8).hexdigest()}"

    def remember() -> None:
        go(job=st.session_state[key], update=None, round=None, rounds=None, page=None)

    chosen = st.selectbox(
        "Job", options, index=options.index(shown), format_func=labels.__getitem__, key=key, on_change=remember
    )
    job_id = ids.from_text(chosen)
    loop = read(loops.loop_of, job_id) if rows[chosen]["online"] else None
    if loop is None:
        with st.container(horizontal=True, vertical_alignment="center"):
            ui.status_badge(rows[chosen]["status"])
            ui.link(Page.JOB, "Parameters and lineage", "account_tree", job=chosen)
    return job_id, loop


def _of_run(run: str | None, rows: Mapping[str, Row]) -> str | None:
    """The newest training job of a run; None if it has none."""
    return next(
        (
            job
            for job, row in rows.items()
            if run is not None and row["run_id"] == run and (row["kind"] == "train" or row["online"])
        ),
        None,
    )


def _training_job(asked: str | None) -> str | None:
    """The job that the address asks for; of an online run's own job, the training job that belongs to it."""
    if asked is None or not ids.is_text(asked):
        return asked
    loop = read(loops.loop_of, ids.from_text(asked))
    return asked if loop is None else ids.to_text(loop.train_job)


def _update(job_id: int) -> int | None:
    """The optimizer step to show: the one that the address names."""
    bounds = read(training.update_range, job_id)
    if bounds is None:
        return None
    first, last = bounds
    asked = given_int("update")
    if asked is not None and not first <= asked <= last:
        ui.missing(f"The job has updates {first} to {last}, no update {asked}.")
        asked = None
    return asked


def _choose(job_id: int, update: int | None) -> None:
    """Have the address name an update, and the job whose it is; in a callback."""
    go(job=ids.to_text(job_id), update=update, page=None)


def _look(job_id: int, labels: dict[str, str], update: int | None) -> Look:
    """The line of controls above the charts: the update, smoothing, and other jobs beside this one."""
    others = [option for option in labels if option != ids.to_text(job_id)]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        _update_field(job_id, update)
        smoothing = st.segmented_control(
            "Moving average", list(_SPANS), default="off", key="average", bind="query-params", required=True
        )
        beside = _beside(job_id, others, labels) if others else []
    curves = [
        read(training.metrics, ids.from_text(option)).with_columns(job=pl.lit(labels[option])) for option in beside
    ]
    empty = pl.DataFrame(schema={"name": pl.String, "step": pl.Int64, "value": pl.Float64, "job": pl.String})
    colours = dict(zip((labels[option] for option in beside), figures.OTHERS, strict=False))
    if beside:
        ui.legend({labels[ids.to_text(job_id)]: POSITIVE} | colours)
    alarms, stretches = read(training.alarms, job_id)
    if alarms:
        cut = f"; the first {len(alarms):,} of {stretches:,} stretches" if stretches > len(alarms) else ""
        st.caption(f"Shaded: an alarm was active ({counted(sum(b - a + 1 for a, b in alarms), 'update')}{cut}).")
    if (of_a_point := read(training.updates_of_a_point, job_id)) > 1:
        st.caption(f"Each point is the mean of {of_a_point:,} updates; a click on it opens the first of them.")
    drawn = pl.concat([empty, *(curve.select(empty.columns) for curve in curves)])
    return Look(job_id, update, _SPANS[str(smoothing)], alarms, drawn, colours)


def _update_field(job_id: int, update: int | None) -> None:
    bounds = read(training.update_range, job_id)
    if bounds is None:
        st.caption("This job has recorded no batches.")
        return
    first, last = bounds
    key = f"update-field-{job_id}-{update}"
    st.session_state.setdefault(key, update)  # as a default it could not be taken out of the field
    st.number_input(
        f"Update, {first} to {last}",
        min_value=first,
        max_value=last,
        value=None,
        placeholder="or click on a point",
        key=key,
        on_change=lambda: _choose(job_id, st.session_state[key]),
        width=200,
        help="Shows what the update learned from. A click on a point of a chart does the same. The first is 0, as in "
        "the tables and what `trajlake train` says.",
    )


def _beside(job_id: int, others: list[str], labels: dict[str, str]) -> list[str]:
    """Jobs whose curves are drawn beside this one's, from the address."""
    asked = [option for option in st.query_params.get_all("beside") if option in others][: len(figures.OTHERS)]
    key = f"beside-{'-'.join(asked)}"

    def remember() -> None:
        go(job=ids.to_text(job_id), beside=st.session_state[key])

    st.multiselect(
        "Beside it",
        others,
        default=asked,
        format_func=labels.__getitem__,
        max_selections=len(figures.OTHERS),
        placeholder="Other jobs",
        key=key,
        on_change=remember,
    )
    return asked


def _more(frame: pl.DataFrame, metrics: list[str], look: Look) -> None:
    if not metrics:
        return
    more = st.expander(f"{len(metrics)} more metrics", icon=":material/show_chart:", key="more", on_change="rerun")
    if not more.open:
        return
    with more:
        _grid(frame, metrics[:_MORE_METRICS], look)
        if len(metrics) > _MORE_METRICS:
            left = len(metrics) - _MORE_METRICS
            st.caption(f"{left} further ones are not drawn: `trajlake sql` on `run_metrics` has them.")


def _grid(frame: pl.DataFrame, metrics: list[str], look: Look) -> None:
    if not metrics:
        st.info(
            "This job has written no metrics: they come with its checkpoints (`--checkpoint-every`) and its end.",
            icon=":material/info:",
        )
        return
    grid = st.columns(3)
    for position, name in enumerate(metrics):
        place = grid[position % 3]
        place.markdown(f"**{chip(name)}**", help=_MEANINGS.get(name))
        others = look.beside.filter(pl.col("name") == name)
        chart = figures.metric(
            frame.filter(pl.col("name") == name),
            name,
            look.update,
            span=look.span,
            alarms=look.alarms,
            others=others if others.height else None,
            colours=look.colours,
            titled=False,
        )
        _clickable(place, chart, f"metric-{chip(name)}", look)


def _clickable(place: Any, chart: Any, key: str, look: Look) -> None:
    """A chart whose clicked step becomes the update of the address."""
    key = f"{key}-{look.update}"

    def choose() -> None:
        picked = st.session_state[key]["selection"].get(figures.PICK)
        if picked:
            _choose(look.job_id, int(picked[0]["step"]))

    ui.chart(place, chart, key, on_select=choose, selection_mode=figures.PICK)


def _consumption(credit: Credit | None, look: Look) -> None:
    frame = read(training.consumption, look.job_id, credit)
    if frame.is_empty():
        return
    st.subheader("What the updates consumed", anchor=False)
    stale.line(credit)
    if credit is None:
        st.caption("No credit job covered what this job consumed: outcomes only.")
    else:
        st.caption(f"With the advantages of {chip(credit.title, 300)}, as they were when the job read them.")
    titles = {"mean_return": "Mean outcome of the batch"}
    if credit is not None:
        titles |= {"mean_size": "Mean |advantage|", "dead_share": "Steps of dead groups"}
    grid = st.columns(4 if credit else 3)
    for position, (column, title) in enumerate(titles.items()):
        values = frame.select("step", value=column)
        _clickable(grid[position], figures.metric(values, title, look.update), f"consumed-{column}", look)
    if credit is not None:
        _clickable(grid[3], figures.signs(frame, look.update), "signs", look)


def _checkpoints(job_id: int) -> None:
    frame = read(training.checkpoints, job_id)
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
        frame = ui.first(frame, training.CHECKPOINTS, "checkpoints, the last ones")
        tables.table(frame, columns, label="Checkpoints")


show()
