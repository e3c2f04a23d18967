"""What draws a transcript, on a page of the viewer or in a file of its own: the scripts, the style, and the lines."""

from pathlib import Path
from typing import Any

from lake import ids
from viewer import plain
from viewer.queries import Window
from viewer.transcript import opened, outline
from viewer.transcript.told import Told

LINES = 2000
"""Lines of a transcript at most; a longer one has pages."""

_FOLDER = Path(__file__).parent
_SCRIPTS = (
    *("transcript.js", "asking.js", "line.js", "body.js", "text.js", "maths.js", "find.js", "overview.js", "tokens.js"),
)
STYLE = (_FOLDER / "transcript.css").read_text()
"""The style sheet."""


def script(*more: str) -> str:
    """The scripts as one module, with those that are named at its end."""
    return "\n".join((_FOLDER / name).read_text() for name in (*_SCRIPTS, *more))


def lines(told: Told, window: Window, selected: int | None) -> dict[str, Any]:
    """What the page needs to draw the lines, and the step that is opened at first."""
    rows, credit = told.lines(window), told.advantages
    scale = told.scale
    by_step = {row["step_index"]: row for row in credit.iter_rows(named=True)}
    return {
        "name": f"{ids.to_text(told.episode_id)}-{window.offset}",
        "lines": outline.lines(rows, by_step, told.scores, scale, told.branches),
        "repeats": outline.repeats(rows),
        "ends": _ends(told, window),
        "rewarded": scale.rewarded,
        "credited": told.credit is not None,
        "selected": selected,
        "opened": [] if selected is None else opened.steps(told, [selected]),
    }


def _ends(told: Told, window: Window) -> list[dict[str, Any]]:
    """What stands before the first line and after the last: the messages outside the steps."""
    found = []
    if window.offset == 0 and (messages := told.before):
        found.append({"index": opened.BEFORE, "text": f"Before the first step: {_roles(messages)}"})
    if window.offset + window.limit >= told.count and (messages := told.after):
        found.append({"index": told.count, "text": f"After the last step: {_roles(messages)}"})
    return found


def _roles(messages: list[Any]) -> str:
    roles = ", ".join(plain.role(one) for one in messages[:5])
    return plain.one_line(f"{roles}{', ...' if len(messages) > 5 else ''}", 80)
