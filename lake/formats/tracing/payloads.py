"""What a model was given and what it answered, as tracing tools keep it, as messages.

They keep whatever object their instrumentation had in hand: a request or only its messages, a whole response or only
what it says, as an object or as JSON text of it, or plain text. `lake.formats.tracing.shapes` is about each message.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from lake.formats.chat.messages import INSTRUCTIONS, Message
from lake.formats.tracing.shapes import content_of, is_empty, is_message, is_part, messages_of, split, text

_CHOICES = ("choices", "candidates", "generations")
_GIVEN = ("messages", "input", "contents", "prompts", "prompt", "args")
_INSTRUCTIONS = ("system", "instructions", "systemInstruction", "system_instruction")
_LONE = ("message", "content", "text", "output_text", "output", "input", "prompt", "contents")
"""Keys of an object that holds one message or one text."""
_ABOUT = frozenset(
    ("id", "model", "usage", "finish_reason", "stop_reason", "stop_sequence", "created", "object", "index", "logprobs")
) | {"role", "type", "usage_metadata", "response_metadata", "system_fingerprint", "refusal", "annotations"}
"""Keys that an answer has beside its text; one with others is an object that the model was asked for."""
_DECODE = msgspec.json.Decoder().decode


class Payload(msgspec.Struct):
    """What a payload says."""

    messages: list[Message] = []
    tools: list[Any] = []
    rest: dict[str, Any] = {}
    """What it says besides: the settings of a request, the id and the usage of a response."""
    choices: int = 1
    """How many answers it is, if it says so."""
    instructions: list[Message] = []
    """Of an answer: the instructions that it was given, as it repeats them."""


def decoded(value: Any) -> Any:
    """A value; of JSON text of an object or a list, also of text inside text, what it says."""
    inner = value
    while isinstance(inner, str) and inner.lstrip()[:1] in ("{", "[", '"'):
        try:
            inner = _DECODE(inner)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return value
    return value if isinstance(inner, str) else inner


def prompt(value: Any) -> Payload:
    """What a call was given; bare text is the user's. Items of one answer are one message."""
    found = _payload(value, "user")
    found.messages = joined(found.messages)
    return found


def answers(value: Any) -> Payload:
    """What a call answered: one message, or one for each of several choices; bare text is the agent's."""
    found = _payload(value, "assistant")
    found.messages = choices(found.messages, found.choices)
    return found


def instructed(given: Payload, answered: Payload) -> list[Message]:
    """The prompt of a call, with the instructions that only its answer tells."""
    is_told = not given.messages or any(message["role"] in INSTRUCTIONS for message in given.messages)
    return given.messages if is_told else [*answered.instructions, *given.messages]


def choices(messages: Sequence[Message], count: Any = 1) -> list[Message]:
    """The answers that the messages of an output are: each of several that says why it finished, else all as one.

    Several that are only calls are one answer that makes them at once, unless their `count` is known.

    An output may be the whole conversation: only what stands behind the last message that is no assistant's counts.
    """
    last = max((index for index, m in enumerate(messages) if m["role"] != "assistant"), default=-1)
    own = messages[last + 1 :] or [m | {"role": "assistant"} for m in messages[-1:]]
    is_several = isinstance(count, int) and count > 1
    has_text = any(message.get("content") for message in own)
    if len(own) > 1 and (is_several or (has_text and all("finish_reason" in m for m in own))):
        return list(own)
    return [merged(own)] if own else []


def joined(messages: Sequence[Message]) -> list[Message]:
    """A prompt in which messages of an assistant that stand side by side are one."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else {"role": None}
        is_same = last["role"] == message["role"] == "assistant" and last.get("name") == message.get("name")
        if is_same:
            found[-1] = merged([last, message])
        else:
            found.append(message)
    return found


def merged(messages: Sequence[Message]) -> Message:
    """Messages of an assistant as one; of further keys that differ, the list of values."""
    if len(messages) == 1:
        return messages[0]
    found: Message = {"role": "assistant", "content": None}
    parts: list[Any] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    for message in messages:
        content = message.get("content")
        parts += [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        calls += message.get("tool_calls") or []
        reasoning += [message["reasoning_content"]] if message.get("reasoning_content") else []
        for key, value in message.items():
            if key in ("role", "content", "tool_calls", "reasoning_content"):
                continue
            if key in found and found[key] != value:
                found[key] = [*_listed(found[key]), *_listed(value)]
            found.setdefault(key, value)
    found["content"] = content_of(parts)
    more = {"tool_calls": calls, "reasoning_content": "\n".join(reasoning)}
    return found | {key: value for key, value in more.items() if value}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def instructions(value: Any) -> Message:
    """System instructions that stand apart from the messages, as a message."""
    opened = decoded(value)
    opened = opened.get("parts", opened) if isinstance(opened, dict) else opened
    is_parts = isinstance(opened, list) and all(is_part(item) or isinstance(item, str) for item in opened)
    return split(opened, "system")[0] if is_parts else {"role": "system", "content": text(value)}


def _payload(value: Any, role: str) -> Payload:
    if value in (None, "", [], {}):
        return Payload()
    opened = decoded(value)
    found = None
    if isinstance(opened, list):
        found = _list(opened, role)
    elif isinstance(opened, dict):
        found = Payload(messages_of(opened, role)) if is_message(opened) else _object(opened, role)
    # Text stays as it is written, also if it happens to be JSON.
    return found or Payload([{"role": role, "content": text(value)}])


def _list(items: list[Any], role: str) -> Payload | None:
    if len(items) == 1 and isinstance(items[0], list):
        return _list(items[0], role)
    tools = [item["content"] for item in items if _is_definition(item)]
    said = [item for item in items if not _is_definition(item)]
    if (
        said
        and all(isinstance(item, dict) and is_part(item) for item in said)
        and not any("call_id" in i for i in said)
    ):
        return Payload(split(said, role), tools)
    if not all(
        isinstance(i, str) or is_message(i) or (isinstance(i, dict) and isinstance(i.get("type"), str)) for i in said
    ):
        return None
    return Payload([message for item in said for message in messages_of(item, role)], tools)


def _object(value: dict[str, Any], role: str) -> Payload | None:
    """A request or a response."""
    settings = value["config"] if isinstance(value.get("config"), dict) else {}
    said = [instructions(holder[key]) for holder in (value, settings) for key in _INSTRUCTIONS if holder.get(key)]
    tools = [tool for holder in (value, settings) for tool in _offered(holder.get("tools"))]
    rest = {k: v for k, v in value.items() if k not in ("tools", *_INSTRUCTIONS) and not is_empty(k, v)}
    if settings and (said or tools):
        rest["config"] = {k: v for k, v in settings.items() if k not in ("tools", *_INSTRUCTIONS)}
        rest = {k: v for k, v in rest.items() if v != {}}
    found = _inside(value, rest, role)
    if found is not None:
        found.tools += tools
        if role == "assistant":
            found.instructions = said
        else:
            found.messages = [*said, *found.messages]
    return found


def _inside(value: dict[str, Any], rest: dict[str, Any], role: str) -> Payload | None:
    """The messages of a request or a response; `rest` is what stands beside its instructions and tools."""
    for key in (*_CHOICES, *(_GIVEN if role == "user" else ("messages",)), "output"):
        inner = decoded(value.get(key))
        if not isinstance(inner, list) or not inner:
            continue
        if key in _CHOICES:
            flat = [choice for item in inner for choice in (item if isinstance(item, list) else [item])]
            found: Payload | None = Payload([message for item in flat for message in _choice(item)], choices=len(flat))
        else:
            found = _list(inner, role)
        if found is None:
            continue
        found.rest = {k: v for k, v in rest.items() if k != key}
        return found
    for key in _LONE:
        beside = {k: v for k, v in rest.items() if k != key}
        inner = value.get(key)
        if key not in value or (role == "assistant" and beside.keys() - _ABOUT and not is_message(inner)):
            continue
        if isinstance(inner, dict) and is_message(inner.get("message")):
            inner = inner["message"]
        if isinstance(inner, str) or is_message(inner):
            return _alone(messages_of(inner, role), beside)
        if isinstance(value[key], list) and value[key] and all(is_part(part) for part in value[key]):
            return _alone(split(value[key], role), beside)
    return None


def _alone(messages: list[Message], beside: dict[str, Any]) -> Payload:
    """One message; why it finished stands beside it."""
    if "finish_reason" in beside:
        messages[-1].setdefault("finish_reason", beside.pop("finish_reason"))
    return Payload(messages, rest=beside)


def _offered(tools: Any) -> list[Any]:
    """Tools; Gemini's stand in lists of declarations."""
    found: list[Any] = []
    for tool in tools if isinstance(tools, list) else ():
        inner = tool if isinstance(tool, dict) else {}
        declared = inner.get("function_declarations", inner.get("functionDeclarations"))
        found += declared if isinstance(declared, list) else [tool]
    return found


def _choice(item: Any) -> list[Message]:
    """One of the alternatives of a response."""
    if not isinstance(item, dict):
        return messages_of(item, "assistant")
    inner = item.get("message", item.get("content", item.get("text")))
    found = split(inner, "assistant") if isinstance(inner, list) else messages_of(inner, "assistant")
    info = item.get("generation_info")
    why = item.get("finish_reason", item.get("finishReason"))
    why = info.get("finish_reason") if why is None and isinstance(info, dict) else why
    more = {"finish_reason": why, "logprobs": item.get("logprobs")}
    found[-1] |= {name: value for name, value in more.items() if value is not None}
    return found


def _is_definition(item: Any) -> bool:
    """Whether it is a tool that is offered: LangChain's callbacks list them among the messages."""
    inner = item.get("content") if isinstance(item, dict) and item.get("role") == "tool" else None
    return isinstance(inner, dict) and inner.get("type") == "function" and isinstance(inner.get("function"), dict)
