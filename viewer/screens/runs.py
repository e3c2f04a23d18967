"""Runs: what the lake holds, and how one run's success, rewards and training metrics develop."""

from collections.abc import Callable
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from viewer import choices, figures, links, over_rounds, stale, tables
from viewer import components as ui
from viewer.links import Page, given
from viewer.navigation import changed, go, href, look_at
from viewer.pinned import read
from viewer.plain import chip, number, one_line, percent, word
from viewer.queries import Row, Sort, Window, compare, outcomes, runs, training

_AXES: dict[runs.Axis, str] = {"collection_round": "Collection round", "policy_version": "Policy version"}
_DEAD = "Of groups with two scored siblings or more: those that all scored the same."
_ACROSS = 3
_MOST_SCORERS = 6
_MOST_METRICS = 6
_TASKS = 12
_COLUMNS = {
    "run_id": tables.text("Run"),
    "environment": tables.text("Environment"),
    "policy": tables.text("Policy"),
    "success": tables.share("Success", "Share of scored episodes."),
    "mean_return": tables.value("Outcome", "Mean over scored episodes."),
    "tasks": tables.value("Tasks"),
    "dead_share": tables.share("Dead groups", _DEAD),
    "episodes": tables.value("Episodes"),
    "rounds": tables.value("Rounds"),
    "mean_steps": tables.value("Steps", "Mean of an episode.", digits=1),
}
# Columns that the list has room for; any other is shown while it orders the list.
_ALWAYS = ("run_id", "success", "mean_return", "episodes", "rounds", "mean_steps")


def show() -> None:
    """The page."""
    ui.header("Runs")
    if not read(runs.total):
        ui.empty("This lake holds no episodes yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    overview = st.container()
    list_, detail = ui.list_and_detail()
    with list_:
        score, success_at = _success()
        first = _list(score, success_at)
        _trained()
    with overview:
        _overview(read(runs.overview, score))
        stale.line()
    with detail:
        asked = given("run")
        if asked is None or read(runs.exists, asked):
            _run(asked or first, score, success_at)
        elif read(training.jobs_of_run, asked).height:
            st.subheader(f"Run {chip(asked)}", anchor=False)
            st.caption("It has no episodes of its own: it trained on those of other runs.")
            _metrics(asked)
        else:
            ui.missing(f"There is no run {chip(asked)} in this lake.")
            _run(first, score, success_at)


def _trained() -> None:
    """Runs that only trained: on other runs' episodes."""
    frame = read(runs.without_episodes)
    if frame.is_empty():
        return
    st.subheader("Trained on other runs' episodes", anchor=False)
    columns = {
        "run_id": tables.text("Run"),
        "name": tables.text("Loss"),
        "status": tables.text("Status"),
        "updates": tables.value("Updates"),
        "started_at": tables.time("Started (UTC)"),
    }
    frame = ui.first(frame, runs.TRAINED, "runs")
    tables.table(
        frame.with_columns(links.jobs(frame), ui.STATE),
        columns,
        label="Trained runs",
        href=lambda row: href(Page.TRAINING, job=row["job_id"]),
    )


def _overview(facts: dict[str, Any]) -> None:
    dead = facts["dead_groups"] / facts["judged_groups"] if facts["judged_groups"] else None
    ui.facts(
        ("Episodes", number(facts["episodes"])),
        ("Steps", number(facts["steps"]), "Decisions of the policies."),
        ("Runs", number(facts["runs"])),
        ("Tasks", number(facts["tasks"])),
        ("Groups", number(facts["groups"]), "Siblings collected from the identical start."),
        ("Dead groups", percent(dead), _DEAD),
        ("Unscored", number(facts["episodes"] - facts["scored"]), "Episodes without an outcome."),
        ("Rejects", number(facts["rejects"]), "Input records that could not be taken."),
    )


def _success() -> tuple[str | None, float]:
    """The outcome, and how much of it counts as success."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        with st.container(width=180):
            score = choices.outcome(None)
        success_at = st.number_input(
            "Success: outcome at least",
            value=1.0,
            step=0.1,
            format="%.2f",
            key="success",
            bind="query-params",
            width=160,
        )
        _order()
    return score, success_at


def _order() -> None:
    """What the list is ordered by: its headings do it too, for the columns that it has room for."""
    asked = tables.ordered_by()
    names = [name for name in _COLUMNS if name in runs.ORDERS]
    key = f"order-{asked}"

    def remember() -> None:
        chosen = st.session_state[key]
        falls = chosen is not None and _COLUMNS[chosen].kind is not tables.Kind.TEXT
        go(sort=None if chosen is None else str(Sort(chosen, falls)), page=None)

    st.selectbox(
        "Order by",
        names,
        index=names.index(asked.column) if asked is not None and asked.column in names else None,
        format_func=lambda name: _COLUMNS[name].label,
        placeholder="newest",
        key=key,
        on_change=remember,
        width=150,
        help="Numbers from the largest; the heading turns them. What the list is ordered by becomes a column of it.",
    )


def _list(score: str | None, success_at: float) -> str:
    """The list of runs; the first with several rounds, which has curves."""
    window = ui.pager(read(runs.total), "runs")
    order = tables.ordered_by()
    frame = read(runs.page, success_at, window, score, order)
    shown = [name for name in _COLUMNS if name in _ALWAYS or (order is not None and order.column == name)]
    first = str(frame.sort(pl.col("rounds") > 1, descending=True, maintain_order=True)["run_id"][0])
    tables.table(
        frame,
        tables.known(frame, {name: _COLUMNS[name] for name in shown}, order),
        label="Runs",
        href=lambda row: changed(run=row["run_id"]),
        key="run_id",
        chosen=given("run") or first,
        sortable=runs.ORDERS,
    )
    return first


def _run(run: str, score: str | None, success_at: float) -> None:
    look_at(run)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Run {chip(run)}", anchor=False, width="stretch")
        ui.link(Page.EPISODES, "Episodes", "format_list_bulleted", run=run, score=score)
        ui.link(Page.GROUPS, "Groups", "workspaces", run=run, score=score)
        _change(run, score)
    facts = read(runs.run, run, success_at, score)
    ui.facts(
        ("Environment", one_line(facts["environment"] or number(None))),
        ("Policy", one_line(facts["policy"] or number(None))),
        ("Outcome", read(outcomes.of_run, run, score), "What success, mean outcome and dead groups are of."),
        ("Tasks", number(facts["tasks"])),
        ("Groups", number(facts["groups"])),
        ("Dead groups", percent(facts["dead_share"]), _DEAD),
        ("Unscored", number(facts["episodes"] - facts["scored"]), "Episodes without an outcome."),
    )
    _curves(run, facts["episodes"], read(runs.axes, run), score, success_at)
    _tasks(run, score, success_at, facts["tasks"])
    _metrics(run)


def _change(run: str, score: str | None) -> None:
    """The ways to what changed: where the outcome fell most, and from the first to the last round."""
    rounds = read(compare.rounds, run)
    if rounds is None or rounds[0] == rounds[1]:
        return
    for before, after in read(compare.steepest, (run,), score).select("before", "after").iter_rows():
        sides: dict[str, Any] = {"a_run": run, "a_rounds": before, "b_run": run, "b_rounds": after, "score": score}
        ui.link(Page.CHANGE, f"Largest fall: round {after}", "trending_down", **sides)
    first, last = rounds
    ui.link(Page.CHANGE, "What changed", "compare_arrows", a_run=run, a_rounds=first, b_run=run, b_rounds=last)


def _curves(run: str, episodes: int, axes: list[runs.Axis], score: str | None, success_at: float) -> None:
    """What develops over rounds or versions, which tools fail, and how tasks differ."""
    charts: list[tuple[figures.Chart, str, Callable[[Row], str] | None]] = []
    axis = _axis(axes)
    if axis is not None:
        charts = _over(run, axis, score, success_at)
    else:
        st.caption("All episodes belong to one collection round and one policy version: there is no curve to draw.")
    scored = read(runs.task_histogram, run, success_at, score).drop_nulls("success")
    if scored.height:
        charts.append((figures.task_histogram(scored), "tasks", None))
    else:
        st.info("No episode of this run is scored.", icon=":material/info:")
    over_rounds.grid(charts, _ACROSS)
    if axis is not None:
        over_rounds.show_tools(run, axis, score, episodes, "tools")


def _axis(axes: list[runs.Axis]) -> runs.Axis | None:
    """What the curves run along; a choice if there are two."""
    if len(axes) < 2:
        return axes[0] if axes else None
    labels = [_AXES[axis] for axis in axes]
    chosen = st.segmented_control("Over", labels, default=labels[0], key="over", bind="query-params", required=True)
    return axes[labels.index(str(chosen))]


def _over(
    run: str, axis: runs.Axis, score: str | None, success_at: float
) -> list[tuple[figures.Chart, str, Callable[[Row], str] | None]]:
    """Outcomes, length, what every scorer says, and what went wrong; with their keys and what their points open."""
    frame = read(runs.curve, run, axis, success_at, score)
    across: dict[str, Any] = {"x_title": _AXES[axis]}
    charts = [
        (figures.curve(frame, "success", title="Success rate, 95 % interval", band=True, share=True, **across), frame),
        (figures.curve(frame, "mean_return", title="Mean outcome", **across), frame),
    ]
    if frame["mean_tokens"].count():
        charts.append((figures.curve(frame, "mean_tokens", title="Mean completion tokens", **across), frame))
    charts.append((figures.curve(frame, "mean_steps", title="Mean steps", **across), frame))
    scores = over_rounds.scores(run, axis, read(outcomes.of_run, run, score))
    if len(scores) > _MOST_SCORERS:
        st.caption(f"Curves of {_MOST_SCORERS} of {number(len(scores))} scorers; *What changed* has more.")
    charts += [
        (figures.curve(part, "value", title=f"Score {one_line(scorer, 30)}", **across), part)
        for scorer, part in scores[:_MOST_SCORERS]
    ]
    if frame["dead_share"].count():
        charts.append((figures.curve(frame, "dead_share", title="Dead groups", share=True, **across), frame))
    charts.append((figures.curve(frame, "truncated_share", title="Truncated episodes", share=True, **across), frame))
    return [
        (chart, f"curve-{position}", over_rounds.opens(run, axis, score, points))
        for position, (chart, points) in enumerate(charts)
    ]


def _tasks(run: str, score: str | None, success_at: float, tasks: int) -> None:
    order = tables.ordered_by("tasks")
    frame = read(runs.tasks, run, success_at, Window(_TASKS), score, order)
    which = "hardest" if order is None else "first"
    st.caption(f"The {frame.height} {which} of {number(tasks)} tasks")
    columns = {
        "task_id": tables.text("Task"),
        "episodes": tables.value("Episodes"),
        "scored": tables.value("Scored"),
        "success": tables.share("Success"),
        "mean_return": tables.value("Mean outcome"),
    }
    tables.table(
        frame,
        tables.known(frame, columns, order),
        label="Tasks",
        href=lambda row: href(Page.EPISODES, run=run, task=row["task_id"], score=score),
        sortable=runs.TASK_ORDERS,
        parameter="tasks",
    )


def _metrics(run: str) -> None:
    """The newest training job of the run in small, which the training page has in full; or its rounds of collecting."""
    jobs = read(training.jobs_of_run, run)
    if jobs.is_empty():
        return
    job_id, kind, parameters_text = jobs.select("job_id", "kind", "parameters").row(0)
    name = links.job(kind, parameters_text)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Metrics of {word(kind)}{f' {chip(name)}' if name else ''}", anchor=False, width="stretch")
        ui.link(Page.TRAINING, "Training, with the batch of every update", "model_training", job=ids.to_text(job_id))
    frame = read(training.metrics_of_rounds, run) if kind == "collect" else read(training.metrics, job_id)
    shown = figures.by_interest(frame["name"].unique())[:_MOST_METRICS]
    if (total := frame["name"].n_unique()) > _MOST_METRICS:
        st.caption(f"{_MOST_METRICS} of {number(total)} metrics; Training has all.")
    grid = st.columns(_ACROSS)
    for position, metric in enumerate(shown):
        chart = figures.metric(frame.filter(pl.col("name") == metric), metric, None)
        ui.chart(grid[position % _ACROSS], chart, f"metric-{position}")


show()
