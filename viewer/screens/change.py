"""What changed from A to B, each a run, some of its rounds, a version of the policy, or a credit job: why it fell."""

import re
from collections.abc import Callable

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.judgements.credit import Credit
from viewer import choices, figures, over_rounds, settings, stale, tables
from viewer import components as ui
from viewer.links import Page
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import chip, number, one_line, percent, word
from viewer.queries import Row, Window, compare, lineage, runs, tools, training
from viewer.queries.compare import Side

# Tasks of a page.
_TASKS = 20
# Runs of which comparisons are suggested.
_SUGGESTED = 8
# Pairs of runs whose settings are compared, those that are suggested of them, and settings that are named.
_PAIRS, _EXPERIMENTS, _NAMED = 12, 3, 3
# Curves over rounds.
_MOST_CURVES = 12
# Tools of both sides.
_TOOLS = 15
_CLEAR = tables.mark("Not 0", "The interval leaves out 0.")
_IS_CLEAR = ((pl.col("low") > 0) | (pl.col("high") < 0)).alias("clear")
_ROUNDS = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
_FIGURES = {
    "outcome": ("Outcome", False),
    "completion_tokens": ("Completion tokens", False),
    "num_steps": ("Steps", False),
    "truncated": ("Truncated episodes", True),
    "invalid": ("Invalid actions", True),
    "tool_errors": ("States that are error texts", True),
    "disagree": ("A_E and A_S of opposite signs", True),
    "size": ("Mean |A|", False),
}


def show() -> None:
    """The page."""
    ui.header("What changed")
    if not read(runs.total):
        ui.empty("This lake holds no episodes yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    places = st.columns([5, 5, 2], vertical_alignment="center")
    with places[0]:
        one = _side("a")
    with places[1]:
        other = _side("b")
    with places[2]:
        score = choices.outcome(None)
    if one == other == Side():
        _suggestions()
        return
    if one == other:
        st.info("A and B are the same: choose another run, other rounds, another version.", icon=":material/info:")
        return
    current = read(training.credit_named)
    sides = tuple(read(compare.by_task, side, current, score) for side in (one, other))
    frames = (sides[0], sides[1])
    empty = [name for name, frame in zip("AB", frames, strict=True) if frame.is_empty()]
    if empty:
        ui.missing(f"No episode is in {' nor in '.join(empty)}.")
        return
    _summary(frames, (one, other), current)
    _flips(one, other)
    if one.run is not None and other.run is not None and one.run != other.run:
        settings.of_runs(one.run, other.run)
    _tools((one, other), frames, score)
    _tasks(frames, score)
    _length(one, other, score)
    for name, run in _runs(one, other):
        for axis in read(runs.axes, run)[:1]:
            _over(name, run, axis, score)


def _suggestions() -> None:
    """What could be compared: the first and last round of runs, or else version, and the newest two runs."""
    st.info("Choose what to compare, or begin with one of these.", icon=":material/compare_arrows:")
    newest = read(runs.page, 1.0, Window(_SUGGESTED))["run_id"].to_list()
    _experiments(tuple(newest))
    for fell in read(compare.steepest, tuple(newest)).sort("fall", descending=True).iter_rows(named=True):
        run, before, after = fell["run_id"], fell["before"], fell["after"]
        label = f"{chip(run)}: round {before} and round {after}, where its outcome fell most, by {number(fell['fall'])}"
        ui.link(Page.CHANGE, label, "trending_down", a_run=run, a_rounds=before, b_run=run, b_rounds=after)
    for run in newest:
        span = read(compare.rounds, run)
        if span is not None and span[0] < span[1]:
            label = f"{chip(run)}: round {span[0]} and round {span[1]}"
            ui.link(Page.CHANGE, label, "compare_arrows", a_run=run, a_rounds=span[0], b_run=run, b_rounds=span[1])
            continue
        span = read(compare.versions, run)
        if span is not None and span[0] < span[1]:
            label = f"{chip(run)}: version {span[0]} and version {span[1]} of the policy"
            ui.link(Page.CHANGE, label, "compare_arrows", a_run=run, a_version=span[0], b_run=run, b_version=span[1])
    if len(newest) > 1:
        label = f"{chip(newest[1])} and {chip(newest[0])}"
        ui.link(Page.CHANGE, label, "compare_arrows", a_run=newest[1], b_run=newest[0])


def _experiments(newest: tuple[str, ...]) -> None:
    """Runs of the same tasks that differ in a setting, those that differ in fewest first."""
    found = []
    for one, other in read(compare.sharing_tasks, newest)[:_PAIRS]:
        differing = read(lineage.settings_between, one, other)
        if differing:
            found.append((one, other, differing))
    for one, other, differing in sorted(found, key=lambda pair: len(pair[2]))[:_EXPERIMENTS]:
        told = ", ".join(map(word, differing[:_NAMED])) + (" and others" if len(differing) > _NAMED else "")
        label = f"{chip(one)} and {chip(other)}: the same tasks, another {told}"
        ui.link(Page.CHANGE, label, "science", a_run=one, b_run=other)


def _side(name: str) -> Side:
    """The choice of a side, which stands in the address as `a_run`, `a_rounds`, ..."""
    with st.container(border=True):
        run = choices.one_run(f"{name.upper()}: run", f"{name}_run")
        of_rounds, of_version, of_credit = st.columns(3)
        rounds = of_rounds.text_input("Rounds", key=f"{name}_rounds", placeholder="all, 3 or 2-5", **ui.FILTER)
        version = of_version.text_input("Policy version", key=f"{name}_version", placeholder="all", **ui.FILTER)
        with of_credit:
            credit = choices.named_credit(f"{name}_credit")
    span = _span(rounds)
    if rounds and span is None:
        ui.missing(f"{chip(rounds)} are no rounds: write 3, or 2-5.")
    if version and not version.isdigit():
        ui.missing(f"{chip(version)} is no policy version: write a whole number.")
    return Side(run, span, int(version) if version and version.isdigit() else None, credit)


def _span(text: str | None) -> tuple[int, int] | None:
    """The first and last round of a text such as `3` or `2-5`; None if it is none."""
    found = _ROUNDS.fullmatch(text or "")
    return None if found is None else (int(found[1]), int(found[2] or found[1]))


def _runs(one: Side, other: Side) -> list[tuple[str, str]]:
    """The runs whose rounds are drawn."""
    if one.run == other.run:
        return [("A and B", one.run)] if one.run else []
    return [(name, side.run) for name, side in (("A", one), ("B", other)) if side.run]


def _summary(frames: compare.Frames, sides: tuple[Side, Side], current: Credit | None) -> None:
    """Every figure on both sides, by task."""
    said = (read(compare.scores, sides[0]), read(compare.scores, sides[1]))
    frame = compare.figures(frames, said)
    shown = frame.with_columns(
        _IS_CLEAR, figure=pl.Series([_FIGURES.get(name, (name, False))[0] for name in frame["figure"]], dtype=pl.String)
    )
    columns = {
        "figure": tables.text("Figure"),
        "a": tables.value("A"),
        "b": tables.value("B"),
        "difference": tables.Column("B \N{MINUS SIGN} A", tables.Kind.SIGNED, "Mean difference over tasks."),
        "low": tables.Column("95 % from", tables.Kind.SIGNED, "95 % interval over tasks; a dash: it cannot be told."),
        "high": tables.Column("to", tables.Kind.SIGNED, "95 % interval over tasks; a dash: it cannot be told."),
        "clear": _CLEAR,
        "tasks": tables.value("Tasks of both", "Two or more: these are compared, task by task."),
        "only_a": tables.value("only in A"),
        "only_b": tables.value("only in B"),
    }
    counts = [
        f"{name}: {number(int(frame['episodes'].sum()))} episodes of {number(frame.height)} tasks"
        for name, frame in zip("AB", frames, strict=True)
    ]
    how = (
        "Figures are paired by task: those that both sides know count, each once."
        if frame["is_paired"].any()
        else f"They have {'one task' if frame['tasks'].max() else 'no task'} in common: each side's tasks count once, "
        "and intervals are wide, as tasks differ."
    )
    wide = "95 % intervals are Student's: with few tasks they may reach beyond what a figure can be."
    st.caption(f"{'; '.join(counts)}. {how} {wide}")
    tables.table(shown, columns, label="Figures")
    stale.line(*(side.credit or current for side in sides))


def _flips(one: Side, other: Side) -> None:
    """How far two credits disagree."""
    if one.credit is None or other.credit is None or one.credit == other.credit:
        return
    found = read(compare.flips, one.credit, other.credit)
    if not found["steps"]:
        st.caption("The two credits have no step in common.")
        return
    ui.fact(
        "advantages of opposite signs",
        f"**{number(found['flipped'])} of {number(found['steps'])}** steps with "
        f"one in both ({percent(found['flipped'] / found['steps'])})",
    )


def _tasks(frames: compare.Frames, score: str | None) -> None:
    st.subheader("Tasks", anchor=False)
    order = tables.ordered_by()
    total = pl.concat([frame.select("task_id") for frame in frames])["task_id"].n_unique()
    frame = compare.tasks(frames, ui.pager(total, "tasks", rows=_TASKS), order).with_columns(_IS_CLEAR)
    columns = {
        "task_id": tables.text("Task"),
        "a": tables.value("A", "Mean outcome."),
        "b": tables.value("B", "Mean outcome."),
        "difference": tables.Column("B \N{MINUS SIGN} A", tables.Kind.SIGNED),
        "low": tables.Column("95 % from", tables.Kind.SIGNED, "95 % interval (Welch); a dash: too few to tell."),
        "high": tables.Column("to", tables.Kind.SIGNED, "95 % interval (Welch); a dash: too few to tell."),
        "clear": _CLEAR,
        "a_episodes": tables.value("Episodes A"),
        "b_episodes": tables.value("Episodes B"),
        "a_steps": tables.value("Steps A", digits=1),
        "b_steps": tables.value("Steps B", digits=1),
    }
    tables.table(
        frame.select(*columns, "a_episode", "b_episode"),
        columns,
        label="Tasks",
        href=_pair(score),
        key="task_id",
        sortable=compare.TASK_ORDERS,
    )
    st.caption("A row opens the two episodes that show the difference most, side by side.")


def _pair(score: str | None) -> Callable[[Row], str]:
    """The address of a task's row: two episodes side by side, or the episodes where only one side has any scored."""

    def address(row: Row) -> str:
        pair = [row[f"{name}_episode"] for name in "ab" if row[f"{name}_episode"] is not None]
        if len(set(pair)) == 2:
            return href(Page.COMPARE, episode=[ids.to_text(one) for one in pair], score=score)
        return href(Page.EPISODES, task=row["task_id"], score=score)

    return address


def _tools(sides: tuple[Side, Side], frames: compare.Frames, score: str | None) -> None:
    """Which tools fail more often on one side, if any are called; of many episodes they are read when asked for."""
    is_small = max(int(frame["episodes"].sum()) for frame in frames) <= tools.SAMPLE
    if is_small and all(read(tools.of, side).is_empty() for side in sides):
        return
    label = "Tools: which fail more often"
    part = st.expander(label, icon=":material/build:", expanded=is_small, key="tools", on_change="rerun")
    if not part.open:
        return
    of_sides = [read(tools.of, side) for side in sides]
    with part:
        if not sum(int(frame["failed"].sum()) for frame in of_sides):
            st.caption(over_rounds.none_failed(sum(int(frame["calls"].sum()) for frame in of_sides)))
            return
        frame = tools.compared(*of_sides)
        columns = {
            "tool": tables.text("Tool"),
            "a_share": tables.share("Failed in A"),
            "b_share": tables.share("Failed in B"),
            "difference": tables.Column("B \N{MINUS SIGN} A", tables.Kind.SIGNED),
            "a_calls": tables.value("Calls in A"),
            "b_calls": tables.value("Calls in B"),
        }

        def failed(row: Row) -> str:
            in_a, in_b = ((row[f"{side}_share"] or 0.0) for side in "ab")
            worse = sides[0] if in_a > in_b else sides[1]
            return _episodes(worse, score, failed=row["tool"]) if max(in_a, in_b) else ""

        tables.table(ui.first(frame, _TOOLS, "tools"), columns, label="Tools of both sides", href=failed)
        drawn = "" if is_small else f" Of {tools.SAMPLE:,} episodes of a side, drawn by a hash of their ids."
        st.caption(f"A row opens the episodes in which the tool failed, of the side where it did more often.{drawn}")


def _length(one: Side, other: Side, score: str | None) -> None:
    """Outcome against length, on both sides."""
    frame = read(compare.by_length, one, other, score)
    if frame["steps"].n_unique() < 2:
        return
    st.subheader("Outcome against length", anchor=False)
    lasts = dict(frame.select("steps", "last").iter_rows())

    def episodes(point: Row) -> str:
        first = int(point["steps"])
        return _episodes(one if point["side"] == "A" else other, score, steps_from=first, steps_to=lasts[first])

    chart, table = st.columns([3, 2])
    ui.chart_of_episodes(chart, figures.by_length(frame), "length", episodes)
    columns = {
        "steps": tables.value("Steps from"),
        "last": tables.value("to"),
        "side": tables.text("Side"),
        "episodes": tables.value("Episodes"),
        "outcome": tables.value("Mean outcome"),
    }
    with table:
        tables.table(frame, columns, label="Lengths", href=episodes)
    st.caption("A point, or a row, opens its episodes.")


def _episodes(side: Side, score: str | None, **ends: int | str) -> str:
    """The address of a side's episodes, of some lengths or with a failed tool."""
    covered = None if side.credit is None else f"SELECT DISTINCT episode_id FROM {side.credit.rows}"
    if side.rounds is not None and side.rounds[0] == side.rounds[1]:
        ends["round"] = side.rounds[0]
    elif side.rounds is not None:
        ends |= {"round_from": side.rounds[0], "round_to": side.rounds[1]}
    return href(Page.EPISODES, run=side.run, version=side.policy_version, score=score, sql=covered, **ends)


def _over(name: str, run: str, axis: runs.Axis, score: str | None) -> None:
    """A run over its rounds, or else its versions: curves, tools, and a row for each that opens its episodes."""
    called, key = over_rounds.CALLED[axis], f"rounds_{name[0].lower()}"
    frame = read(compare.over, run, axis, score)
    st.subheader(f"Run of {name} over {called}s: {chip(run)}", anchor=False)
    curves = [
        (label, frame.select("x", "episodes", pl.col(column).cast(pl.Float64).alias("value")), is_share)
        for column, (label, is_share) in _FIGURES.items()
        if column in frame.columns and frame[column].count()
    ]
    curves += [(f"Score {one_line(scorer)}", part, False) for scorer, part in over_rounds.scores(run, axis)]
    charts = []
    if len(curves) > _MOST_CURVES:
        st.caption(f"The first {_MOST_CURVES} of {number(len(curves))} curves.")
    for position, (label, part, is_share) in enumerate(curves[:_MOST_CURVES]):
        points = part.head(figures.MOST_ROWS)
        chart = figures.curve(points, "value", title=label, x_title=called.capitalize(), share=is_share)
        charts.append((chart, f"{key}-{position}", over_rounds.opens(run, axis, score, points)))
    over_rounds.grid(charts)
    over_rounds.show_tools(run, axis, score, int(frame["episodes"].sum()), f"{key}_tools")
    columns = {
        "x": tables.value(called.capitalize()),
        "episodes": tables.value("Episodes"),
        "outcome": tables.value("Mean outcome"),
        "completion_tokens": tables.value("Mean tokens", "Completion tokens of an episode.", digits=1),
        "num_steps": tables.value("Mean steps", digits=1),
        "truncated": tables.share("Truncated"),
        "invalid": tables.share("Invalid actions"),
        "tool_errors": tables.share("Error texts"),
    }
    st.caption(f"A point, or a row, opens the episodes of its {called}.")
    window = ui.pager(frame.height, f"{called}s", name=key)
    tables.table(
        frame.slice(window.offset, window.limit),
        tables.known(frame, columns),
        label=f"{called.capitalize()}s of {name}",
        href=over_rounds.opens(run, axis, score, frame),
    )


show()
