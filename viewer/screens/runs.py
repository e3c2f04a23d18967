"""Runs: figures of the lake, and how a run's success, rewards and training metrics develop."""

from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.judgements import outcomes
from lake.read.text_table import format_count
from viewer import changed_data, figures, filters, navigation, run_details, tables
from viewer import components as ui
from viewer.navigation import Page, change_address, chip_link, get_parameter, go, href, remember_run
from viewer.plain import chip, number, one_line, percent, word
from viewer.queries import ListWindow, Sort, compare, runs, training
from viewer.session import read

_AXIS_LABELS: dict[runs.Axis, str] = {"collection_round": "Collection round", "policy_version": "Policy version"}
_COLUMNS_OF_CHARTS = 3
_MOST_SCORERS = 6
_MOST_METRICS = 6
_TASK_ROWS = 12
_COLUMNS = {
    "name": tables.text("Run"),
    "last_at": tables.time("Last active (UTC)", "Latest end of its episodes and jobs.", under="name"),
    "tags": tables.text("Tags", under="name"),
    "environment": tables.text("Environment"),
    "policy": tables.text("Policy"),
    "success": tables.share("Success", "Share of scored episodes."),
    "mean_return": tables.value("Outcome", "Mean over scored episodes.", under="success"),
    "tasks": tables.value("Tasks"),
    "dead_share": tables.share("Dead groups", run_details.DEAD_MEANING),
    "episodes": tables.value("Episodes"),
    "rounds": tables.value("Rounds", under="episodes"),
    "mean_steps": tables.value("Steps", "Mean of an episode.", digits=1, under="episodes"),
    "estimator": tables.text("Credit"),
    "loss": tables.text("Loss", under="estimator"),
    "learning_rate": tables.value("Rate", "Learning rate.", under="estimator"),
    "megabytes": tables.value("MB", "Size on disk; files of several runs are divided by their rows.", digits=1),
}
# Columns that are always in the list; another column joins them while it orders the list.
_FIXED_COLUMNS = (
    *("name", "last_at", "success", "mean_return", "episodes", "rounds", "mean_steps", "estimator", "loss"),
    *("learning_rate", "megabytes", "tags"),
)


def show_runs() -> None:
    """Draw the list of runs, and the chosen run next to it."""
    ui.draw_header("Runs")
    if not read(runs.count_runs):
        ui.draw_empty("This lake holds no episodes yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    overview = st.container()
    with st.container(key="list-and-detail"):  # `style.css` stacks the columns on narrow screens
        list_, detail = st.columns([2, 3], gap="medium")
    with list_:
        score, success_at = _choose_success()
        first = _draw_list(score, success_at)
        _draw_trained_runs()
    with overview:
        facts = read(runs.read_overview, score)
        dead = facts["dead_groups"] / facts["judged_groups"] if facts["judged_groups"] else None
        ui.draw_facts(
            ("Episodes", number(facts["episodes"])),
            ("Steps", number(facts["steps"]), "Decisions of policies."),
            ("Runs", number(facts["num_runs"])),
            ("Tasks", number(facts["tasks"])),
            ("Groups", number(facts["groups"]), "Groups of siblings with the same start."),
            *([("Dead groups", percent(dead), run_details.DEAD_MEANING)] if facts["scored"] else []),
            ("Unscored", number(facts["episodes"] - facts["scored"]), "Episodes without an outcome."),
            ("Rejects", number(facts["rejects"]), "Input records that could not be read."),
        )
        changed_data.warn_if_credit_is_stale()
    with detail:
        run = get_parameter("run")
        labels = read(runs.read_labels)
        if run is not None and not read(runs.has_episodes, run):
            run = next(iter(labels.filter(pl.col("name") == run)["run_id"]), run)
        if run is None or read(runs.has_episodes, run):
            _draw_run(run or first, score, success_at)
        elif read(training.list_jobs_of_run, run).height:
            st.subheader(f"Run {chip(run)}", anchor=False)
            st.caption("This run has no episodes. It trained on episodes of other runs.")
            _draw_metrics(run)
        else:
            ui.warn_of_missing(f"This lake has no run {chip(run)}.")
            _draw_run(first, score, success_at)


def _draw_trained_runs() -> None:
    """Draw the runs that were trained on episodes of other runs and have none."""
    frame = read(runs.list_runs_without_episodes)
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
    frame = ui.draw_first_rows(frame, runs.TRAINED, "runs")
    tables.draw_table(
        frame.with_columns(navigation.name_jobs(frame), ui.STATE),
        columns,
        label="Trained runs",
        href=lambda row: href(Page.TRAINING, job=row["job_id"]),
    )


def _choose_success() -> tuple[str | None, float]:
    """Draw the choice of the outcome and of its threshold of success; return both."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        score = filters.choose_outcome(st.container(width=180), None)
        success_at = st.number_input(
            "Success: outcome at least",
            value=1.0,
            step=0.1,
            format="%.2f",
            key="success",
            bind="query-params",
            width=160,
        )
        # Headings order the list too, but it has no room for all columns.
        sort = tables.read_order()
        names = [name for name in _COLUMNS if name in runs.ORDERS]
        key = f"order-{sort}"

        def remember() -> None:
            column = st.session_state[key]
            falls = column is not None and _COLUMNS[column].kind is not tables.Kind.TEXT
            go(sort=None if column is None else str(Sort(column, falls)), page=None)

        st.selectbox(
            "Order by",
            names,
            index=names.index(sort.column) if sort is not None and sort.column in names else None,
            format_func=lambda name: _COLUMNS[name].label,
            placeholder="newest",
            key=key,
            on_change=remember,
            width=150,
            help="Numbers start with the largest; the heading reverses the order. The list adds this column.",
        )
    return score, success_at


def _draw_list(score: str | None, success_at: float) -> str:
    """Draw the list of runs; return the largest of its page, a scored and a trained one if there is any."""
    tag = get_parameter("tag")
    if tag is not None and not read(runs.count_runs, tag):
        ui.warn_of_missing(f"No run has the tag {chip(tag)}; showing all runs.")
        tag = None
    _draw_tags(tag)
    window = ui.draw_pager(read(runs.count_runs, tag), "runs")
    order = tables.read_order()
    sizes = read(runs.read_sizes)
    frame = read(runs.read_page, success_at, window, score, order, tag)
    frame = frame.with_columns(
        pl.col("tags").list.join(", ").replace("", None),
        megabytes=pl.Series([sizes.get(run, 0) / 1e6 for run in frame["run_id"]], dtype=pl.Float64),
    )
    names = [name for name in _COLUMNS if name in _FIXED_COLUMNS or (order is not None and order.column == name)]
    # A trained run comes before its evaluation and the traces that it began from, which may be larger.
    by = (pl.col("scored") > 0, pl.col("loss").is_not_null(), "episodes")
    first = str(frame.sort(by, descending=True, maintain_order=True)["run_id"][0])
    tables.draw_table(
        frame,
        tables.select_filled(frame, {name: _COLUMNS[name] for name in names}, order),
        label="Runs",
        href=lambda row: change_address(run=row["run_id"]),
        key="run_id",
        selected=get_parameter("run") or first,
        sortable=runs.ORDERS,
    )
    return first


def _draw_tags(chosen: str | None) -> None:
    """Draw the tags of runs as links that filter the list; the chosen one shows all runs again."""
    tags = sorted(read(runs.read_labels)["tags"].explode(empty_as_null=False, keep_nulls=False).unique())
    if tags:
        links = (
            chip_link(tag, change_address(tag=None if tag == chosen else tag), is_chosen=tag == chosen) for tag in tags
        )
        st.html(f'<div class="trajlake-chips">{"".join(links)}</div>')


def _draw_run(run: str, score: str | None, success_at: float) -> None:
    remember_run(run)
    facts = read(runs.read_run, run, success_at, score)
    ui.name_tab(f"Run {facts['name']}")
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Run {chip(facts['name'])}", anchor=False, width="stretch")
        ui.draw_link(Page.EPISODES, "Episodes", "format_list_bulleted", run=run, score=score)
        ui.draw_link(Page.GROUPS, "Groups", "workspaces", run=run, score=score)
        _link_changes(run, score)
    if facts["name"] != run:
        st.caption(f"Its id is {chip(run)}.")
    if facts["note"]:
        st.caption(chip(facts["note"], 2000))
    ui.draw_facts(
        ("Environment", one_line(facts["environment"] or number(None))),
        ("Policy", one_line(facts["policy"] or number(None))),
        (
            "Outcome",
            read(outcomes.choose_score_of_run, run, score),
            "Score behind success, mean outcome and dead groups.",
        ),
        ("Tasks", number(facts["tasks"])),
        ("Groups", number(facts["groups"])),
        *([("Dead groups", percent(facts["dead_share"]), run_details.DEAD_MEANING)] if facts["scored"] else []),
        ("Unscored", number(facts["episodes"] - facts["scored"]), "Episodes without an outcome."),
    )
    leaked = read(runs.find_trained_evaluation_tasks, run)
    if leaked["trained"]:
        st.warning(
            f"Evaluated tasks that {', '.join(map(chip, leaked['trainers']))} trained on (same environment and name): "
            f"{number(leaked['trained'])} of {number(leaked['evaluated'])}, {', '.join(map(chip, leaked['tasks']))}.",
            icon=":material/warning:",
        )
    episodes = facts["episodes"]
    axes = read(runs.list_axes, run)
    charts: list[run_details.OpenableChart] = []
    axis = _choose_axis(axes)
    if axis is not None:
        charts = _build_curves(run, axis, score, success_at)
    else:
        st.caption("All episodes belong to one collection round and one policy version, so there are no curves.")
    scored = read(runs.count_tasks_by_success, run, success_at, score).drop_nulls("success")
    if scored.height:
        charts.append((figures.build_task_histogram(scored), "tasks", None))
    else:
        st.info("No episode of this run is scored.", icon=":material/info:")
    run_details.draw_chart_grid(charts, _COLUMNS_OF_CHARTS)
    if axis is not None:
        run_details.draw_tools(run, axis, score, episodes, "tools")
    _draw_tasks(run, score, success_at, facts["tasks"])
    _draw_metrics(run)


def _link_changes(run: str, score: str | None) -> None:
    """Link to comparisons: around the largest fall of the outcome, and from the first to the last round."""
    rounds = read(compare.find_range, run, "collection_round")
    if rounds is None or rounds[0] == rounds[1]:
        return
    for before, after in read(compare.find_steepest_falls, (run,), score).select("before", "after").iter_rows():
        sides: dict[str, Any] = {"a_run": run, "a_rounds": before, "b_run": run, "b_rounds": after, "score": score}
        ui.draw_link(Page.CHANGE, f"Largest fall: round {after}", "trending_down", **sides)
    first, last = rounds
    ui.draw_link(Page.CHANGE, "What changed", "compare_arrows", a_run=run, a_rounds=first, b_run=run, b_rounds=last)


def _choose_axis(axes: list[runs.Axis]) -> runs.Axis | None:
    """Return the axis of the curves; the reader chooses between two."""
    if len(axes) < 2:
        return axes[0] if axes else None
    labels = [_AXIS_LABELS[axis] for axis in axes]
    label = st.segmented_control("Over", labels, default=labels[0], key="over", bind="query-params", required=True)
    return axes[labels.index(str(label))]


def _build_curves(run: str, axis: runs.Axis, score: str | None, success_at: float) -> list[run_details.OpenableChart]:
    """Return charts with their keys and addresses of points: outcomes, length, scores, dead and truncated shares."""
    frame = read(runs.read_curve, run, axis, success_at, score)
    across: dict[str, Any] = {"x_title": _AXIS_LABELS[axis]}
    charts = []
    if frame["scored"].sum():
        rate = figures.build_curve(
            frame, "success", title="Success rate, 95 % interval", band=True, share=True, **across
        )
        mean = figures.build_curve(frame, "mean_return", title="Mean outcome", **across)
        charts += [(rate, frame), (mean, frame)]
    if frame["mean_tokens"].count():
        charts.append((figures.build_curve(frame, "mean_tokens", title="Mean completion tokens", **across), frame))
    charts.append((figures.build_curve(frame, "mean_steps", title="Mean steps", **across), frame))
    scores = run_details.read_score_curves(run, axis, read(outcomes.choose_score_of_run, run, score))
    if len(scores) > _MOST_SCORERS:
        st.caption(f"Curves of {_MOST_SCORERS} of {number(len(scores))} scorers; *What changed* has more.")
    charts += [
        (figures.build_curve(part, "value", title=f"Score {one_line(scorer, 30)}", **across), part)
        for scorer, part in scores[:_MOST_SCORERS]
    ]
    if frame["dead_share"].count():
        charts.append((figures.build_curve(frame, "dead_share", title="Dead groups", share=True, **across), frame))
    endings = {"truncated_share": "Truncated episodes"}
    if frame["failed_share"].sum():
        endings["failed_share"] = "Failed rollouts"
    for column, title in endings.items():
        charts.append((figures.build_curve(frame, column, title=title, share=True, **across), frame))
    return [
        (chart, f"curve-{position}", run_details.make_point_address(run, axis, score, points))
        for position, (chart, points) in enumerate(charts)
    ] + run_details.build_unscored_chart(run, axis)


def _draw_tasks(run: str, score: str | None, success_at: float, tasks: int) -> None:
    order = tables.read_order("tasks")
    frame = read(runs.read_tasks, run, success_at, ListWindow(_TASK_ROWS), score, order)
    which = "hardest" if order is None else "first"
    st.caption(f"The {frame.height} {which} of {format_count(tasks, 'task')}")
    columns = {
        "task_id": tables.text("Task"),
        "episodes": tables.value("Episodes"),
        "scored": tables.value("Scored"),
        "success": tables.share("Success"),
        "mean_return": tables.value("Mean outcome"),
    }
    tables.draw_table(
        frame,
        tables.select_filled(frame, columns, order),
        label="Tasks",
        href=lambda row: href(Page.EPISODES, run=run, task=row["task_id"], score=score),
        sortable=runs.TASK_ORDERS,
        parameter="tasks",
    )


def _draw_metrics(run: str) -> None:
    """Draw a few metrics of the newest training job of the run, or of the jobs that collected its rounds."""
    jobs = read(training.list_jobs_of_run, run)
    if jobs.is_empty():
        return
    job_id, kind, parameters_text = jobs.select("job_id", "kind", "parameters").row(0)
    name = navigation.name_job(kind, parameters_text)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Metrics of {word(kind)}{f' {chip(name)}' if name else ''}", anchor=False, width="stretch")
        ui.draw_link(
            Page.TRAINING, "Training, with the batch of every update", "model_training", job=ids.to_text(job_id)
        )
    frame = read(training.read_round_metrics, run) if kind == "collect" else read(training.read_metrics, job_id)
    names = figures.sort_by_interest(frame["name"].unique())[:_MOST_METRICS]
    if (total := frame["name"].n_unique()) > _MOST_METRICS:
        st.caption(f"{_MOST_METRICS} of {number(total)} metrics; Training has all.")
    grid = st.columns(_COLUMNS_OF_CHARTS)
    for position, metric in enumerate(names):
        chart = figures.build_metric_chart(frame.filter(pl.col("name") == metric), metric, None)
        ui.draw_chart(grid[position % _COLUMNS_OF_CHARTS], chart, f"metric-{position}")
