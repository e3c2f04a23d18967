"""Messages as verifiers writes them, in all of its versions, in the form of chat APIs.

A tool call is an object {id, name, arguments}, the nested one of chat APIs, or JSON text of either.
"""

from typing import Any

import msgspec

from lake.formats.base.rows import ShapeError, rest
from lake.formats.chat.messages import Message, tool_call


def chat(value: Any, place: str) -> list[Message]:
    """A prompt or a completion: messages, none, or the plain text of an engine that knows no chat.

    Raises:
        ShapeError: it is anything else.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "assistant" if place == "completion" else "user", "content": value}] if value else []
    if not isinstance(value, list):
        raise ShapeError(f"`{place}` is {type(value).__name__}; valid: a list of messages, text, or null")
    return [message(item, f"{place}[{index}]") for index, item in enumerate(value)]


def message(value: Any, place: str) -> Message:
    """One message. Raises ShapeError: it is no object, or its tool calls are none."""
    if not isinstance(value, dict):
        raise ShapeError(f"`{place}` is {type(value).__name__}; valid: an object with role and content")
    found = {key: item for key, item in value.items() if item is not None}
    calls = found.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list):
        raise ShapeError(f"`{place}.tool_calls` is {type(calls).__name__}; valid: a list")
    if calls:
        found["tool_calls"] = [_call(item, f"{place}.tool_calls[{index}]") for index, item in enumerate(calls)]
    return found


def _call(value: Any, place: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ShapeError(f"`{place}` is no JSON: {error}") from error
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ShapeError(f"`{place}` has no `name`; valid: an object with id, name and arguments, or JSON text of one")
    call_id = value.get("id")
    found = tool_call(function["name"], function.get("arguments"), None if call_id is None else str(call_id))
    kind = value.get("type")
    return found | (rest(value, "id", "type", "function", "name", "arguments") or {}) | ({"type": kind} if kind else {})


def as_object(value: Any) -> dict[str, Any]:
    """A value that may be an object; an empty one if it is something else."""
    return value if isinstance(value, dict) else {}


def filled(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing: the tool writes every field at its default."""
    return {key: item for key, item in fields.items() if item is not None and item not in ({}, [], "")}
