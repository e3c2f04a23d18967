"""From an episode's rows to the messages a chat template takes.

Stored messages are what their source wrote. Templates want three things differently: tool-call arguments as objects,
not as JSON text; text where a source has null; and text where it has a list of parts, which many templates would write
as Python writes a list. Parts of text are joined by newlines, as vLLM joins them for such templates; parts of any other
kind cannot be trained on here, and are refused. A source that kept no messages has its states: they become the user's.

What a chat template cannot write of an episode, or leaves out, has a reason code and consequences for a run.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lake.errors import DataRefusedError
from lake.formats.base.fields import as_object
from lake.formats.chat.templates import with_objects
from lake.read.conversations import CONTINUES, Origin

Message = dict[str, Any]
CUT = ("length", "max_tokens")
"""Values of `steps.finish_reason` of an action that a limit cut off: its end was never sampled."""
STEP_DOCUMENTS = ("context", "tool_calls", "extra")
"""Columns of `steps` that `turns_of` reads as JSON; references to blobs in them have to be inlined first."""
_TEXTS = ("content", "reasoning_content")
"""Fields of a message that templates write as text."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""What a part of text is called: in chat completions and messages, and in OpenAI's responses."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision of an episode."""

    step_index: int
    """Which."""
    added: list[Message]
    """Messages since the decision before."""
    action: Message
    """The assistant's message."""
    agent: str | None = None
    """Who decides: agents that take turns in one episode have a conversation each."""
    is_cut: bool = False
    """A limit ended the action."""
    origin: Origin = CONTINUES
    """Where its prompt comes from; where it opens a conversation, `added` is all of that."""
    tools: list[Any] | None = None
    """Those that it was offered, where they are not the episode's."""


def turns_of(initial_messages: str | None, steps: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The turns of an episode, one per step.

    Args:
        initial_messages: `episodes.initial_messages`, JSON.
        steps: rows of `steps` in order: step_index, context, state, state_role, action, reasoning, tool_calls; where it
            matters who decided, whether it was cut, and what it goes on from: agent_id, finish_reason, extra.

    Raises:
        UnrenderableError: content that is no text; says where it stands.
    """
    turns = []
    for position, row in enumerate(steps):
        step = row["step_index"]
        added = _tidied(row["context"], f"step {step}, message {{}} of its context")
        if position == 0:
            added = _tidied(initial_messages, "message {} of initial_messages") + added
        if not added and row["state"]:
            added = [{"role": row["state_role"] or "user", "content": row["state"]}]
        is_cut = row.get("finish_reason") in CUT
        notes = as_object(msgspec.json.decode(row.get("extra") or "{}"))
        tools = notes.get("tools")
        own_tools = tools if isinstance(tools, list) else None
        turns.append(Turn(step, added, _action(row), row.get("agent_id"), is_cut, Origin.of(notes), own_tools))
    return turns


def texts_of(turns: list[Turn]) -> list[str]:
    """Every text in the messages of some turns, of whatever depth."""
    found: list[str] = []
    for turn in turns:
        _collect([*turn.added, turn.action], found)
    return found


def _action(row: Mapping[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": row["action"]}
    if row["reasoning"]:
        message["reasoning_content"] = row["reasoning"]
    if row["tool_calls"]:
        message["tool_calls"] = msgspec.json.decode(row["tool_calls"])
    return _tidy(message, f"step {row['step_index']}, its action")


def _tidied(messages: str | None, place: str) -> list[Message]:
    """Messages from JSON; `place` says where one stands, with {} for its position."""
    return [_tidy(message, place.format(at)) for at, message in enumerate(msgspec.json.decode(messages or "[]"))]


def _tidy(message: Message, place: str) -> Message:
    tidy = {key: value for key, value in message.items() if value is not None}
    tidy.setdefault("content", "")
    tidy |= {key: _text(tidy[key], f"{place} ({tidy.get('role')})") for key in _TEXTS if key in tidy}
    calls = tidy.get("tool_calls")
    if isinstance(calls, list):
        tidy["tool_calls"] = [with_objects(call) for call in calls]
    return tidy


def _text(content: Any, place: str) -> str:
    """Content as text; an UnrenderableError where it is, or has, something else."""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else None
            what = f"a part of type {kind!r}" if isinstance(kind, str) else f"a value of type {type(part).__name__}"
            raise UnrenderableError("content_not_text", f"{place}: {what}")
        texts.append(text)
    return "\n".join(texts)


def _collect(value: Any, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            found.append(str(key))
            _collect(inner, found)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, found)


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
    """An episode that the template cannot render."""

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
    """Whether a tool call is in a text, as far as its name and the names of its arguments tell."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return True
    arguments = function.get("arguments")
    names = [function.get("name"), *(arguments if isinstance(arguments, dict) else ())]
    return all(name in text for name in names if isinstance(name, str) and name.isascii() and name.isidentifier())


def is_python(call: Any, text: str) -> bool:
    """Whether a text has the arguments (an object) of a tool call, or one of them, as Python and not JSON writes it."""
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, dict):
        return False
    nested = [value for value in (arguments, *arguments.values()) if isinstance(value, dict | list)]
    return any(str(value) in text and json.dumps(value, ensure_ascii=False) not in text for value in nested)


def loses_reasoning(turn: "Turn", action: str) -> bool:
    """Whether the reasoning of a decision is not in its action: it is not learned then."""
    return str(turn.action.get("reasoning_content", "")).strip() not in action


def refuse_unrendered(done: Rendering) -> None:
    """A template that cannot write what episodes hold does not get to train on the rest of them.

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
        raise DataRefusedError(f"{usable} episodes are rendered, others cannot be: {reasons}")
