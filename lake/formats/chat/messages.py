"""Chats as decisions: the one rule for how a list of messages becomes steps.

A message is an object as chat APIs write it: `role` (system, developer, user, assistant, tool), `content` (text, a list
of parts, or null), of the assistant's also `tool_calls` ([{id, type, function: {name, arguments}}]) and
`reasoning_content`, of a tool's `tool_call_id`, and `is_error` where its source says so. Readers of other formats bring
theirs into this form first, and keep what it has no place for as further keys.

Every assistant message is a decision, unless the reader says otherwise. Its state is what the policy saw last: the
texts of the messages since its previous decision, system prompts left out. What came before the first decision is
`initial_messages`, what came after the last one `final_observation`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lake.formats.base.rows import ShapeError
from lake.records import StepRecord

Message = dict[str, Any]
INSTRUCTIONS = frozenset(("system", "developer"))
"""Roles of messages that are no observation."""
_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "summary_text", "refusal"))
_TYPED = (("tool_calls", list), ("reasoning_content", str))
_ACTED = frozenset(("role", "content", "tool_calls", "reasoning_content"))
"""Keys of a decision's message that have a column."""


class Conversation(msgspec.Struct):
    """A chat as decisions, and what stands around them."""

    initial_messages: list[Message] = []
    steps: list[StepRecord] = []
    final_observation: list[Message] = []
    places: list[int] = []
    """Of each step: the index of its message."""


def is_assistant(message: Message) -> bool:
    """Whether an assistant wrote it."""
    return bool(message["role"] == "assistant")


def conversation(
    messages: Sequence[Any], *, is_decision: Callable[[Message], bool] = is_assistant, place: str = "messages"
) -> Conversation:
    """The decisions of a chat.

    Args:
        messages: of the form above.
        is_decision: of which message is one; all others are observed.
        place: what the list is called in its source, for what is said of a wrong message.

    Raises:
        ShapeError: a message without a role, with content that is neither text nor parts, or with calls that are no
            list.
    """
    found = Conversation()
    since: list[Message] = []
    for index, given in enumerate(messages):
        message = checked(given, f"{place}[{index}]")
        if not is_decision(message):
            since.append(message)
            continue
        if not found.steps:
            found.initial_messages = since
        found.steps.append(decision(message, since, is_first=not found.steps))
        found.places.append(index)
        since = []
    if found.steps:
        found.final_observation = since
    else:
        found.initial_messages = since
    return found


def decision(message: Message, since: list[Message], *, is_first: bool) -> StepRecord:
    """One step: the message that acts, and those since the decision before it."""
    observed = [m for m in since if m["role"] not in INSTRUCTIONS]
    last = observed[-1] if observed else None
    content = message.get("content")
    extra = {key: value for key, value in message.items() if key not in _ACTED and value is not None}
    if isinstance(content, list) and not _is_one_text(content):
        extra["content"] = content
    return StepRecord(
        state="\n".join([text_of(m.get("content"), "\n") for m in observed]),
        state_role=None if last is None else last["role"],
        state_is_error=False if last is None else is_error(last),
        context=[] if is_first else since,
        action=text_of(content),
        reasoning=message.get("reasoning_content") or None,
        tool_calls=message.get("tool_calls"),
        extra=extra or None,
    )


def checked(message: Any, place: str) -> Message:
    """A message of the right shape. Raises ShapeError: it is not."""
    if not isinstance(message, dict):
        raise ShapeError(f"Expected `object`, got `{type(message).__name__}` - at `$.{place}`")
    if not isinstance(message.get("role"), str):
        raise ShapeError(f"`{place}.role` is {message.get('role')!r}; valid: system, user, assistant, tool")
    content = message.get("content")
    if not (content is None or isinstance(content, str) or _is_parts(content)):
        kind = type(content).__name__
        raise ShapeError(f"the content of a {message['role']!r} message at `{place}` is {kind}; valid: text, or parts")
    for key, valid in _TYPED:
        if message.get(key) is not None and not isinstance(message[key], valid):
            raise ShapeError(f"`{place}.{key}` is {type(message[key]).__name__}; valid: {valid.__name__}")
    return message


def text_of(content: Any, between: str = "") -> str:
    """The text of a message's content: that of its text parts, joined. What is no text (an image) has none.

    An agent's parts are one text and nothing is put between them; observations are joined by a line end.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type", "text") in _TEXT_PARTS and isinstance(text := part.get("text", part.get("refusal")), str):
            texts.append(text)
    return between.join(texts)


def is_error(message: Message) -> bool:
    """Whether an observation is an error: its source says so, or a tool's answer begins with the word."""
    if isinstance(said := message.get("is_error"), bool):
        return said
    return message["role"] == "tool" and text_of(message.get("content"), "\n").startswith("Error")


def tool_call(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """A tool call in the form of chat APIs; the arguments stay as the source has them, an object or JSON text."""
    function = {"name": name, "arguments": arguments}
    return (
        {"id": call_id, "type": "function", "function": function}
        if call_id is not None
        else {
            "type": "function",
            "function": function,
        }
    )


def _is_parts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict | str) for part in content)


def _is_one_text(parts: list[Any]) -> bool:
    """Whether parts say no more than a text does."""
    return not parts or (len(parts) == 1 and (isinstance(parts[0], str) or parts[0].keys() <= {"type", "text"}))
