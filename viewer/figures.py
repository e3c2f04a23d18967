"""Charts in Vega-Lite from small frames, and the colours of the viewer.

NULL is drawn as a gap or a grey mark. The charts are plain Vega-Lite, because Altair copies every mark and channel at
each step of a chain: ten charts took as long as all queries of their page. Tests check charts against the schema.

Readers with every kind of colour blindness can distinguish blue and orange, for positive and negative advantages. Both
hold on the light and on the dark background. Grey is for unknown values.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl

POSITIVE = "#2f80d0"
NEGATIVE = "#e07b26"
UNKNOWN = "#8b93a1"
ACCENT = "#7c5cd6"
"""Colour of what needs attention: a selected step, terms of opposite signs."""

STREAMLIT_OPTIONS: dict[str, Any] = {
    "theme.light.primaryColor": "#2a6fb8",
    "theme.dark.primaryColor": "#5aa0e6",
    "theme.baseFontSize": 14,
    "theme.headingFontSizes": ["1.75rem", "1.35rem", "1.1rem"],
    "theme.metricValueFontSize": "1.5rem",
    "theme.codeFontSize": "0.8rem",
    "theme.light.codeTextColor": "#2f2d2b",
    "theme.dark.codeTextColor": "#edebe8",
}
"""Options of Streamlit that set the theme."""

_NAMED = {"positive": POSITIVE, "negative": NEGATIVE, "unknown": UNKNOWN, "accent": ACCENT}
_COLOURS = " ".join(f"--trajlake-{name}: {colour};" for name, colour in _NAMED.items())
VARIABLES = f":root {{ {_COLOURS} }}"
"""The colours as variables of a style sheet."""
STYLE = f"<style>{VARIABLES}\n{Path(__file__).with_name('style.css').read_text()}</style>"
"""Style sheet for looks that no option of Streamlit sets (`style.css`)."""

STATUS_COLOURS = {"completed": "green", "succeeded": "green", "truncated": "orange", "started": "blue"}
"""Badge colours of episode and job states; other states are red."""


PICK = "pick"
"""Name of the selection that a click on a chart makes."""
MOST_ROWS = 4000
"""Rows that a chart draws at most."""

OTHER_COLOURS = ("#c2410c", "#7c3aed", "#0f766e", "#a16207")
"""Colours of the jobs that are compared with the job of the page."""
Spec = dict[str, Any]
"""A part of a chart."""
Chart = dict[str, Any]
"""A chart in Vega-Lite for Streamlit's `vega_lite_chart`; its `datasets` are frames."""
_CLOSE: Spec = {"labelPadding": 4, "titlePadding": 4}
"""Paddings of axes: Streamlit's own would take half of a small chart."""
_ROOM = {"left": 0, "top": 0, "right": 10, "bottom": 12}
"""Padding of a chart: half of an axis's last label lies beyond its end, and would be cut off."""
_STEPS: Spec = {"format": "d", "tickMinStep": 1, "grid": False, **_CLOSE}
_APART: Spec = {"zero": False, "nice": False, "padding": 6}
"""Scale of the axis along a curve: without padding its first point would lie on the labels of the other axis."""
_ON_TOP: Spec = {"orient": "top", "padding": 0}


_ENDS = (("low", "from"), ("high", "to"))


def build_curve(
    frame: pl.DataFrame,
    value: str,
    *,
    title: str,
    x_title: str,
    band: bool = False,
    share: bool = False,
    picks: Sequence[str] = ("x",),
) -> Chart:
    """Chart a value along `x`, with an optional band from `low` to `high`; shares are percentages.

    A click picks the nearest point, by the columns `picks`.
    """
    scale = _scale_shares(frame["high" if band else value].max()) if share else {"zero": False}
    axis = {"format": "%" if share else _choose_label_format(frame[value]), "tickCount": 4, **_CLOSE}
    furthest = frame["x"].max()
    is_long = isinstance(furthest, int | float) and furthest >= 10_000
    across = {"format": "~s", "tickCount": 5, "grid": False, **_CLOSE} if is_long else _STEPS
    x, y = _numeric("x", x_title, axis=across, scale=_APART), _numeric(value, scale=scale, axis=axis)
    tips = [
        _numeric("x", x_title, format=",d"),
        _numeric(value, title, format=".1%" if share else ".4~g"),
        *([_numeric(end, f"95 % {word}", format=".1%" if share else ".4~g") for end, word in _ENDS] if band else []),
        _numeric("episodes", "Episodes", format=","),
    ]
    line = _build_layer(frame, "line", {"color": POSITIVE, "strokeWidth": 2}, x=x, y=y)
    dots = {"color": POSITIVE, "filled": True, "size": 36, "opacity": 1}
    layers = [line, _build_layer(frame, "point", dots, x=x, y=y, tooltip=tips)]
    if band:
        low = _numeric("low", scale=scale)
        layers.insert(
            0, _build_layer(frame, "area", {"opacity": 0.18, "color": POSITIVE}, x=x, y=low, y2={"field": "high"})
        )
    return _build_chart(layers, title, pick=picks)


def build_share_chart(frame: pl.DataFrame, by: str, count: str, x_title: str, title: str) -> Chart:
    """Chart a share, a line for each value of the column `by`: columns x, `by`, share, `count`.

    A click picks the nearest point, by its `x` and `by`.
    """
    axis = {"format": "%", "tickCount": 4, **_CLOSE}
    channels = {
        "x": _numeric("x", x_title, axis=_STEPS),
        "y": _numeric("share", scale=_scale_shares(frame["share"].max()), axis=axis),
        "color": _nominal(
            by,
            scale={"range": [NEGATIVE, POSITIVE, *OTHER_COLOURS[1:], UNKNOWN]},
            sort=None,
            legend=_ON_TOP | {"labelLimit": 240},
        ),
    }
    tips = [
        _nominal(by, by.capitalize()),
        _numeric("x", x_title, format=",d"),
        _numeric("share", title, format=".1%"),
        _numeric(count, count.capitalize(), format=","),
    ]
    return _build_chart(_join_dots(frame, channels, tips), title, pick=["x", by])


def build_length_chart(frame: pl.DataFrame) -> Chart:
    """Chart the mean outcome by number of steps, a line for each side: rows of `compare.read_outcome_by_length`.

    A click picks the nearest point, by its `side` and `steps`.
    """
    channels = {
        "x": _numeric("steps", "Steps", axis=_STEPS),
        "y": _numeric("outcome", axis={"format": "~g", "tickCount": 5, **_CLOSE}),
        "color": _nominal("side", scale={"domain": ["A", "B"], "range": [NEGATIVE, POSITIVE]}, legend=_ON_TOP),
    }
    tips = [
        _nominal("side", "Side"),
        _numeric("steps", "Steps from", format=",d"),
        _numeric("last", "Steps to", format=",d"),
        _numeric("outcome", "Mean outcome", format=".4~g"),
        _numeric("episodes", "Episodes", format=","),
    ]
    return _build_chart(_join_dots(frame.drop_nulls("outcome"), channels, tips), None, pick=["steps", "side"])


def build_task_histogram(frame: pl.DataFrame) -> Chart:
    """Chart the number of tasks by success rate: columns success, tasks."""
    bars = _build_layer(
        frame,
        "bar",
        {"color": POSITIVE, "size": 14, "cornerRadiusEnd": 2},
        x=_numeric(
            "success",
            "Success rate of a task",
            scale={"domain": [-0.03, 1.03]},
            axis={"format": "%", "grid": False, "values": [0, 0.25, 0.5, 0.75, 1], **_CLOSE},
        ),
        y=_numeric("tasks", axis={"tickMinStep": 1, "tickCount": 4, **_CLOSE}),
        tooltip=[_numeric("success", "Success", format=".0%"), _numeric("tasks", "Tasks")],
    )
    return _build_chart([bars], "Tasks by success rate")


def build_histogram(frame: pl.DataFrame, value: str, count_column: str, *, title: str, x_title: str) -> Chart:
    """Chart a count (column `count_column`) for each `value`, a text, in the order of the rows."""
    bars = _build_layer(
        frame,
        "bar",
        {"color": POSITIVE, "cornerRadiusEnd": 2},
        x=_nominal(value, x_title, sort=None, axis={"labelAngle": 0, "grid": False, "labelOverlap": True}),
        y=_numeric(count_column, axis={"tickMinStep": 1, "tickCount": 4, "format": "~s"}),
        tooltip=[_nominal(value, x_title), _numeric(count_column, count_column, format=",")],
    )
    return _build_chart([bars], title, height=150)


def build_metric_chart(
    frame: pl.DataFrame,
    name: str,
    selected: int | None,
    *,
    span: int = 1,
    alarms: Sequence[tuple[int, int]] = (),
    other_curves: pl.DataFrame | None = None,
    colours: Mapping[str, str] = MappingProxyType({}),
    titled: bool = True,
) -> Chart:
    """Chart a training metric over steps: columns step, value. A click picks a step; the selected one is marked.

    Args:
        frame: the values; NULL is a gap.
        name: name of the metric.
        selected: a step.
        span: points of the exponential moving average, which is drawn over the values and instead of those of other
            jobs; 1 draws none.
        alarms: first and last steps of stretches that are marked.
        other_curves: the same metric of other jobs: columns job, step, value.
        colours: colours of all other jobs, also of jobs without this metric.
        titled: draw the name above the chart.
    """
    points = frame.filter(pl.col("value").is_not_null())
    x = _numeric("step", axis=_STEPS)
    y = _numeric(
        "value", scale={"zero": False}, axis={"format": _choose_label_format(points["value"]), "tickCount": 4, **_CLOSE}
    )
    layers = []
    if alarms:
        stretches = pl.DataFrame([(first - 0.5, last + 0.5) for first, last in alarms], ["step", "until"], orient="row")
        layers.append(_build_layer(stretches, "rect", {"color": NEGATIVE, "opacity": 0.14}, x=x, x2={"field": "until"}))
    if other_curves is not None:
        # Without a domain Vega assigns the colours by name, among the jobs that have this metric.
        scale = {"domain": list(colours), "range": list(colours.values())}
        colour = _nominal("job", "job", scale=scale, legend=None)
        beside, tip = _smooth(other_curves.drop_nulls("value"), span), _nominal("job", "job")
        layers.append(_build_layer(beside, "line", {"strokeWidth": 1.2}, x=x, y=y, color=colour, tooltip=tip))
    line = {"color": POSITIVE, "strokeWidth": 1.5, "opacity": 1 if span == 1 else 0.3}
    layers.append(_build_layer(points, "line", line, x=x, y=y))
    if span > 1:
        smooth = _smooth(points.with_columns(job=pl.lit(None, pl.String)), span)
        layers.append(_build_layer(smooth, "line", {"color": POSITIVE, "strokeWidth": 2}, x=x, y=y))
    tips = [_numeric("step", "Update", format="d"), _numeric("value", name, format=".5~g")]
    dots = {"size": 60, "opacity": 0 if points.height > 1 else 1, "filled": True, "color": POSITIVE}
    layers.append(_build_layer(points, "point", dots, x=x, y=y, tooltip=tips))
    marks = []
    if selected is not None:
        look = {"filled": True, "size": 70, "color": ACCENT, "opacity": 1}
        marks = [
            _build_rule(selected),
            _build_layer(points.filter(pl.col("step") == selected), "point", look, x=x, y=y),
        ]
    return _build_chart(layers, name if titled else None, marks, height=150, pick=["step"])


def _smooth(curves: pl.DataFrame, span: int) -> pl.DataFrame:
    """Return the exponential moving average of each job's values."""
    return curves.sort("step").with_columns(pl.col("value").ewm_mean(span=span).over("job"))


def sort_by_interest(names: Iterable[str]) -> list[str]:
    """Sort names of metrics by how soon people look at them."""
    # Held-out metrics first, then those that show whether anything is learned, then a loss that weights its tokens.
    first = ("validation_nll", "eval/success", "eval/score", "logprob", "loss")
    words = ("loss", "return", "reward", "success", "kl", "entropy", "clip", "grad")

    def rank(name: str) -> tuple[int, int, str]:
        position = first.index(name) if name in first else len(first)
        return position, next((i for i, word in enumerate(words) if word in name.lower()), len(words)), name

    return sorted(names, key=rank)


def build_sign_chart(frame: pl.DataFrame, selected: int | None) -> Chart:
    """Chart the shares of advantages by sign over updates: columns step, positive, negative, undefined.

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
    x = _numeric("step", axis=_STEPS)
    stacked = _build_layer(
        rows.head(MOST_ROWS),
        "area" if shares.height > 1 else "bar",  # an area needs two steps
        {"opacity": 0.85},
        x=x,
        y=_numeric("share", stack="zero", scale={"domain": [0, 1]}, axis={"format": "%", "tickCount": 4, **_CLOSE}),
        color=_nominal(
            "sign",
            scale={"domain": list(names), "range": list(names.values())},
            legend=_ON_TOP | {"columns": 2},  # four in a line are wider than a small chart
        ),
    )
    tips = [_numeric(name, name.capitalize(), format=".1%") for name in names]
    # A click picks the nearest point, and an area has none.
    points = _build_layer(
        shares.head(MOST_ROWS),
        "point",
        {"opacity": 0},
        x=x,
        y={"datum": 0.5, "type": "quantitative"},
        tooltip=[_numeric("step", "Update", format="d"), *tips],
    )
    marks = [] if selected is None else [_build_rule(selected)]
    return _build_chart([stacked, points], "Signs of the advantages", marks, pick=["step"])


def _choose_label_format(values: pl.Series) -> str:
    """Return the format of an axis: as many digits as tell its labels apart, and at least three."""
    largest, low, high = (float(bound or 0) for bound in (values.abs().max(), values.min(), values.max()))  # type: ignore[arg-type]
    if largest >= 1000:
        return "~s"
    # An axis has about four labels, so the distance of two ticks is at least a fifth of its length.
    digits = math.ceil(math.log10(5 * largest / (high - low))) + 1 if high > low else 3
    return f".{min(max(digits, 3), 9)}~g"


def _scale_shares(largest: object) -> Spec:
    """Return the scale of shares: up to 100 %, or less where all are small and would look like zero."""
    most = float(largest) if isinstance(largest, int | float) else 1.0
    return {"domain": [0, 1 if most > 0.4 else max(1.2 * most, 0.05)]}


def _numeric(field: str, title: str | None = None, **options: Any) -> Spec:
    """Return a channel of numbers."""
    return {"field": field, "type": "quantitative", "title": title, **options}


def _nominal(field: str, title: str | None = None, **options: Any) -> Spec:
    """Return a channel of names."""
    return {"field": field, "type": "nominal", "title": title, **options}


def _build_layer(frame: pl.DataFrame, mark: str, look: Spec, **channels: Any) -> Spec:
    return {"data": frame, "mark": {"type": mark, **look}, "encoding": channels}


def _join_dots(frame: pl.DataFrame, channels: Spec, tips: list[Spec]) -> list[Spec]:
    """Return the layers of a line and its points."""
    dots = _build_layer(frame, "point", {"filled": True, "size": 40, "opacity": 1}, **channels, tooltip=tips)
    return [_build_layer(frame, "line", {"strokeWidth": 2}, **channels), dots]


def _build_rule(step: int) -> Spec:
    """Return the layer of a line at the selected step."""
    return _build_layer(
        pl.DataFrame({"step": [step]}), "rule", {"color": ACCENT, "strokeWidth": 1.5}, x=_numeric("step")
    )


def _build_chart(
    layers: Sequence[Spec],
    title: str | None,
    marks: Sequence[Spec] = (),
    *,
    height: int = 190,
    pick: Sequence[str] = (),
) -> Chart:
    """Return a chart of layers of `_build_layer`.

    Args:
        layers: from below; a click picks a point of the last one.
        title: text above the chart.
        marks: layers above the others.
        height: height in pixels.
        pick: fields of the point nearest to a click that `PICK` returns; without fields a click does nothing.
    """
    datasets: dict[str, pl.DataFrame] = {}
    named = [layer | {"data": {"name": _add_dataset(layer["data"], datasets)}} for layer in (*layers, *marks)]
    # On a canvas, because a thousand points with their click areas would be thousands of elements of the page.
    chart: Chart = {
        "layer": named,
        "datasets": datasets,
        "height": height,
        "padding": _ROOM,
        "usermeta": {"embedOptions": {"renderer": "canvas"}},
    }
    if title is not None:
        chart["title"] = {"text": title, "fontSize": 13, "anchor": "start", "fontWeight": 600, "offset": 6}
    if pick:
        named[len(layers) - 1]["name"] = PICK
        nearest = {"type": "point", "fields": list(pick), "nearest": True, "on": "click", "clear": False}
        chart["params"] = [{"name": PICK, "select": nearest, "views": [PICK]}]
    return chart


def _add_dataset(frame: pl.DataFrame, datasets: dict[str, pl.DataFrame]) -> str:
    """Add a frame to the datasets and return its name, a hash of its content: other values make another chart."""
    content = frame.write_ipc_stream(None).getvalue()
    name = hashlib.blake2b(content, digest_size=8).hexdigest()
    datasets[name] = frame
    return name
