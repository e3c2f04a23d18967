"""What a chat template cannot write of an episode, or leaves out: the reasons, and what they mean for a run."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lake.errors import DataRefusedError

if TYPE_CHECKING:
    from trainer.data.chat import Turn

UNRENDERABLE = {
    "special_token_text": "a text contains one of the tokenizer's own markers",
    "template_error": "the chat template fails on it",
    "template_rewrites_prompt": "the chat template writes the prompt differently once it has been answered",
    "template_drops_tool_calls": (
        "the chat template leaves tool calls out of the action, so silence would be learned in their place: put one "
        "that writes them into the model's folder, as chat_template.jinja"
    ),
    "template_writes_python": (
        "the chat template writes the arguments of tool calls as Python does, not as JSON: put one that writes them "
        "with tojson into the model's folder, as chat_template.jinja"
    ),
    "content_not_text": (
        "a message holds content that is no text, such as an image, and text is all that can be trained on: leave "
        "such episodes out with --where, or ingest them with text in its place"
    ),
}
"""Why an episode is not rendered, by the reason code that a render job counts."""
_FATAL = ("template_drops_tool_calls", "template_writes_python", "content_not_text")
"""Reasons for which a run is refused also if other episodes are rendered."""


class UnrenderableError(Exception):
    """An episode that the template cannot render.

    Args:
        reason: code.
        place: where in the episode, if that is known.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{reason} ({place})" if place else reason)
        self.reason = reason
        self.place = place


@dataclass(slots=True)
class Rendering:
    """What became of some episodes."""

    counts: Counter[str]
    """Episodes by outcome: rendered, present, and a count per reason of `UNRENDERABLE`; without_reasoning are those of
    the rendered ones of which the template leaves reasoning out."""
    examples: dict[str, str] = field(default_factory=dict)
    """Of each reason the first episode, by its names, and the place in it."""

    def describe(self) -> str:
        """For people: how many episodes came out how."""
        return "rendered: " + ", ".join(f"{number} {name}" for name, number in self.counts.items())


def is_written(call: Any, text: str) -> bool:
    """Whether a tool call is in a text, as far as its name and the names of its arguments tell.

    Args:
        call: of the assistant's message, as its source wrote it.
        text: the action.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return True
    arguments = function.get("arguments")
    names = [function.get("name"), *(arguments if isinstance(arguments, dict) else ())]
    return all(name in text for name in names if isinstance(name, str) and name.isascii() and name.isidentifier())


def is_python(call: Any, text: str) -> bool:
    """Whether a text has the arguments of a tool call, or one of them, as Python writes it and not as JSON.

    Args:
        call: of a message, its arguments as an object.
        text: what the template made of it.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, dict):
        return False
    nested = [value for value in (arguments, *arguments.values()) if isinstance(value, dict | list)]
    return any(str(value) in text and json.dumps(value, ensure_ascii=False) not in text for value in nested)


def loses_reasoning(turn: "Turn", action: str) -> bool:
    """Whether the reasoning of a decision is not in its action: it is not learned then.

    Args:
        turn: the decision.
        action: what the template made of it.
    """
    return str(turn.action.get("reasoning_content", "")).strip() not in action


def refuse_unrendered(done: Rendering) -> None:
    """A template that cannot write what episodes hold does not get to train on the rest of them.

    Args:
        done: what became of a run's episodes.

    Raises:
        DataRefusedError: nothing was rendered, the template leaves tool calls out or writes Python, or a message has
            content that is no text.
    """
    counts = done.counts
    usable = counts["rendered"] + counts["present"]
    if usable and not any(counts.get(reason) for reason in _FATAL):
        return
    reasons = "; ".join(
        f"{counts[code]} {code}, for example {done.examples[code]} ({why})"
        for code, why in UNRENDERABLE.items()
        if counts.get(code)
    )
    if reasons:
        msg = f"{usable} episodes are rendered, others cannot be: {reasons}"
        raise DataRefusedError(msg)
