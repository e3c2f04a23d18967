"""What a chat template cannot write of an episode, or leaves out: the reasons, and what they mean for a run."""

from collections.abc import Mapping
from typing import Any

from lake.errors import DataRefusedError
from trainer.data.chat import Turn

UNRENDERABLE = {
    "special_token_text": "a text contains one of the tokenizer's own markers",
    "template_error": "the chat template fails on it",
    "template_rewrites_prompt": "the chat template writes the prompt differently once it has been answered",
    "template_drops_tool_calls": (
        "the chat template leaves tool calls out of the action, so silence would be learned in their place: put one "
        "that writes them into the model's folder, as chat_template.jinja"
    ),
}
"""Why an episode is not rendered, by the reason code that a render job counts."""


class UnrenderableError(Exception):
    """An episode that the template cannot render; its text is the reason code."""


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


def loses_reasoning(turn: Turn, action: str) -> bool:
    """Whether the reasoning of a decision is not in its action: it is not learned then.

    Args:
        turn: the decision.
        action: what the template made of it.
    """
    return str(turn.action.get("reasoning_content", "")).strip() not in action


def refuse_unrendered(counts: Mapping[str, int]) -> None:
    """A template that cannot write what episodes hold does not get to train on the rest of them.

    Args:
        counts: of `render_missing`.

    Raises:
        DataRefusedError: nothing was rendered, or the template leaves tool calls out.
    """
    if counts["rendered"] + counts["present"] and not counts.get("template_drops_tool_calls"):
        return
    reasons = "; ".join(f"{counts[code]} {code} ({why})" for code, why in UNRENDERABLE.items() if counts.get(code))
    if reasons:
        msg = f"{counts['rendered'] + counts['present']} episodes are rendered, others cannot be: {reasons}"
        raise DataRefusedError(msg)
