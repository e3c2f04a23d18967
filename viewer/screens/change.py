"""What changed: two sets of episodes (run, rounds, policy version or credit job), and two states of a lake."""

import re

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.errors import TrajlakeError
from lake.judgements.credit import Credit
from lake.read.text_table import format_count
from viewer import changed_data, figures, filters, run_details, session, tables
from viewer import components as ui
from viewer.navigation import Page, get_parameter, href
from viewer.plain import chip, number, one_line, percent, word
from viewer.queries import ListWindow, Row, compare, lineage, runs, training
from viewer.queries.compare import Side
from viewer.session import read

_TASK_ROWS = 20
# Newest runs that suggestions consider.
_MOST_SUGGESTIONS = 8
# Largest numbers of compared pairs of runs, of suggested pairs, and of listed settings.
_MOST_PAIRS, _MOST_EXPERIMENTS, _MOST_SETTINGS = 12, 3, 3
_MOST_CURVES = 12
_MOST_TOOLS = 15
_CLEAR = tables.mark("Not 0", "The interval excludes 0.")
_BEYOND_CHANCE = tables.mark("Beyond chance", "p is below 0.05.")
_MOST_ONE_SIDED = 50
_IS_CLEAR = ((pl.col("low") > 0) | (pl.col("high") < 0)).alias("clear")
_ROUNDS = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
_FIGURES = {
    "outcome": ("Outcome", False),
    "completion_tokens": ("Completion tokens", False),
    "num_steps": ("Steps", False),
    "failed": ("Failed rollouts", True),
    "truncated": ("Truncated episodes", True),
    "invalid": ("Invalid actions", True),
    "tool_errors": ("States that are error texts", True),
    "disagree": ("A_E and A_S of opposite signs", True),
    "size": ("Mean |A|", False),
}


def show_change() -> None:
    """Draw the comparison of two sets of episodes."""
    ui.draw_header("What changed")
    if not read(runs.count_runs):
        ui.draw_empty("This lake holds no episodes yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    columns = st.columns([5, 5, 2], vertical_alignment="center")
    with columns[0]:
        side_a = _choose_side("a")
    with columns[1]:
        side_b = _choose_side("b")
    score = filters.choose_outcome(columns[2], None)
    if side_a == side_b == Side():
        _draw_suggestions()
        return
    if side_a == side_b:
        st.info("A and B are the same. Choose another run, other rounds or another version.", icon=":material/info:")
        return
    current = read(training.look_up_credit)
    frames = read(compare.read_tasks, side_a, current, score), read(compare.read_tasks, side_b, current, score)
    empty = [name for name, frame in zip("AB", frames, strict=True) if frame.is_empty()]
    if empty:
        ui.warn_of_missing(f"No episodes in {' and '.join(empty)}.")
        return
    _draw_figures(frames, (side_a, side_b), current)
    _draw_flips(side_a, side_b)
    run_details.draw_side_settings(side_a, side_b)
    _draw_tasks(frames, score)
    _draw_tools((side_a, side_b), frames, score)
    _draw_lengths(side_a, side_b, score)
    runs_of_sides = [("A and B", side_a.run)] if side_a.run == side_b.run else [("A", side_a.run), ("B", side_b.run)]
    for name, run in ((name, run) for name, run in runs_of_sides if run):
        for axis in read(runs.list_axes, run)[:1]:
            _draw_run(name, run, axis, score)


def _draw_suggestions() -> None:
    """Suggest comparisons: runs that differ in few settings, rounds around a fall, first and last round or version."""
    st.info("Choose two sides, or one of these comparisons.", icon=":material/compare_arrows:")
    newest = read(runs.read_page, 1.0, ListWindow(_MOST_SUGGESTIONS))["run_id"].to_list()
    pairs = []
    for run_a, run_b in read(compare.list_runs_sharing_tasks, tuple(newest))[:_MOST_PAIRS]:
        if names := read(lineage.list_differing_settings, run_a, run_b):
            pairs.append((run_a, run_b, names))
    for run_a, run_b, names in sorted(pairs, key=lambda pair: len(pair[2]))[:_MOST_EXPERIMENTS]:
        words = ", ".join(map(word, names[:_MOST_SETTINGS])) + (" and others" if len(names) > _MOST_SETTINGS else "")
        label = f"{chip(run_a)} and {chip(run_b)}: the same tasks, another {words}"
        ui.draw_link(Page.CHANGE, label, "science", a_run=run_a, b_run=run_b)
    for fall in read(compare.find_steepest_falls, tuple(newest)).sort("fall", descending=True).iter_rows(named=True):
        run, before, after = fall["run_id"], fall["before"], fall["after"]
        label = (
            f"{chip(run)}: round {before} and round {after}, the largest fall of its outcome, by {number(fall['fall'])}"
        )
        ui.draw_link(Page.CHANGE, label, "trending_down", a_run=run, a_rounds=before, b_run=run, b_rounds=after)
    for run in newest:
        span = read(compare.find_range, run, "collection_round")
        if span is not None and span[0] < span[1]:
            label = f"{chip(run)}: round {span[0]} and round {span[1]}"
            ui.draw_link(Page.CHANGE, label, "compare_arrows", a_run=run, a_rounds=span[0], b_run=run, b_rounds=span[1])
            continue
        span = read(compare.find_range, run, "policy_version")
        if span is not None and span[0] < span[1]:
            label = f"{chip(run)}: version {span[0]} and version {span[1]} of the policy"
            ui.draw_link(
                Page.CHANGE, label, "compare_arrows", a_run=run, a_version=span[0], b_run=run, b_version=span[1]
            )
    if len(newest) > 1:
        label = f"{chip(newest[1])} and {chip(newest[0])}"
        ui.draw_link(Page.CHANGE, label, "compare_arrows", a_run=newest[1], b_run=newest[0])


def _choose_side(name: str) -> Side:
    """Draw the choice of a side and return it; the address holds it as `a_run`, `a_rounds`, ..."""
    with st.container(border=True):
        run = filters.choose_run(st.container(), f"{name.upper()}: run", f"{name}_run")
        of_rounds, of_version, of_credit = st.columns(3)
        rounds = of_rounds.text_input("Rounds", key=f"{name}_rounds", placeholder="all, 3 or 2-5", **ui.FILTER)
        version = of_version.text_input("Policy version", key=f"{name}_version", placeholder="all", **ui.FILTER)
        with of_credit:
            credit = filters.read_credit_input(f"{name}_credit")
    match = _ROUNDS.fullmatch(rounds or "")
    span = None if match is None else (int(match[1]), int(match[2] or match[1]))
    if rounds and span is None:
        ui.warn_of_missing(f"Invalid rounds {chip(rounds)}: write 3 or 2-5.")
    if version and not version.isdigit():
        ui.warn_of_missing(f"Invalid policy version {chip(version)}: write a whole number.")
    return Side(run, span, int(version) if version and version.isdigit() else None, credit)


def _draw_figures(frames: compare.Frames, sides: tuple[Side, Side], current: Credit | None) -> None:
    """Draw every figure of both sides, by task."""
    scores = read(compare.read_scores, sides[0]), read(compare.read_scores, sides[1])
    frame = compare.compare_figures(frames, scores)
    rows = frame.with_columns(
        _IS_CLEAR, figure=pl.Series([_FIGURES.get(name, (name, False))[0] for name in frame["figure"]], dtype=pl.String)
    )
    columns = {
        "figure": tables.text("Figure"),
        "a": tables.value("A"),
        "b": tables.value("B"),
        "difference": tables.TableColumn(
            "B \N{MINUS SIGN} A", kind=tables.Kind.SIGNED, explanation="Mean difference over tasks."
        ),
        "low": tables.TableColumn(
            "95 % from", kind=tables.Kind.SIGNED, explanation="95 % interval over tasks; a dash: unknown."
        ),
        "high": tables.TableColumn(
            "to", kind=tables.Kind.SIGNED, explanation="95 % interval over tasks; a dash: unknown."
        ),
        "clear": _CLEAR,
        "tasks": tables.value("Tasks of both", "Two or more tasks are compared one by one."),
        "only_a": tables.value("only in A"),
        "only_b": tables.value("only in B"),
    }
    counts = [
        f"{name}: {format_count(int(frame['episodes'].sum()), 'episode')} of {format_count(frame.height, 'task')}"
        for name, frame in zip("AB", frames, strict=True)
    ]
    how = (
        "Figures are paired by task: each task with a value on both sides counts once."
        if frame["is_paired"].any()
        else f"The sides share {'one task' if frame['tasks'].max() else 'no task'}: each side's tasks count once, and "
        "intervals are wide because tasks differ."
    )
    st.caption(f"{'; '.join(counts)}. {how} {_describe_method(frame)}")
    both, single = rows.filter(pl.col("difference").is_not_null()), rows.filter(pl.col("difference").is_null())
    if both.height:
        tables.draw_table(both, tables.select_filled(both, columns), label="Figures")
    if single.height:
        named = f"{single.height} figures that only one side has" if single.height > 1 else "A figure of one side only"
        with st.expander(named, type="compact"):
            tables.draw_table(single, tables.select_filled(single, columns), label="Figures of one side")
    changed_data.warn_if_credit_is_stale(*(side.credit or current for side in sides))


def _describe_method(frame: pl.DataFrame) -> str:
    """Describe the intervals of `compare.compare_figures`, with the degrees of freedom of the first that has any."""
    wide = "With few tasks, intervals may reach beyond possible values."
    first = next(frame.filter(pl.col("df").is_not_null()).iter_rows(named=True), None)
    if first is None:
        return f"Intervals are Welch's, at 95 %. {wide}"
    name, df, usual = _FIGURES.get(first["figure"], (first["figure"], False))[0], first["df"], first["tasks"] - 1
    instead = f" instead of {usual}" if df < usual - 0.05 else ""
    return (
        "Intervals are Student's, at 95 %, over the differences of the tasks. Their degrees of freedom follow from the "
        f"kurtosis of the differences, which few differing tasks raise: {number(df, 1)}{instead} for {chip(name)}. "
        f"{wide}"
    )


def _draw_flips(side_a: Side, side_b: Side) -> None:
    """Draw the disagreement of two credits."""
    if side_a.credit is None or side_b.credit is None or side_a.credit == side_b.credit:
        return
    counts = read(compare.count_flips, side_a.credit, side_b.credit)
    if not counts["steps"]:
        st.caption("The two credits have no step in common.")
        return
    ui.draw_fact(
        "advantages of opposite signs",
        f"**{number(counts['flipped'])}** of {format_count(counts['steps'], 'step')} with "
        f"one in both ({percent(counts['flipped'] / counts['steps'])})",
    )


def _draw_tasks(frames: compare.Frames, score: str | None) -> None:
    st.subheader("Tasks", anchor=False)
    order = tables.read_order()
    rests = compare.list_one_sided_tasks(frames)
    total = frames[0].join(frames[1], on="task_id", how="semi").height
    if rests.height:
        counts = " and ".join(f"{(rests['side'] == side).sum():,} only in {side}" for side in "AB")
        with st.expander(f"Tasks of one side: {counts}", type="compact"):
            one_sided = {
                "task_id": tables.text("Task"),
                "side": tables.text("Side"),
                "episodes": tables.value("Episodes"),
                "outcome": tables.value("Mean outcome"),
            }
            tables.draw_table(
                ui.draw_first_rows(rests, _MOST_ONE_SIDED, "tasks"),
                one_sided,
                label="Tasks of one side",
                href=lambda row: href(Page.EPISODES, task=row["task_id"], score=score),
            )
    if not total:
        return
    frame = compare.compare_tasks(frames, ui.draw_pager(total, "tasks", rows=_TASK_ROWS), order)
    fell, rose = int(frame["fell"].max() or 0), int(frame["rose"].max() or 0)  # type: ignore[arg-type]
    st.caption(
        f"{number(fell)} of {format_count(total, 'task')} fell and {number(rose)} rose beyond chance. Each task has "
        "a test of its own: Fisher's exact test where the outcome has two values, otherwise Welch's. p is adjusted for "
        "all tasks of the table (Holm)."
    )
    frame = frame.with_columns(clear=pl.col("p") < 0.05)
    columns = {
        "task_id": tables.text("Task"),
        "a": tables.value("A", "Mean outcome."),
        "b": tables.value("B", "Mean outcome."),
        "difference": tables.TableColumn("B \N{MINUS SIGN} A", kind=tables.Kind.SIGNED),
        "low": tables.TableColumn(
            "95 % from", kind=tables.Kind.SIGNED, explanation="95 % interval (Welch); a dash: too few episodes."
        ),
        "high": tables.TableColumn(
            "to", kind=tables.Kind.SIGNED, explanation="95 % interval (Welch); a dash: too few episodes."
        ),
        "p": tables.value("p", "Of the test of the task, adjusted for all tasks (Holm)."),
        "clear": _BEYOND_CHANCE,
        "a_episodes": tables.value("Episodes A"),
        "b_episodes": tables.value("Episodes B"),
        "a_steps": tables.value("Steps A", digits=1),
        "b_steps": tables.value("Steps B", digits=1),
    }

    def address(row: Row) -> str:
        """Return the address of two episodes, or of the episodes of the scored side."""
        pair = [row[f"{name}_episode"] for name in "ab" if row[f"{name}_episode"] is not None]
        if len(set(pair)) == 2:
            return href(Page.COMPARE, episode=[ids.to_text(episode_id) for episode_id in pair], score=score)
        return href(Page.EPISODES, task=row["task_id"], score=score)

    tables.draw_table(
        frame.select(*columns, "a_episode", "b_episode"),
        columns,
        label="Tasks",
        href=address,
        key="task_id",
        sortable=compare.TASK_ORDERS,
    )
    st.caption("A row opens the two episodes that show the difference most, side by side.")


def _draw_tools(sides: tuple[Side, Side], frames: compare.Frames, score: str | None) -> None:
    """Draw the tools that fail more often on one side. For many episodes the reader must open this part first."""
    is_small = max(int(frame["episodes"].sum()) for frame in frames) <= compare.TOOL_SAMPLE
    if is_small and all(read(compare.read_tools, side).is_empty() for side in sides):
        return
    label = "Tools: which fail more often"
    expander = st.expander(label, icon=":material/build:", expanded=is_small, key="tools", on_change="rerun")
    if not expander.open:
        return
    of_sides = [read(compare.read_tools, side) for side in sides]
    with expander:
        if not sum(int(frame["failed"].sum()) for frame in of_sides):
            st.caption(run_details.describe_no_failures(sum(int(frame["calls"].sum()) for frame in of_sides)))
            return
        frame = compare.compare_tools(*of_sides)
        columns = {
            "tool": tables.text("Tool"),
            "a_share": tables.share("Failed in A"),
            "b_share": tables.share("Failed in B"),
            "difference": tables.TableColumn("B \N{MINUS SIGN} A", kind=tables.Kind.SIGNED),
            "a_calls": tables.value("Calls in A"),
            "b_calls": tables.value("Calls in B"),
        }

        def failed(row: Row) -> str:
            in_a, in_b = ((row[f"{side}_share"] or 0.0) for side in "ab")
            worse = sides[0] if in_a > in_b else sides[1]
            return _build_episodes_address(worse, score, failed=row["tool"]) if max(in_a, in_b) else ""

        tables.draw_table(
            ui.draw_first_rows(frame, _MOST_TOOLS, "tools"), columns, label="Tools of both sides", href=failed
        )
        drawn = (
            ""
            if is_small
            else f" Each side is a sample of {compare.TOOL_SAMPLE:,} episodes, drawn by a hash of their ids."
        )
        st.caption(f"A row opens the episodes in which the tool failed, on the side with more failures.{drawn}")


def _draw_lengths(side_a: Side, side_b: Side, score: str | None) -> None:
    """Draw the outcome by length on both sides."""
    frame = read(compare.read_outcome_by_length, side_a, side_b, score)
    if frame["steps"].n_unique() < 2:
        return
    st.subheader("Outcome against length", anchor=False)
    lasts = dict(frame.select("steps", "last").iter_rows())

    def episodes(point: Row) -> str:
        first = int(point["steps"])
        return _build_episodes_address(
            side_a if point["side"] == "A" else side_b, score, steps_from=first, steps_to=lasts[first]
        )

    chart, table = st.columns([3, 2])
    ui.draw_episode_chart(chart, figures.build_length_chart(frame), "length", episodes)
    columns = {
        "steps": tables.value("Steps from"),
        "last": tables.value("to"),
        "side": tables.text("Side"),
        "episodes": tables.value("Episodes"),
        "outcome": tables.value("Mean outcome"),
    }
    with table:
        tables.draw_table(frame, columns, label="Lengths", href=episodes)
    st.caption("A point, or a row, opens its episodes.")


def _build_episodes_address(side: Side, score: str | None, **ends: int | str) -> str:
    """Return the address of a side's episodes, of some lengths or with a failed tool."""
    covered = None if side.credit is None else f"SELECT DISTINCT episode_id FROM {side.credit.rows}"
    if side.rounds is not None and side.rounds[0] == side.rounds[1]:
        ends["round"] = side.rounds[0]
    elif side.rounds is not None:
        ends |= {"round_from": side.rounds[0], "round_to": side.rounds[1]}
    return href(Page.EPISODES, run=side.run, version=side.policy_version, score=score, sql=covered, **ends)


def _draw_run(name: str, run: str, axis: runs.Axis, score: str | None) -> None:
    """Draw a run over its rounds or versions: curves, tools, and a row each that opens its episodes."""
    label_of_axis, key = run_details.AXIS_NAMES[axis], f"rounds_{name[0].lower()}"
    frame = read(compare.read_figures_over, run, axis, score)
    st.subheader(f"Run of {name} over {label_of_axis}s: {chip(run)}", anchor=False)
    curves = [
        (label, frame.select("x", "episodes", pl.col(column).cast(pl.Float64).alias("value")), is_share)
        for column, (label, is_share) in _FIGURES.items()
        if column in frame.columns and frame[column].count() and (column != "failed" or frame[column].sum())
    ]
    curves += [(f"Score {one_line(scorer)}", part, False) for scorer, part in run_details.read_score_curves(run, axis)]
    charts = []
    if len(curves) > _MOST_CURVES:
        st.caption(f"The first {_MOST_CURVES} of {number(len(curves))} curves.")
    for position, (label, part, is_share) in enumerate(curves[:_MOST_CURVES]):
        points = part.head(figures.MOST_ROWS)
        chart = figures.build_curve(points, "value", title=label, x_title=label_of_axis.capitalize(), share=is_share)
        charts.append((chart, f"{key}-{position}", run_details.make_point_address(run, axis, score, points)))
    run_details.draw_chart_grid(charts + run_details.build_unscored_chart(run, axis, key))
    run_details.draw_tools(run, axis, score, int(frame["episodes"].sum()), f"{key}_tools")
    columns = {
        "x": tables.value(label_of_axis.capitalize()),
        "episodes": tables.value("Episodes"),
        "outcome": tables.value("Mean outcome"),
        "completion_tokens": tables.value("Mean tokens", "Completion tokens of an episode.", digits=1),
        "num_steps": tables.value("Mean steps", digits=1),
        "failed": tables.share("Failed"),
        "truncated": tables.share("Truncated"),
        "invalid": tables.share("Invalid actions"),
        "tool_errors": tables.share("Error texts"),
    }
    st.caption(f"A point, or a row, opens the episodes of its {label_of_axis}.")
    window = ui.draw_pager(frame.height, f"{label_of_axis}s", name=key)
    tables.draw_table(
        frame.slice(window.offset, window.limit),
        tables.select_filled(frame, columns),
        label=f"{label_of_axis.capitalize()}s of {name}",
        href=run_details.make_point_address(run, axis, score, frame),
    )


_MOST_SERIES = 100
_EPISODE_COLUMNS = {
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task"),
    "rollout_index": tables.value("Rollout"),
    "status": tables.text("Status"),
    "episode_id": tables.ident("Episode"),
}
_TABLE_COLUMNS = {
    "table": tables.text("Table"),
    "before": tables.value("Rows then", "Includes rows of retracted episodes."),
    "after": tables.value("Rows now", "Includes rows of retracted episodes."),
}
_SERIES_COLUMNS = {
    "scorer": tables.text("Scorer"),
    "new": tables.value("New"),
    "gone": tables.value("Gone"),
    "other": tables.value("Another value"),
    "series_id": tables.ident("Series"),
}
_FLIP_COLUMNS = {
    "steps": tables.value("Steps", "Steps whose advantage has another sign."),
    "episodes": tables.value("Episodes"),
    "series_id": tables.ident("Credit series"),
}


def show_since() -> None:
    """Draw what changed since a state: new and retracted episodes, other scores, and advantages with another sign."""
    if not get_parameter(session.AS_OF):
        # Compare with the newest state, not with the state of the browser session.
        session.refresh()
    ui.draw_header("What changed since")
    since = get_parameter("since")
    if since is None:
        ui.end_with_not_found(
            "The address names no state (`?since=...`): a snapshot, a time or a version.", Page.RUNS, "Runs"
        )
    try:
        with st.spinner("Comparing", _cache=True):
            changes = session.get_session().compare_with(since)
    except TrajlakeError as error:
        ui.end_with_not_found(chip(error, 400), Page.RUNS, "Runs")
    episodes = changes.episodes
    st.caption(f"From {chip(since)} to the state above; `trajlake diff` shows the same.")
    ui.draw_facts(
        ("New episodes", number(episodes.added.height)),
        ("Retracted or replaced", number(episodes.removed.height), "An older state still shows them."),
        ("Scores that differ", number(episodes.scores.height)),
        ("Advantages with another sign", number(episodes.flips.height), "Advantages of both states, within a series."),
    )
    if changes.tables.height:
        tables.draw_table(changes.tables, _TABLE_COLUMNS, label="Tables")
    for title, frame, page in (("New", episodes.added, "page"), ("Gone", episodes.removed, "gone")):
        if frame.height:
            st.subheader(f"{title} episodes", anchor=False)
            window = ui.draw_pager(frame.height, "episodes", name=page)
            part = frame.slice(window.offset, window.limit)
            tables.draw_table(
                part,
                _EPISODE_COLUMNS,
                label=f"{title} episodes",
                href=lambda row: href(Page.EPISODE, episode=row["episode_id"]),
                key="episode_id",
            )
    if changes.series.height:
        st.subheader("Scores", anchor=False)
        tables.draw_table(
            ui.draw_first_rows(changes.series, _MOST_SERIES, "series"), _SERIES_COLUMNS, label="Scores by series"
        )
    if changes.flips.height:
        st.subheader("Signs of advantages", anchor=False)
        tables.draw_table(
            ui.draw_first_rows(changes.flips, _MOST_SERIES, "series"), _FLIP_COLUMNS, label="Advantages by series"
        )
