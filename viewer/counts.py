"""What a job counted, in the words that its command says it in: "48 steps in error texts", not `error_steps: 48`.

The names are those of the jobs' counts. One that explains itself is only spaced out.
"""

from html import escape
from typing import Any

from lake.documents import json_object
from viewer.plain import number, one_line

_WORDS = {
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


def lines(document: str | None) -> tuple[str, dict[str, Any]]:
    """A job's counts as HTML, a line each, and those that are no single value."""
    counts = json_object(document)
    nested = {name: value for name, value in counts.items() if isinstance(value, list | dict)}
    told = "".join(_line(name, value) for name, value in counts.items() if name not in nested and value is not None)
    return (f'<ul class="trajlake-counts">{told}</ul>' if told else ""), nested


def _line(name: str, value: Any) -> str:
    called = one_line(_WORDS.get(name, name.replace("_", " ")), 200)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"<li><b>{number(value)}</b> {escape(called)}</li>"
    shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else one_line(str(value), 200)
    return f"<li>{escape(called)}: <b>{escape(shown)}</b></li>"
