"""Curves as SVG text: panels in two columns under a common legend, for light and dark pages (see `bar_chart`)."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT, _LEFT, _GAP, _TOP, _CHARACTER = 420, 220, 52, 28, 60, 6.3
_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#888888")
"""Paul Tol's bright palette, which people with colour blindness can tell apart (personal.sron.nl/~pault)."""
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } .grid { stroke: #d0d7de }
.tick { fill: #59636e } .y { text-anchor: end } .x { text-anchor: middle } .curve { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .grid { stroke: #3d444d } .tick { fill: #9198a1 } }
</style>"""


class Curve(NamedTuple):
    """A named line."""

    label: str
    points: Sequence[tuple[float, float]]
    """x and y; y from 0 to 1."""


class Panel(NamedTuple):
    """Curves on common axes."""

    title: str
    curves: Sequence[Curve]
    end: float
    """Largest x of the axis."""


def draw_curves(panels: Sequence[Panel], title: str) -> str:
    """Return an SVG document: two panels a row; a label has the same colour in all of them.

    Args:
        panels: each with an x axis from 0 to its end, in thousands.
        title: shown above.
    """
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    rows = (len(panels) + 1) // 2
    width, legend_y = 2 * (_LEFT + _WIDTH + _GAP), _TOP - 20
    height = _TOP + rows * (_HEIGHT + _TOP) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<text class="title" x="8" y="18">{escape(title)}</text>',
    ]
    x = 8.0
    for number, label in enumerate(labels):
        lines.append(f'<path class="curve" stroke="{_colour(number)}" d="M{x:.0f} {legend_y - 4}h18"/>')
        lines.append(f'<text x="{x + 24:.0f}" y="{legend_y}">{escape(label)}</text>')
        x += 40 + _CHARACTER * len(label)
    for number, panel in enumerate(panels):
        left, top = _LEFT + number % 2 * (_LEFT + _WIDTH + _GAP), _TOP + 24 + number // 2 * (_HEIGHT + _TOP)
        lines += _draw_panel(panel, labels, left, top)
    return "\n".join([*lines, "</svg>", ""])


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _draw_panel(panel: Panel, labels: Sequence[str], left: float, top: float) -> list[str]:
    lines = [f'<text class="title" x="{left}" y="{top - 10}">{escape(panel.title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y, x = top + _HEIGHT * (1 - share), left + _WIDTH * share
        lines.append(f'<path class="grid" d="M{left} {y:g}h{_WIDTH}"/>')
        lines.append(f'<text class="tick y" x="{left - 6}" y="{y + 4:g}">{100 * share:g} %</text>')
        lines.append(f'<text class="tick x" x="{x:g}" y="{top + _HEIGHT + 16}">{panel.end * share / 1000:g}k</text>')
    for curve in panel.curves:
        across = [f"{left + _WIDTH * x / panel.end:.1f} {top + _HEIGHT * (1 - y):.1f}" for x, y in curve.points]
        lines.append(f'<path class="curve" stroke="{_colour(labels.index(curve.label))}" d="M{"L".join(across)}"/>')
    return lines
