"""Parts of the pages on runs and jobs: counts, settings that differ, curves over rounds, tools that fail.

Each point of a curve, and each row of a table, opens its episodes.
"""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.documents import parse_json_object
from viewer import components as ui
from viewer import figures, tables
from viewer.navigation import Page, href
from viewer.plain import number, one_line, word
from viewer.queries import Row, compare, lineage, runs
from viewer.session import read

AXIS_NAMES: dict[runs.Axis, str] = {"collection_round": "round", "policy_version": "version"}
"""Name of a value of an axis, also in the address of a list."""
DEAD_MEANING = "Share of the groups with two or more scored siblings: those whose scored siblings all scored the same."
"""What *Dead groups* means on every page."""
_MAX_TOOL_LINES = 6
"""Maximum number of tools with a line in the chart."""
_MAX_TOOL_ROWS = 12


def make_point_address(run: str, axis: runs.Axis, score: str | None, frame: pl.DataFrame) -> Callable[[Row], str]:
    """Return a function from a point, by its `x` and its `tool` if it has one, to the address of its episodes.

    Args:
        frame: the points; with a column `last`, a point stands for a span that ends there.
    """
    lasts = dict(frame.select("x", "last").iter_rows()) if "last" in frame.columns else {}
    name = AXIS_NAMES[axis]

    def address(point: Row) -> str:
        first = int(point["x"])
        last = lasts.get(first, first)
        failed = {"failed": point["tool"]} if "tool" in point else {}
        return href(Page.EPISODES, run=run, score=score, **build_span(name, first, last), **failed)

    return address


def build_span(name: str, first: int, last: int) -> dict[str, int]:
    """Return the query parameters that name a value of an axis, or a span of values."""
    return {name: first} if last == first else {f"{name}_from": first, f"{name}_to": last}


def read_score_curves(run: str, axis: runs.Axis, except_scorer: str | None = None) -> list[tuple[str, pl.DataFrame]]:
    """Return the scores of a run along an axis, but for one scorer: each name, and rows x, last, value, episodes."""
    curves = read(compare.read_scores_over, run, axis).partition_by("scorer", as_dict=True)
    return [(str(scorer), part) for (scorer,), part in curves.items() if scorer != except_scorer]


OpenableChart = tuple[figures.Chart, str, Callable[[Row], str] | None]
"""A chart, its key, and the address of its points."""


def build_unscored_chart(run: str, axis: runs.Axis, key: str = "") -> list[OpenableChart]:
    """Return the chart of the share of episodes that each score lacks, as for `draw_chart_grid`; [] without any.

    Of many scores it shows those whose share changes most.
    """
    frame = read(compare.read_unscored_over, run, axis)
    if frame.is_empty():
        return []
    change = (pl.col("share").max() - pl.col("share").min()).alias("change")
    order = frame.group_by("scorer").agg(change).sort("change", "scorer", descending=[True, False])["scorer"]
    name_by_label = {one_line(scorer, 40): scorer for scorer in order.head(_MAX_TOOL_LINES)}
    lines = pl.concat(
        frame.filter(scorer=scorer).select("x", "share", "unscored", scorer=pl.lit(label))
        for label, scorer in name_by_label.items()
    )
    chart = figures.build_share_chart(lines, "scorer", "unscored", AXIS_NAMES[axis].capitalize(), "Unscored episodes")

    def address(point: Row) -> str:
        return make_point_address(run, axis, name_by_label[point["scorer"]], frame)(point) + "&unscored=true"

    return [(chart, f"unscored-{key}", address)]


def draw_chart_grid(curves: Sequence[OpenableChart], across: int = 3) -> None:
    """Draw charts side by side."""
    columns = st.columns(across)
    for position, (chart, key, address) in enumerate(curves):
        column: Any = columns[position % across]
        if address is None:
            ui.draw_chart(column, chart, key)
        else:
            ui.draw_episode_chart(column, chart, key, address)


def draw_tools(run: str, axis: runs.Axis, score: str | None, episodes: int, key: str) -> None:
    """Draw the tools that fail over rounds, if any are called; a large run is read when the reader opens this part."""
    axis_name, is_small = AXIS_NAMES[axis], episodes <= compare.TOOL_SAMPLE
    if is_small and read(compare.read_tools_over, run, axis).is_empty():
        return
    label = f"Tools: which began to fail, and in which {axis_name}"
    part = st.expander(label, icon=":material/build:", expanded=is_small, key=key, on_change="rerun")
    if not part.open:
        return
    with part:
        frame = read(compare.read_tools_over, run, axis)
        if not frame["failed"].sum():
            st.caption(describe_no_failures(int(frame["calls"].sum())))
            return
        _draw_tool_failures(frame, run, axis, score, key)
        caption = (
            "A call failed if the state after it is an error text; of several calls in a step the last one counts."
        )
        drawn = "" if is_small else f" Of {compare.TOOL_SAMPLE:,} episodes of the run, drawn by a hash of their ids."
        st.caption(f"{caption} A point, or a row, opens the episodes in which the tool failed.{drawn}")


def describe_no_failures(calls: int) -> str:
    """Say that no call of a tool failed, or that none is known."""
    return f"None of {number(calls)} calls failed." if calls else "No call of a tool is known to have failed or not."


def _draw_tool_failures(frame: pl.DataFrame, run: str, axis: runs.Axis, score: str | None, key: str) -> None:
    axis_name = AXIS_NAMES[axis]
    summed = compare.sum_tools(frame)
    failing = summed.filter(pl.col("failed") > 0)["tool"].head(_MAX_TOOL_LINES)
    chart, table = st.columns([3, 2])
    if (failed := int((summed["failed"] > 0).sum())) > _MAX_TOOL_LINES:
        chart.caption(f"Lines of {_MAX_TOOL_LINES} of {number(failed)} tools that failed.")
    label_by_tool = {tool: one_line(tool, 40) for tool in failing}  # as a legend shows them
    names = {label: tool for tool, label in label_by_tool.items()}
    lines = frame.filter(pl.col("tool").is_in(failing.implode()))
    lines = lines.select("x", "share", "calls", pl.col("tool").replace_strict(label_by_tool, return_dtype=pl.String))
    address = make_point_address(run, axis, score, frame)
    ui.draw_episode_chart(
        chart,
        figures.build_share_chart(lines, "tool", "calls", axis_name.capitalize(), "Calls that failed"),
        f"{key}-lines",
        lambda point: address(point | {"tool": names[point["tool"]]}),
    )
    columns = {
        "tool": tables.text("Tool"),
        "first": tables.value(f"First {axis_name}", f"The first {axis_name} in which a call failed; a dash: none did."),
        "share": tables.share("Failed"),
        "failed": tables.value("Failed calls", under="share"),
        "calls": tables.value("Calls", under="share"),
    }
    with table:
        tables.draw_table(
            ui.draw_first_rows(summed, _MAX_TOOL_ROWS, "tools"),
            columns,
            label="Tools",
            href=lambda row: href(Page.EPISODES, run=run, score=score, failed=row["tool"]) if row["failed"] else "",
        )


_COUNT_LABELS = {
    "groups_kept": "groups unchanged",
    "groups_ended": "groups removed",
    "undefined_steps": "advantages undefined",
    "unscored_groups": "groups with too few scores",
    "shared_steps": "steps in a state that a sibling visited",
    "singleton_steps": "steps in a state that no other step of their group has",
    "anchors": "anchor states",
    "one_action_anchors": "anchor states where all took the same action",
    "error_anchors": "anchor states that are error texts",
    "error_steps": "steps in error texts",
    "empty_steps": "steps in empty states",
    "sign_disagreements": "steps whose A_E and A_S have opposite signs",
    "copied_siblings": "groups with exact copies among the siblings",
    "already_present": "already present",
    "known_steps": "steps with a value",
    "overtaken": "overtaken by newer episodes",
}


def render_counts(document: str | None) -> tuple[str, dict[str, Any]]:
    """Return a job's counts as HTML, one line each, and the counts that are lists or objects."""
    counts = parse_json_object(document)
    nested = {name: count for name, count in counts.items() if isinstance(count, list | dict)}
    lines = []
    for name, count in counts.items():
        if name in nested or count is None:
            continue
        label = escape(one_line(_COUNT_LABELS.get(name, name.replace("_", " ")), 200))
        if isinstance(count, int | float) and not isinstance(count, bool):
            lines.append(f"<li><b>{number(count)}</b> {label}</li>")
        else:
            text = {True: "yes", False: "no"}[count] if isinstance(count, bool) else one_line(str(count), 200)
            lines.append(f"<li>{label}: <b>{escape(text)}</b></li>")
    return (f'<ul class="trajlake-counts">{"".join(lines)}</ul>' if lines else ""), nested


_MAX_SETTINGS = 200


def draw_settings(frame: pl.DataFrame, a_label: str, b_label: str) -> None:
    """Draw the rows of `lineage.compare_settings` under two headings."""
    columns = {
        "setting": tables.text("Parameter"),
        "a": tables.wide(a_label),
        "b": tables.wide(b_label),
        "differs": tables.mark("Differs"),
    }
    differing = int(frame["differs"].sum())
    st.caption(f"{differing} of {frame.height} parameters differ.")
    tables.draw_table(ui.draw_first_rows(frame, _MAX_SETTINGS, "parameters"), columns, label="Parameters side by side")


def draw_side_settings(side_a: compare.Side, side_b: compare.Side) -> None:
    """Draw the parameters in which the newest jobs of two sides differ, for each kind of job."""
    frames, same = [], []
    for row in read(lineage.pair_newest_jobs, side_a, side_b).iter_rows(named=True):
        differing = lineage.compare_run_settings(row, side_a.run, side_b.run)
        if differing.is_empty():
            same.append(word(row["kind"]))
        identity = {"kind": pl.lit(row["kind"]), "job": pl.lit(row["a"]), "other_job": pl.lit(row["b"])}
        frames.append(differing.with_columns(**identity))
    if not frames:
        return
    frame = pl.concat(frames)
    st.subheader("Settings that differ", anchor=False)
    if frame.height:
        columns = {
            "kind": tables.text("Job", "The newest of its kind on each side, by the rounds of the page *Jobs*."),
            "setting": tables.text("Parameter"),
            "a": tables.wide("A"),
            "b": tables.wide("B"),
        }
        tables.draw_table(
            ui.draw_first_rows(frame, _MAX_SETTINGS, "parameters"),
            columns,
            label="Settings that differ",
            href=lambda row: href(Page.JOB, job=ids.to_text(row["job"]), beside=ids.to_text(row["other_job"])),
        )
    if same:
        st.caption(f"The same in both: all parameters of {', '.join(same)}.")
