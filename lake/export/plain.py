"""Messages as data sets hold them: plain, for lines, and flat, for tables in which all messages have one type."""

from collections.abc import Iterable, Sequence
from typing import Any

from lake.export.target import Exported, Losses, Row, call_of, conversation, learned
from lake.formats import messages_chat
from lake.formats.chat.chat_messages import WEIGHTS
from lake.write.rows import json_text

KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "weight")
"""Keys of messages that chat templates and trainers know."""
_PARTS = ("function", "custom")


def chat(exported: Exported, losses: Losses) -> list[Row]:
    """The whole chat of an episode; what is not learned from has the weight 0, as OpenAI's fine-tuning takes it."""
    messages = []
    for message, weight in zip(conversation(exported.record), learned(exported), strict=True):
        made = plain(message, exported, losses)
        if weight is not None and made.keys().isdisjoint(WEIGHTS):
            made["weight"] = weight
        messages.append(made)
    return messages


def plain(message: Row, exported: Exported, losses: Losses) -> Row:
    """A message as chat templates expect it: arguments of tool calls as objects, no nulls, no keys of other tools."""
    known = message.keys() if exported.record.source_format == messages_chat.NAME else KEYS
    losses.add("keys of messages", len(message.keys() - set(known)))
    made = {key: value for key, value in message.items() if key in known and (value is not None or key == "content")}
    if isinstance(calls := made.get("tool_calls"), list):
        made["tool_calls"] = [_plain_call(call) for call in calls]
    return made


def _plain_call(call: Any) -> Any:
    """A call whose arguments are an object, if they are JSON text of one."""
    said = call_of(call)
    if not isinstance(call, dict) or not isinstance(said.raw, str) or not isinstance(said.arguments, dict):
        return call
    part = next((part for part in _PARTS if isinstance(call.get(part), dict)), None)
    inner = call if part is None else call[part]
    if "arguments" not in inner:
        return call
    made = inner | {"arguments": said.arguments}
    return made if part is None else call | {part: made}


def flat(messages: Iterable[Row], losses: Losses) -> list[Row]:
    """Messages for a table: content that is no text, arguments and what else has many types are JSON text."""
    return [_flat_message(message, losses) for message in messages]


def _flat_message(message: Row, losses: Losses) -> Row:
    losses.add("keys of messages", len(message.keys() - set(KEYS)))
    made = {name: message.get(name) for name in KEYS}
    for name in ("content", "reasoning_content", "tool_call_id", "name"):
        if made[name] is not None and not isinstance(made[name], str):
            made[name] = json_text(made[name])
    calls = made["tool_calls"] if isinstance(made["tool_calls"], list) else None
    made["tool_calls"] = calls and [_flat_call(call) for call in calls]
    made["weight"] = weight if type(weight := made["weight"]) is int else None
    return made


def _flat_call(given: Any) -> Row:
    call = call_of(given)
    arguments = call.raw if isinstance(call.raw, str | None) else json_text(call.raw)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def flat_type() -> Any:
    """The type of a column of flat messages."""
    import pyarrow as pa

    text = pa.string()
    call = pa.struct({"id": text, "type": text, "function": pa.struct({"name": text, "arguments": text})})
    others: Sequence[tuple[str, Any]] = (("tool_calls", pa.list_(call)), ("weight", pa.int64()))
    return pa.list_(pa.struct(dict.fromkeys(KEYS, text) | dict(others)))
