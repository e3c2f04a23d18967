"""Messages of Inspect logs in the form of chat APIs, which of them are decisions, and texts that stand elsewhere.

A message's content is text or parts; reasoning is a part of its own, or in early logs a key. A call is {id,
function, arguments, parse_error?}, a tool's message has `function` and `error{type, message}`, in version 1
`tool_error`. A tool's error without a text is shown to the model by its message, and so it is here. Images, and long
texts of events, are `attachment://KEY`, in early logs `tc://KEY`.

Messages of the input, also an assistant's, say `source: input`; what a model wrote says `generate`. An assistant's
message that says neither is a decision if it names its model, if a call of a model gave it, or if no message of its
sample says `generate`: bridges to other frameworks write such ones, and so do solvers that put words into its mouth.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from lake.formats.base.fields import as_object, as_text
from lake.formats.base.rows import ShapeError, rest
from lake.formats.chat.messages import Message, text_of, tool_call

Resolve = Callable[[Any], Any]
_PROTOCOLS = ("attachment://", "tc://")


def filled(value: Mapping[str, Any], *known: str) -> dict[str, Any]:
    """The fields of an object beside the known ones, without those that are empty: the tool spells out defaults."""
    return {key: item for key, item in value.items() if (item or item == 0) and key not in known}


def list_of(value: Any) -> list[Any]:
    """A list, or the empty one for anything else."""
    return value if isinstance(value, list) else []


def resolver(attachments: Mapping[str, str]) -> Resolve:
    """A function that puts texts in the place of references to them; unknown ones stay."""
    return partial(_resolved, attachments) if attachments else lambda value: value


def _resolved(attachments: Mapping[str, str], value: Any) -> Any:
    # No function inside a function: one that calls itself is a cycle, which ingest leaves to nobody.
    if isinstance(value, str):
        return attachments.get(value.partition("://")[2], value) if value.startswith(_PROTOCOLS) else value
    if isinstance(value, dict):
        return {key: _resolved(attachments, item) for key, item in value.items()}
    return [_resolved(attachments, item) for item in value] if isinstance(value, list) else value


def key_of(message: Mapping[str, Any], resolve: Resolve) -> str | bytes:
    """What tells a message from others: its id, or in early logs what it says."""
    if isinstance(message.get("id"), str):
        return str(message["id"])
    said = [message.get("role"), message.get("content"), message.get("tool_calls")]
    return msgspec.json.encode(resolve(said), order="deterministic")


def decisions_of(messages: Sequence[Any], generated: set[str]) -> list[bool]:
    """Of each message: whether it is a decision. `generated`: ids of the messages that calls of models gave."""
    sources = [as_object(message).get("source") for message in messages if _is_assistant(message)]
    is_told = "generate" in sources

    def is_decision(message: Any) -> bool:
        if not _is_assistant(message) or message.get("source") in ("input", "operator"):
            return False
        if message.get("source") == "generate" or message.get("id") in generated or as_text(message.get("model")):
            return True
        return not is_told

    return list(map(is_decision, messages))


def chat_message(given: Any, place: str, resolve: Resolve) -> Message:
    """A message in the form of chat APIs, without its id. Raises ShapeError: it is none."""
    if not isinstance(given, dict):
        raise ShapeError(f"Expected `object`, got `{type(given).__name__}` - at `$.{place}`")
    message: Message = resolve(rest(given, "id") or {})
    if message.get("role") == "assistant":
        return _of_assistant(message, place)
    return _of_tool(message) if message.get("role") == "tool" else message


def _of_assistant(message: Message, place: str) -> Message:
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if message.get("source") == "generate":
        del message["source"]
    content = message.get("content")
    parts = list_of(content) if all(isinstance(part, dict) for part in list_of(content)) else []
    thoughts = [part for part in parts if part.get("type") == "reasoning"]
    if thoughts:
        message["reasoning_content"] = "\n".join(filter(None, map(_thought, thoughts)))
    elif isinstance(message.get("reasoning"), str):
        message["reasoning_content"] = message.pop("reasoning")
    others = [filled(part) for part in parts if part.get("type") != "reasoning"]
    is_plain = all(part.get("type") == "text" and part.keys() <= {"type", "text"} for part in others)
    if len(thoughts) == 1 and parts[0] is thoughts[0] and len(others) <= 1 and is_plain:
        # Thought, then said, as most models do. Any other order stays in `content`, with all its parts.
        message["content"] = text_of(others)
        known = ("type",) if thoughts[0].get("redacted") else ("type", "reasoning", "redacted")
        message["reasoning_part"] = filled(thoughts[0], *known) or None
    return message


def _thought(part: Message) -> str | None:
    """The text of a part of reasoning; of one that is encrypted, its summary."""
    return as_text(part.get("summary")) if part.get("redacted") else as_text(part.get("reasoning"))


def _call(call: Any, place: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), str):
        raise ShapeError(f"`{place}` is no call; valid: an object with `id`, `function` and `arguments`")
    more = filled(call, "id", "function", "arguments", "type")
    return tool_call(call["function"], call.get("arguments"), as_text(call.get("id"))) | more


def _of_tool(message: Message) -> Message:
    error = message.get("error") or message.get("tool_error")
    made = {"role": "tool", "tool_call_id": message.get("tool_call_id"), "name": message.get("function")}
    made = {key: value for key, value in made.items() if value is not None}
    made |= rest(message, "role", "tool_call_id", "function") or {}
    said = as_object(error).get("message", error)
    if isinstance(said, str) and not text_of(message["content"] if _has_text(message) else None, "\n"):
        made["content"] = said
    return made | {"is_error": bool(error)}


def _has_text(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) or (
        isinstance(content, list) and all(isinstance(part, str | dict) for part in content)
    )


def _is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"
