"""A run over its rounds, or the versions of its policy: curves of figures and scores, and which tools fail.

Parts of the pages Runs and What changed; every point and row opens its episodes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from viewer import components as ui
from viewer import figures, tables
from viewer.links import Page
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import number, one_line
from viewer.queries import Row, compare, runs, tools

CALLED: dict[runs.Axis, str] = {"collection_round": "round", "policy_version": "version"}
"""What a value of an axis is called, also in the address of a list."""
_LINES = 6
"""Tools that have a line of their own."""
_ROWS = 12


def opens(run: str, axis: runs.Axis, score: str | None, frame: pl.DataFrame) -> Callable[[Row], str]:
    """The address of the episodes of a point by its `x`, and of its `tool` if it has one.

    Args:
        frame: the points; with a column `last`, a point stands for a span that ends there.
    """
    lasts = dict(frame.select("x", "last").iter_rows()) if "last" in frame.columns else {}
    name = CALLED[axis]

    def address(point: Row) -> str:
        first = int(point["x"])
        last = lasts.get(first, first)
        failed = {"failed": point["tool"]} if "tool" in point else {}
        return href(Page.EPISODES, run=run, score=score, **within(name, first, last), **failed)

    return address


def within(name: str, first: int, last: int) -> dict[str, int]:
    """The part of an address that names a value of an axis, or a span of values."""
    return {name: first} if last == first else {f"{name}_from": first, f"{name}_to": last}


def scores(run: str, axis: runs.Axis, but: str | None = None) -> list[tuple[str, pl.DataFrame]]:
    """What each scorer says of the run's episodes, along the axis: its name, and rows x, last, value, episodes.

    Args:
        but: the scorer that is shown as the outcome already.
    """
    found = read(compare.scores_over, run, axis).partition_by("scorer", as_dict=True)
    return [(str(scorer), part) for (scorer,), part in found.items() if scorer != but]


def grid(curves: Sequence[tuple[figures.Chart, str, Callable[[Row], str] | None]], across: int = 3) -> None:
    """Charts side by side, each with its key and what its points open."""
    columns = st.columns(across)
    for position, (chart, key, address) in enumerate(curves):
        place: Any = columns[position % across]
        if address is None:
            ui.chart(place, chart, key)
        else:
            ui.chart_of_episodes(place, chart, key, address)


def show_tools(run: str, axis: runs.Axis, score: str | None, episodes: int, key: str) -> None:
    """Which tools fail, over rounds, if any are called; of a large run they are read when the reader asks for them.

    Args:
        episodes: of the run.
        key: of this part of the page.
    """
    called, is_small = CALLED[axis], episodes <= tools.SAMPLE
    if is_small and read(tools.over, run, axis).is_empty():
        return
    label = f"Tools: which began to fail, and in which {called}"
    part = st.expander(label, icon=":material/build:", expanded=is_small, key=key, on_change="rerun")
    if not part.open:
        return
    with part:
        frame = read(tools.over, run, axis)
        if not frame["failed"].sum():
            st.caption(none_failed(int(frame["calls"].sum())))
            return
        _tools(frame, run, axis, score, key)
        said = "A call failed if the state after it is an error text; of several calls in a step the last one counts."
        drawn = "" if is_small else f" Of {tools.SAMPLE:,} episodes of the run, drawn by a hash of their ids."
        st.caption(f"{said} A point, or a row, opens the episodes in which the tool failed.{drawn}")


def none_failed(calls: int) -> str:
    """That nothing is to be seen of tools."""
    return f"None of {number(calls)} calls failed." if calls else "No call of a tool is known to have failed or not."


def _tools(frame: pl.DataFrame, run: str, axis: runs.Axis, score: str | None, key: str) -> None:
    called = CALLED[axis]
    summed = tools.summed(frame)
    failing = summed.filter(pl.col("failed") > 0)["tool"].head(_LINES)
    chart, table = st.columns([3, 2])
    if (failed := int((summed["failed"] > 0).sum())) > _LINES:
        chart.caption(f"Lines of {_LINES} of {number(failed)} tools that failed.")
    shown = {tool: one_line(tool, 40) for tool in failing}  # as a legend shows them
    names = {label: tool for tool, label in shown.items()}
    lines = frame.filter(pl.col("tool").is_in(failing.implode()))
    lines = lines.select("x", "share", "calls", pl.col("tool").replace_strict(shown, return_dtype=pl.String))
    address = opens(run, axis, score, frame)
    ui.chart_of_episodes(
        chart,
        figures.tools(lines, called.capitalize()),
        f"{key}-lines",
        lambda point: address(point | {"tool": names[point["tool"]]}),
    )
    columns = {
        "tool": tables.text("Tool"),
        "first": tables.value(f"First {called}", f"The first {called} in which a call failed; a dash: none did."),
        "share": tables.share("Failed"),
        "failed": tables.value("Failed calls"),
        "calls": tables.value("Calls"),
    }
    with table:
        tables.table(
            ui.first(summed, _ROWS, "tools"),
            columns,
            label="Tools",
            href=lambda row: href(Page.EPISODES, run=run, score=score, failed=row["tool"]) if row["failed"] else "",
        )
