"""Horizontal bars as SVG text: one line a bar, readable on light and dark pages.

Written by hand: the project draws with Vega-Lite in the browser, and no package that it depends on writes SVG.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _LABEL_WIDTH, _BAR_WIDTH, _LINE, _TOP = 900, 440, 370, 22, 48
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .label { text-anchor: end } .title { font-weight: 600 }
.bar { fill: #4477aa } .missed { fill: #cc6677 } .aim { stroke: #1f2328; stroke-width: 2 } .grid { stroke: #d0d7de }
.tick { text-anchor: middle; fill: #59636e }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .aim { stroke: #e6edf3 } .grid { stroke: #3d444d } .tick { fill: #9198a1 }
.bar { fill: #66ccee } .missed { fill: #ee99aa } }
</style>"""


class Bar(NamedTuple):
    """One bar."""

    label: str
    length: float
    text: str
    """Shown at its end."""
    aim: float | None
    """An upper limit, shown as a mark."""


def draw_bars(bars: Sequence[Bar], title: str, *, logarithmic: bool) -> str:
    """Return an SVG document; a bar that exceeds its aim has another colour.

    Args:
        bars: from top to bottom; positive lengths where the axis is logarithmic.
        title: shown above.
        logarithmic: axis from the power of ten below the shortest bar or aim.
    """
    lengths = [length for bar in bars for length in (bar.length, bar.aim) if length is not None] or [1.0]
    ticks = _logarithmic_ticks(lengths) if logarithmic else _linear_ticks(max(lengths))

    def across(length: float) -> float:
        share = math.log(length / ticks[0], ticks[-1] / ticks[0]) if logarithmic else length / ticks[-1]
        return round(_BAR_WIDTH * share, 1)

    height = _TOP + _LINE * len(bars) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<text class="title" x="8" y="18">{escape(title)}</text>',
    ]
    for tick in ticks:
        x = _LABEL_WIDTH + across(tick)
        lines.append(f'<path class="grid" d="M{x:g} {_TOP - 6}V{height - 4}"/>')
        lines.append(f'<text class="tick" x="{x:g}" y="{_TOP - 10}">{tick:,g}</text>')
    for number, bar in enumerate(bars):
        y, width = _TOP + _LINE * number, across(bar.length)
        kind = "missed" if bar.aim is not None and bar.length > bar.aim else "bar"
        lines.append(f'<text class="label" x="{_LABEL_WIDTH - 8}" y="{y + 13}">{escape(bar.label)}</text>')
        lines.append(f'<rect class="{kind}" x="{_LABEL_WIDTH}" y="{y + 2}" width="{width:g}" height="14"/>')
        text_x = _LABEL_WIDTH + width + 6
        if bar.aim is not None:
            aim_x = _LABEL_WIDTH + across(bar.aim)
            lines.append(f'<path class="aim" d="M{aim_x:g} {y}V{y + 18}"/>')
            text_x = text_x if aim_x + 6 < text_x or aim_x > text_x + 50 else aim_x + 6
        lines.append(f'<text x="{text_x:g}" y="{y + 13}">{escape(bar.text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _logarithmic_ticks(lengths: Sequence[float]) -> list[float]:
    low, high = math.floor(math.log10(min(lengths) / 1.5)), math.ceil(math.log10(max(lengths)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def _linear_ticks(longest: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10(longest))
    step = step if longest / step > 3 else step / 2
    return [round(step * number, 6) for number in range(math.ceil(longest / step) + 1)]
