"""Charts: a small frame in, an Altair chart out. Colours are the theme's; NULL is drawn as a gap or a grey mark."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt
import polars as pl
from altair.utils import schemapi

from viewer.theme import ACCENT, NEGATIVE, POSITIVE, UNKNOWN

PICK = "pick"
"""Name of the selection that a click on a chart makes."""
MOST_ROWS = 4000
"""Rows that a chart draws at most (Altair refuses more than 5,000)."""

OTHERS = ("#c2410c", "#7c3aed", "#0f766e", "#a16207")
"""Colours of the jobs beside the one shown."""
_CLOSE: dict[str, Any] = {"labelPadding": 4, "titlePadding": 4}
"""Of axes: Streamlit's own paddings would take half of a small chart."""
_ROOM = {"left": 0, "top": 0, "right": 10, "bottom": 12}
"""Around a chart: half of the last label of an axis lies beyond its end, and would be cut off."""
_STEPS = alt.Axis(format="d", tickMinStep=1, grid=False, **_CLOSE)

# Each part of a chart would be checked as it is made, which takes longer than many a query. Tests check whole ones.
# For the same reason encodings below are channels (`alt.X("step:Q")`) everywhere: of a text Altair makes one slowly.
schemapi.disable_debug_mode()
Chart = alt.LayerChart | alt.FacetChart


class Drawn:
    """A chart as Streamlit takes it, and not checked once more."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart

    def to_dict(self) -> dict[str, Any]:
        """Its Vega-Lite."""
        return self._chart.to_dict(validate=False)


def curve(
    frame: pl.DataFrame, value: str, *, title: str, x_title: str, band: bool = False, share: bool = False
) -> Chart:
    """A value along `x`, with the band from `low` to `high` if asked for; shares are shown as percentages.

    A click picks the nearest point, by its `x`.
    """
    scale = _of_shares(frame["high" if band else value].max()) if share else alt.Scale(zero=False)
    label = "%" if share else _labels(frame[value])
    axis = alt.Axis(format=label, tickCount=4, **_CLOSE)
    furthest = frame["x"].max()
    is_long = isinstance(furthest, int | float) and furthest >= 10_000
    across = alt.Axis(format="~s", tickCount=5, grid=False, **_CLOSE) if is_long else _STEPS
    base = alt.Chart(frame).encode(x=alt.X("x:Q", title=x_title, axis=across))
    y = alt.Y(f"{value}:Q", title=None, scale=scale, axis=axis)
    tips = [
        alt.Tooltip("x:Q", title=x_title, format=",d"),
        alt.Tooltip(f"{value}:Q", title=title, format=".1%" if share else ".4~g"),
        alt.Tooltip("episodes:Q", title="Episodes", format=","),
    ]
    line = base.mark_line(color=POSITIVE, strokeWidth=2).encode(y=y)
    points = base.mark_point(color=POSITIVE, filled=True, size=36, opacity=1).encode(y=y, tooltip=tips)
    layers = [line, points.add_params(_pick("x"))]
    if band:
        low = alt.Y("low:Q", title=None, scale=scale)
        layers.insert(0, base.mark_area(opacity=0.18, color=POSITIVE).encode(y=low, y2=alt.Y2("high:Q")))
    return _sized(alt.layer(*layers), title)


def tools(frame: pl.DataFrame, x_title: str) -> Chart:
    """Shares of calls that failed, a line for each tool: columns x, tool, share, calls.

    A click picks the nearest point, by its `x` and `tool`.
    """
    base = alt.Chart(frame).encode(
        x=alt.X("x:Q", title=x_title, axis=_STEPS),
        y=alt.Y(
            "share:Q",
            title=None,
            scale=_of_shares(frame["share"].max()),
            axis=alt.Axis(format="%", tickCount=4, **_CLOSE),
        ),
        color=alt.Color(
            "tool:N",
            title=None,
            scale=alt.Scale(range=[NEGATIVE, POSITIVE, *OTHERS[1:], UNKNOWN]),
            sort=None,
            legend=alt.Legend(orient="top", padding=0, labelLimit=240),
        ),
    )
    tips = [
        alt.Tooltip("tool:N", title="Tool"),
        alt.Tooltip("x:Q", title=x_title, format=",d"),
        alt.Tooltip("share:Q", title="Failed", format=".1%"),
        alt.Tooltip("calls:Q", title="Calls", format=","),
    ]
    points = base.mark_point(filled=True, size=40, opacity=1).encode(tooltip=tips).add_params(_pick("x", "tool"))
    return _sized(alt.layer(base.mark_line(strokeWidth=2), points), "Calls that failed")


def by_length(frame: pl.DataFrame) -> Chart:
    """Mean outcome by number of steps, a line for each side: columns of `viewer.queries.compare.by_length`.

    A click picks the nearest point, by its `side` and `steps`.
    """
    colour = alt.Color(
        "side:N",
        title=None,
        scale=alt.Scale(domain=["A", "B"], range=[NEGATIVE, POSITIVE]),
        legend=alt.Legend(orient="top", padding=0),
    )
    base = alt.Chart(frame.drop_nulls("outcome")).encode(
        x=alt.X("steps:Q", title="Steps", axis=_STEPS),
        y=alt.Y("outcome:Q", title=None, axis=alt.Axis(format="~g", tickCount=5, **_CLOSE)),
        color=colour,
    )
    tips = [
        alt.Tooltip("side:N", title="Side"),
        alt.Tooltip("steps:Q", title="Steps from", format=",d"),
        alt.Tooltip("last:Q", title="Steps to", format=",d"),
        alt.Tooltip("outcome:Q", title="Mean outcome", format=".4~g"),
        alt.Tooltip("episodes:Q", title="Episodes", format=","),
    ]
    points = base.mark_point(filled=True, size=40, opacity=1).encode(tooltip=tips).add_params(_pick("steps", "side"))
    return _sized(alt.layer(base.mark_line(strokeWidth=2), points), None)


def task_histogram(frame: pl.DataFrame) -> Chart:
    """Number of tasks by success rate: columns success, tasks."""
    bars = (
        alt.Chart(frame)
        .mark_bar(color=POSITIVE, size=14, cornerRadiusEnd=2)
        .encode(
            x=alt.X(
                "success:Q",
                title="Success rate of a task",
                scale=alt.Scale(domain=[-0.03, 1.03]),
                axis=alt.Axis(format="%", grid=False, values=[0, 0.25, 0.5, 0.75, 1], **_CLOSE),
            ),
            y=alt.Y("tasks:Q", title=None, axis=alt.Axis(tickMinStep=1, tickCount=4, **_CLOSE)),
            tooltip=[alt.Tooltip("success:Q", title="Success", format=".0%"), alt.Tooltip("tasks:Q", title="Tasks")],
        )
    )
    return _sized(alt.layer(bars), "Tasks by success rate")


def histogram(frame: pl.DataFrame, value: str, of: str, *, title: str, x_title: str) -> Chart:
    """How many (column `of`) there are of each `value`, a text in the order of the rows."""
    bars = (
        alt.Chart(frame)
        .mark_bar(color=POSITIVE, cornerRadiusEnd=2)
        .encode(
            x=alt.X(f"{value}:N", title=x_title, sort=None, axis=alt.Axis(labelAngle=0, grid=False, labelOverlap=True)),
            y=alt.Y(f"{of}:Q", title=None, axis=alt.Axis(tickMinStep=1, tickCount=4, format="~s")),
            tooltip=[alt.Tooltip(f"{value}:N", title=x_title), alt.Tooltip(f"{of}:Q", title=of, format=",")],
        )
    )
    return _sized(alt.layer(bars), title, height=150)


def metric(
    frame: pl.DataFrame,
    name: str,
    selected: int | None,
    *,
    span: int = 1,
    alarms: Sequence[tuple[int, int]] = (),
    others: pl.DataFrame | None = None,
    titled: bool = True,
) -> Chart:
    """A training metric over steps: columns step, value. A click picks a step; the selected one is marked.

    Args:
        frame: the values; NULL is a gap.
        name: of the metric.
        selected: a step.
        span: of the exponential moving average that is drawn over the values, in points; 1: none.
        alarms: first and last steps of stretches that are marked.
        others: the same metric of other jobs, beside it: columns job, step, value.
        titled: the name stands above the chart.
    """
    shown = frame.filter(pl.col("value").is_not_null())
    x = alt.X("step:Q", title=None, axis=_STEPS)
    axis = alt.Axis(format=_labels(shown["value"]), tickCount=4, **_CLOSE)
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=axis)
    layers: list[alt.Chart] = []
    if alarms:
        stretches = pl.DataFrame([(first - 0.5, last + 0.5) for first, last in alarms], ["step", "until"], orient="row")
        marks = alt.Chart(stretches).mark_rect(color=NEGATIVE, opacity=0.14)
        layers.append(marks.encode(x=alt.X("step:Q", title=None, axis=_STEPS), x2=alt.X2("until:Q")))
    if others is not None:
        beside = alt.Chart(others.drop_nulls("value")).mark_line(strokeWidth=1.2)
        colours = alt.Scale(range=OTHERS)
        layers.append(
            beside.encode(x=x, y=y, color=alt.Color("job:N", scale=colours, legend=None), tooltip=alt.Tooltip("job:N"))
        )
    base = alt.Chart(shown).encode(x=x, y=y)
    layers.append(base.mark_line(color=POSITIVE, strokeWidth=1.5, opacity=1 if span == 1 else 0.3))
    if span > 1:
        smooth = shown.sort("step").with_columns(value=pl.col("value").ewm_mean(span=span))
        layers.append(alt.Chart(smooth).mark_line(color=POSITIVE, strokeWidth=2).encode(x=x, y=y))
    tips = [alt.Tooltip("step:Q", title="Step", format="d"), alt.Tooltip("value:Q", title=name, format=".5~g")]
    points = base.mark_point(size=60, opacity=0 if shown.height > 1 else 1, filled=True, color=POSITIVE)
    layers.append(points.encode(tooltip=tips).add_params(_pick("step")))
    if selected is not None:
        here = alt.Chart(shown.filter(pl.col("step") == selected))
        marked = here.mark_point(filled=True, size=70, color=ACCENT, opacity=1).encode(x=x, y=y)
        layers += [_rule(selected), marked]
    return _sized(alt.layer(*layers), name if titled else None, height=150)


def by_interest(names: Iterable[str]) -> list[str]:
    """Names of metrics, those that people look at first in front."""
    # What is held out first, then what tells whether anything is learned, then a loss that weights its tokens.
    first = ("validation_nll", "eval/success", "eval/score", "logprob", "loss")
    words = ("loss", "return", "reward", "success", "kl", "entropy", "clip", "grad")

    def rank(name: str) -> tuple[int, int, str]:
        place = first.index(name) if name in first else len(first)
        return place, next((i for i, word in enumerate(words) if word in name.lower()), len(words)), name

    return sorted(names, key=rank)


def signs(frame: pl.DataFrame, selected: int | None) -> Chart:
    """Shares of positive, negative, zero and unknown advantages over updates: step, positive, negative, undefined."""
    names = {"positive": POSITIVE, "zero": "#c9ced6", "negative": NEGATIVE, "unknown": UNKNOWN}
    shares = frame.select(
        "step",
        "positive",
        zero=(1 - pl.col("positive") - pl.col("negative") - pl.col("undefined")).clip(0, 1),
        negative="negative",
        unknown="undefined",
    )
    rows = shares.unpivot(index="step", variable_name="sign", value_name="share").filter(pl.col("share").is_not_null())
    areas = (
        alt.Chart(rows.head(MOST_ROWS))
        .mark_area(opacity=0.85)
        .encode(
            x=alt.X("step:Q", title=None, axis=_STEPS),
            y=alt.Y(
                "share:Q",
                title=None,
                stack="zero",
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(format="%", tickCount=4, **_CLOSE),
            ),
            color=alt.Color(
                "sign:N",
                title=None,
                scale=alt.Scale(domain=list(names), range=list(names.values())),
                legend=alt.Legend(orient="top", padding=0),
            ),
            tooltip=[
                alt.Tooltip("step:Q", title="Update", format="d"),
                alt.Tooltip("sign:N", title="Advantage"),
                alt.Tooltip("share:Q", title="Share", format=".1%"),
            ],
        )
    )
    layers = [areas] if selected is None else [areas, _rule(selected)]
    return _sized(alt.layer(*layers), "Signs of the advantages")


def _labels(values: pl.Series) -> str:
    """The format of an axis that runs over some values: as many digits as tell its labels apart, three at least."""
    largest, low, high = (float(found or 0) for found in (values.abs().max(), values.min(), values.max()))  # type: ignore[arg-type]
    if largest >= 1000:
        return "~s"
    # About four labels stand between the ends; a tick is then no less than a fifth of the way.
    digits = math.ceil(math.log10(5 * largest / (high - low))) + 1 if high > low else 3
    return f".{min(max(digits, 3), 9)}~g"


def _of_shares(largest: object) -> alt.Scale:
    """The scale of shares: up to 100 %, or less where all are small, as of errors, which would look like none."""
    most = float(largest) if isinstance(largest, int | float) else 1.0
    return alt.Scale(domain=[0, 1 if most > 0.4 else max(1.2 * most, 0.05)])


def _pick(*fields: str) -> alt.Parameter:
    """The selection of the point that is nearest to a click, by some of its fields."""
    picked: alt.Parameter = alt.selection_point(
        name=PICK, fields=list(fields), nearest=True, on="click", empty=False, clear=False
    )
    return picked


def _rule(step: int) -> alt.Chart:
    """The line that marks the selected step."""
    base = alt.Chart(pl.DataFrame({"step": [step]}))
    rule: alt.Chart = base.mark_rule(color=ACCENT, strokeWidth=1.5).encode(x=alt.X("step:Q"))
    return rule


def _sized(chart: Chart, title: str | None, height: int = 190) -> Chart:
    # On a canvas: a thousand points, each with what a click is nearest to, would be thousands of elements of the page.
    given: dict[str, Any] = {"height": height, "padding": _ROOM, "usermeta": {"embedOptions": {"renderer": "canvas"}}}
    if title is not None:
        given["title"] = alt.Title(title, fontSize=13, anchor="start", fontWeight=600, offset=6)
    sized: Chart = chart.properties(**given)
    return sized
