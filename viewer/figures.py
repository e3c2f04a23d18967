"""Charts: a small frame in, Vega-Lite out. Colours are the theme's; NULL is drawn as a gap or a grey mark.

Written as Vega-Lite, not through Altair, which copies every mark and channel at each step of a chain: ten charts took
as long as all queries of their page. Tests check whole charts against the schema.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import polars as pl

from viewer.theme import ACCENT, NEGATIVE, POSITIVE, UNKNOWN

PICK = "pick"
"""Name of the selection that a click on a chart makes."""
MOST_ROWS = 4000
"""Rows that a chart draws at most."""

OTHERS = ("#c2410c", "#7c3aed", "#0f766e", "#a16207")
"""Colours of the jobs beside the one shown."""
Spec = dict[str, Any]
"""A part of a chart."""
Chart = dict[str, Any]
"""A chart in Vega-Lite, whose `datasets` are frames, as `vega_lite_chart` of Streamlit takes it."""
_CLOSE: Spec = {"labelPadding": 4, "titlePadding": 4}
"""Of axes: Streamlit's own paddings would take half of a small chart."""
_ROOM = {"left": 0, "top": 0, "right": 10, "bottom": 12}
"""Around a chart: half of the last label of an axis lies beyond its end, and would be cut off."""
_STEPS: Spec = {"format": "d", "tickMinStep": 1, "grid": False, **_CLOSE}
_APART: Spec = {"zero": False, "nice": False, "padding": 6}
"""Of the axis that a curve runs along: its first point would lie on the other axis's labels."""
_ON_TOP: Spec = {"orient": "top", "padding": 0}


def curve(
    frame: pl.DataFrame,
    value: str,
    *,
    title: str,
    x_title: str,
    band: bool = False,
    share: bool = False,
    picks: Sequence[str] = ("x",),
) -> Chart:
    """A value along `x`, with the band from `low` to `high` if asked for; shares are shown as percentages.

    A click picks the nearest point, by the columns `picks`.
    """
    scale = _of_shares(frame["high" if band else value].max()) if share else {"zero": False}
    axis = {"format": "%" if share else _labels(frame[value]), "tickCount": 4, **_CLOSE}
    furthest = frame["x"].max()
    is_long = isinstance(furthest, int | float) and furthest >= 10_000
    across = {"format": "~s", "tickCount": 5, "grid": False, **_CLOSE} if is_long else _STEPS
    x, y = _number("x", x_title, axis=across, scale=_APART), _number(value, scale=scale, axis=axis)
    tips = [
        _number("x", x_title, format=",d"),
        _number(value, title, format=".1%" if share else ".4~g"),
        _number("episodes", "Episodes", format=","),
    ]
    line = _layer(frame, "line", {"color": POSITIVE, "strokeWidth": 2}, x=x, y=y)
    dots = {"color": POSITIVE, "filled": True, "size": 36, "opacity": 1}
    layers = [line, _layer(frame, "point", dots, x=x, y=y, tooltip=tips)]
    if band:
        low = _number("low", scale=scale)
        layers.insert(0, _layer(frame, "area", {"opacity": 0.18, "color": POSITIVE}, x=x, y=low, y2={"field": "high"}))
    return _chart(layers, title, pick=picks)


def tools(frame: pl.DataFrame, x_title: str) -> Chart:
    """Shares of calls that failed, a line for each tool: columns x, tool, share, calls.

    A click picks the nearest point, by its `x` and `tool`.
    """
    axis = {"format": "%", "tickCount": 4, **_CLOSE}
    channels = {
        "x": _number("x", x_title, axis=_STEPS),
        "y": _number("share", scale=_of_shares(frame["share"].max()), axis=axis),
        "color": _name(
            "tool",
            scale={"range": [NEGATIVE, POSITIVE, *OTHERS[1:], UNKNOWN]},
            sort=None,
            legend=_ON_TOP | {"labelLimit": 240},
        ),
    }
    tips = [
        _name("tool", "Tool"),
        _number("x", x_title, format=",d"),
        _number("share", "Failed", format=".1%"),
        _number("calls", "Calls", format=","),
    ]
    return _chart(_joined_dots(frame, channels, tips), "Calls that failed", pick=["x", "tool"])


def by_length(frame: pl.DataFrame) -> Chart:
    """Mean outcome by number of steps, a line for each side: columns of `viewer.queries.compare.by_length`.

    A click picks the nearest point, by its `side` and `steps`.
    """
    channels = {
        "x": _number("steps", "Steps", axis=_STEPS),
        "y": _number("outcome", axis={"format": "~g", "tickCount": 5, **_CLOSE}),
        "color": _name("side", scale={"domain": ["A", "B"], "range": [NEGATIVE, POSITIVE]}, legend=_ON_TOP),
    }
    tips = [
        _name("side", "Side"),
        _number("steps", "Steps from", format=",d"),
        _number("last", "Steps to", format=",d"),
        _number("outcome", "Mean outcome", format=".4~g"),
        _number("episodes", "Episodes", format=","),
    ]
    return _chart(_joined_dots(frame.drop_nulls("outcome"), channels, tips), None, pick=["steps", "side"])


def task_histogram(frame: pl.DataFrame) -> Chart:
    """Number of tasks by success rate: columns success, tasks."""
    bars = _layer(
        frame,
        "bar",
        {"color": POSITIVE, "size": 14, "cornerRadiusEnd": 2},
        x=_number(
            "success",
            "Success rate of a task",
            scale={"domain": [-0.03, 1.03]},
            axis={"format": "%", "grid": False, "values": [0, 0.25, 0.5, 0.75, 1], **_CLOSE},
        ),
        y=_number("tasks", axis={"tickMinStep": 1, "tickCount": 4, **_CLOSE}),
        tooltip=[_number("success", "Success", format=".0%"), _number("tasks", "Tasks")],
    )
    return _chart([bars], "Tasks by success rate")


def histogram(frame: pl.DataFrame, value: str, of: str, *, title: str, x_title: str) -> Chart:
    """How many (column `of`) there are of each `value`, a text in the order of the rows."""
    bars = _layer(
        frame,
        "bar",
        {"color": POSITIVE, "cornerRadiusEnd": 2},
        x=_name(value, x_title, sort=None, axis={"labelAngle": 0, "grid": False, "labelOverlap": True}),
        y=_number(of, axis={"tickMinStep": 1, "tickCount": 4, "format": "~s"}),
        tooltip=[_name(value, x_title), _number(of, of, format=",")],
    )
    return _chart([bars], title, height=150)


def metric(
    frame: pl.DataFrame,
    name: str,
    selected: int | None,
    *,
    span: int = 1,
    alarms: Sequence[tuple[int, int]] = (),
    others: pl.DataFrame | None = None,
    colours: Mapping[str, str] = MappingProxyType({}),
    titled: bool = True,
) -> Chart:
    """A training metric over steps: columns step, value. A click picks a step; the selected one is marked.

    Args:
        frame: the values; NULL is a gap.
        name: of the metric.
        selected: a step.
        span: of the exponential moving average that is drawn over the values, and instead of those of other jobs, in
            points; 1: none.
        alarms: first and last steps of stretches that are marked.
        others: the same metric of other jobs, beside it: columns job, step, value.
        colours: of all jobs beside it, those that have no such metric too.
        titled: the name stands above the chart.
    """
    shown = frame.filter(pl.col("value").is_not_null())
    x = _number("step", axis=_STEPS)
    y = _number("value", scale={"zero": False}, axis={"format": _labels(shown["value"]), "tickCount": 4, **_CLOSE})
    layers = []
    if alarms:
        stretches = pl.DataFrame([(first - 0.5, last + 0.5) for first, last in alarms], ["step", "until"], orient="row")
        layers.append(_layer(stretches, "rect", {"color": NEGATIVE, "opacity": 0.14}, x=x, x2={"field": "until"}))
    if others is not None:
        # Without a domain Vega gives the colours out by name, to the jobs that have this metric.
        scale = {"domain": list(colours), "range": list(colours.values())}
        colour = _name("job", "job", scale=scale, legend=None)
        beside, tip = _smooth(others.drop_nulls("value"), span), _name("job", "job")
        layers.append(_layer(beside, "line", {"strokeWidth": 1.2}, x=x, y=y, color=colour, tooltip=tip))
    line = {"color": POSITIVE, "strokeWidth": 1.5, "opacity": 1 if span == 1 else 0.3}
    layers.append(_layer(shown, "line", line, x=x, y=y))
    if span > 1:
        smooth = _smooth(shown.with_columns(job=pl.lit(None, pl.String)), span)
        layers.append(_layer(smooth, "line", {"color": POSITIVE, "strokeWidth": 2}, x=x, y=y))
    tips = [_number("step", "Update", format="d"), _number("value", name, format=".5~g")]
    dots = {"size": 60, "opacity": 0 if shown.height > 1 else 1, "filled": True, "color": POSITIVE}
    layers.append(_layer(shown, "point", dots, x=x, y=y, tooltip=tips))
    marks = []
    if selected is not None:
        here = {"filled": True, "size": 70, "color": ACCENT, "opacity": 1}
        marks = [_rule(selected), _layer(shown.filter(pl.col("step") == selected), "point", here, x=x, y=y)]
    return _chart(layers, name if titled else None, marks, height=150, pick=["step"])


def _smooth(curves: pl.DataFrame, span: int) -> pl.DataFrame:
    """The exponential moving average of each job's values."""
    return curves.sort("step").with_columns(pl.col("value").ewm_mean(span=span).over("job"))


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
    """Shares of positive, negative, zero and unknown advantages over updates: step, positive, negative, undefined.

    A click picks the nearest step.
    """
    names = {"positive": POSITIVE, "zero": "#c9ced6", "negative": NEGATIVE, "unknown": UNKNOWN}
    shares = frame.select(
        "step",
        "positive",
        zero=(1 - pl.col("positive") - pl.col("negative") - pl.col("undefined")).clip(0, 1),
        negative="negative",
        unknown="undefined",
    )
    rows = shares.unpivot(index="step", variable_name="sign", value_name="share").filter(pl.col("share").is_not_null())
    x = _number("step", axis=_STEPS)
    stacked = _layer(
        rows.head(MOST_ROWS),
        "area" if shares.height > 1 else "bar",  # an area needs two steps
        {"opacity": 0.85},
        x=x,
        y=_number("share", stack="zero", scale={"domain": [0, 1]}, axis={"format": "%", "tickCount": 4, **_CLOSE}),
        color=_name(
            "sign",
            scale={"domain": list(names), "range": list(names.values())},
            legend=_ON_TOP | {"columns": 2},  # four in a line are wider than a small chart
        ),
    )
    tips = [_number(name, name.capitalize(), format=".1%") for name in names]
    # An area is no point that a click may be near to.
    points = _layer(
        shares.head(MOST_ROWS),
        "point",
        {"opacity": 0},
        x=x,
        y={"datum": 0.5, "type": "quantitative"},
        tooltip=[_number("step", "Update", format="d"), *tips],
    )
    marks = [] if selected is None else [_rule(selected)]
    return _chart([stacked, points], "Signs of the advantages", marks, pick=["step"])


def _labels(values: pl.Series) -> str:
    """The format of an axis that runs over some values: as many digits as tell its labels apart, three at least."""
    largest, low, high = (float(found or 0) for found in (values.abs().max(), values.min(), values.max()))  # type: ignore[arg-type]
    if largest >= 1000:
        return "~s"
    # About four labels stand between the ends; a tick is then no less than a fifth of the way.
    digits = math.ceil(math.log10(5 * largest / (high - low))) + 1 if high > low else 3
    return f".{min(max(digits, 3), 9)}~g"


def _of_shares(largest: object) -> Spec:
    """The scale of shares: up to 100 %, or less where all are small, as of errors, which would look like none."""
    most = float(largest) if isinstance(largest, int | float) else 1.0
    return {"domain": [0, 1 if most > 0.4 else max(1.2 * most, 0.05)]}


def _number(field: str, title: str | None = None, **options: Any) -> Spec:
    """A channel of numbers."""
    return {"field": field, "type": "quantitative", "title": title, **options}


def _name(field: str, title: str | None = None, **options: Any) -> Spec:
    """A channel of names."""
    return {"field": field, "type": "nominal", "title": title, **options}


def _layer(frame: pl.DataFrame, mark: str, look: Spec, **channels: Any) -> Spec:
    return {"data": frame, "mark": {"type": mark, **look}, "encoding": channels}


def _joined_dots(frame: pl.DataFrame, channels: Spec, tips: list[Spec]) -> list[Spec]:
    """A line and its points."""
    dots = _layer(frame, "point", {"filled": True, "size": 40, "opacity": 1}, **channels, tooltip=tips)
    return [_layer(frame, "line", {"strokeWidth": 2}, **channels), dots]


def _rule(step: int) -> Spec:
    """The line that marks the selected step."""
    return _layer(pl.DataFrame({"step": [step]}), "rule", {"color": ACCENT, "strokeWidth": 1.5}, x=_number("step"))


def _chart(
    layers: Sequence[Spec],
    title: str | None,
    marks: Sequence[Spec] = (),
    *,
    height: int = 190,
    pick: Sequence[str] = (),
) -> Chart:
    """Layers of `_layer`, and marks over them.

    Args:
        layers: from below; a click picks of the last one.
        title: above the chart.
        marks: what lies above the layers.
        height: in pixels.
        pick: fields of the point nearest to a click that `PICK` tells; none: a click means nothing.
    """
    datasets: dict[str, pl.DataFrame] = {}
    named = [layer | {"data": {"name": _kept(layer["data"], datasets)}} for layer in (*layers, *marks)]
    # On a canvas: a thousand points, each with what a click is nearest to, would be thousands of elements of the page.
    found: Chart = {
        "layer": named,
        "datasets": datasets,
        "height": height,
        "padding": _ROOM,
        "usermeta": {"embedOptions": {"renderer": "canvas"}},
    }
    if title is not None:
        found["title"] = {"text": title, "fontSize": 13, "anchor": "start", "fontWeight": 600, "offset": 6}
    if pick:
        named[len(layers) - 1]["name"] = PICK
        nearest = {"type": "point", "fields": list(pick), "nearest": True, "on": "click", "clear": False}
        found["params"] = [{"name": PICK, "select": nearest, "views": [PICK]}]
    return found


def _kept(frame: pl.DataFrame, datasets: dict[str, pl.DataFrame]) -> str:
    """Put a frame among the datasets, by a name made of its content: other values make another chart."""
    content = frame.write_ipc_stream(None).getvalue()
    name = hashlib.blake2b(content, digest_size=8).hexdigest()
    datasets[name] = frame
    return name
