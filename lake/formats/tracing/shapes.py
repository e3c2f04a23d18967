"""One message in any of the shapes in which APIs and frameworks write it, as `lake.formats.chat.messages` has it.

Known: the chat API of OpenAI and items of its Responses API, blocks of Anthropic and Bedrock, contents of Gemini,
messages of LangChain as it serialises them, parts of the OpenTelemetry GenAI conventions and of the Vercel AI SDK.
Calls that stand in a message's text, as JSON (Koog), are calls, whoever is said to have made them.
Parts that are neither text nor reasoning nor calls (images, what a server's own tools did) stay parts of the content.
"""

from typing import Any, Literal

import msgspec

from lake.formats.chat.messages import Message, text_of, tool_call

_ROLES = {
    "human": "user",
    "ai": "assistant",
    "aimessagechunk": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "thinking": "assistant",
    "function": "tool",
}
_LANGCHAIN = frozenset(("human", "ai", "AIMessageChunk", "system", "tool", "function", "chat", "developer"))
_SAYS = ("content", "parts", "tool_calls", "function_call", "additional_kwargs", "refusal")
"""Keys of which a message has one, beside its role."""
_SHAPED = frozenset((*_SAYS, "role", "type", "reasoning_content")) - {"refusal"}
"""Keys that have a place in the form it is brought into."""
_KINDS: dict[str, Literal["text", "reasoning", "call", "result"]] = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("reasoning", "thinking", "redacted_thinking"), "reasoning"),
    **dict.fromkeys(("tool_call", "tool_use", "tool-call", "function_call", "custom_tool_call"), "call"),
    **dict.fromkeys(("tool_call_response", "tool_result", "tool-result"), "result"),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), "result"),
}
_UNTYPED: dict[str, Literal["reasoning", "call", "result"]] = {
    "reasoningContent": "reasoning",
    "toolUse": "call",
    "functionCall": "call",
    "function_call": "call",
    "toolResult": "result",
    "functionResponse": "result",
    "function_response": "result",
}
_CALLS_AS = ("function", "toolUse", "functionCall", "function_call")
_RESULTS_AS = ("toolResult", "functionResponse", "function_response")
"""Keys under which a call and a result stand."""
_CALL_IDS = ("call_id", "toolCallId", "toolUseId", "id")
_RESULT_IDS = ("tool_call_id", "call_id", "tool_use_id", "toolCallId", "toolUseId", "id")
_OF_RESULTS = frozenset((*_RESULT_IDS, "name", "toolName", "is_error", "isError", "status", "tool_calls"))


def text(value: Any) -> str:
    """A value as text: itself, or its JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def is_message(value: Any) -> bool:
    """Whether a value is a message with a role."""
    if not isinstance(value, dict):
        return False
    message = _unwrapped(value)
    is_langchain = _kind_of(message) in _LANGCHAIN and "content" in message
    return is_langchain or (isinstance(message.get("role"), str) and any(key in message for key in _SAYS))


def is_part(value: Any) -> bool:
    """Whether a value is a part of a message, or an item of the Responses API, and no message."""
    return isinstance(value, dict) and "role" not in value and _kind(value) is not None


def messages_of(given: Any, role: str) -> list[Message]:
    """One message; several where results of tools stand inside it. `role` is whose it is unless it says so."""
    if not isinstance(given, dict):
        return [{"role": role, "content": None if given is None else text(given)}]
    message = _unwrapped(given)
    kind = _kind_of(message)
    said = message.get("role", kind if kind in _LANGCHAIN else None)
    if said is None and "content" not in message and kind is not None and kind not in _KINDS:
        return [{"role": "assistant", "content": [message]}]
    if said is None and kind in _KINDS:
        return split([message], "assistant" if kind != "text" else role)
    found_role = role if said is None else _ROLES.get(str(said).lower(), str(said).lower())
    more = message.get("additional_kwargs")
    holders = [message, more] if isinstance(more, dict) else [message]
    kept: Message = {}
    for holder in reversed(holders):
        kept |= {key: value for key, value in holder.items() if key not in _SHAPED and not is_empty(key, value)}
    for holder in holders:
        if isinstance(reasoning := holder.get("reasoning_content"), str) and reasoning:
            kept.setdefault("reasoning_content", reasoning)
        if calls := _tool_calls(holder):
            kept.setdefault("tool_calls", calls)
    content = message["parts"] if isinstance(message.get("parts"), list) else message.get("content")
    if "tool_calls" not in kept and (written := _written_calls(content)):
        return [kept | {"role": "assistant", "content": None, "tool_calls": written}]
    return [_tool_message(kept, content)] if found_role == "tool" else split(content, found_role, kept)


def split(content: Any, role: str, kept: Message | None = None) -> list[Message]:
    """A message's content as messages: texts, reasoning and calls in one, and each result of a tool as its own."""
    kept = kept or {}
    if not isinstance(content, list):
        return [{"role": role, "content": None if content is None else text(content)} | kept]
    found: list[Message] = []
    parts: list[Any] = []
    calls: list[Any] = list(kept.get("tool_calls", ()))
    about: list[Any] = []
    reasoning: list[str] = [kept["reasoning_content"]] if "reasoning_content" in kept else []
    sealed: list[Any] = []
    for part in content:
        kind = _kind(part) if isinstance(part, dict) else None
        if kind == "result":
            if parts:
                found.append({"role": role, "content": content_of(parts)})
                parts = []
            found.append(_result_message(part))
        elif kind == "call":
            calls.append(_call(part))
            about += _beside(part)
        elif kind == "reasoning":
            words, seal = _reasoning(part)
            reasoning += [words] if words else []
            sealed += [seal] if seal else []
        else:
            parts.append(_text_part(part) if kind == "text" else part if isinstance(part, dict | str) else text(part))
    if parts or calls or reasoning or sealed or not found:
        message: Message = {"role": role, "content": content_of(parts)} | kept
        more = {"tool_calls": calls, "reasoning_content": "\n".join(reasoning), "signatures": sealed}
        more["tool_call_details"] = about
        found.append(message | {key: value for key, value in more.items() if value})
    return found


def content_of(parts: list[Any]) -> Any:
    """Parts as a content: a lone text is one."""
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type", "text"}:
        return parts[0]["text"]
    return parts or None


def result(value: Any) -> tuple[str, str | None, bool | None]:
    """What a tool gave back: its text, and where the value says so, the call it answers and whether it is an error."""
    inner = value["output"] if isinstance(value, dict) and isinstance(value.get("output"), dict) else value
    if is_message(inner):
        (message, *_) = messages_of(inner, "tool")
        if message["role"] == "tool":
            return text_of(message["content"], "\n"), message.get("tool_call_id"), message.get("is_error")
    return ("" if value is None else text(value)), None, None


def is_empty(key: str, value: Any) -> bool:
    """Whether a field says nothing."""
    return value is None or value in ("", [], {}) or (key == "example" and value is False)


def _kind_of(message: dict[str, Any]) -> str | None:
    """Its type, if that is a text: in a schema it may be a list."""
    kind = message.get("type")
    return kind if isinstance(kind, str) else None


def _unwrapped(message: dict[str, Any]) -> dict[str, Any]:
    """What LangChain's ways of serialising wrap."""
    if isinstance(inner := message.get("kwargs"), dict) and isinstance(name := message.get("id"), list) and name:
        kind = str(name[-1]).removesuffix("Chunk").removesuffix("Message").lower()
        return {"type": kind} | inner if kind in _LANGCHAIN else inner
    if isinstance(inner := message.get("data"), dict) and _kind_of(message) in _LANGCHAIN:
        return {"type": message["type"]} | inner
    return message


def _kind(part: dict[str, Any]) -> str | None:
    """text, reasoning, call or result; None for another part."""
    kind = part.get("type")
    if part.get("thought") is True:
        return "reasoning"
    if isinstance(kind, str):
        return _KINDS.get(kind)
    of_key = next((found for key, found in _UNTYPED.items() if isinstance(part.get(key), dict)), None)
    if "toolCallId" in part and "toolName" in part:
        return "result" if "result" in part or "output" in part else "call"
    return of_key or ("text" if isinstance(part.get("text"), str) else None)


def _first(holder: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((holder[key] for key in keys if holder.get(key) is not None), None)


def _text_part(part: dict[str, Any]) -> dict[str, Any]:
    words = part.get("text", part.get("content"))
    rest = {k: v for k, v in part.items() if k not in ("text", "content", "type", "id") and not is_empty(k, v)}
    return {"type": "text", "text": text(words)} | rest


def _tool_calls(holder: dict[str, Any]) -> list[Any]:
    """The calls that stand beside the content."""
    calls = holder.get("tool_calls")
    if isinstance(calls, list) and calls:
        return [_call(call) if isinstance(call, dict) else call for call in calls]
    return [_call(holder["function_call"])] if isinstance(holder.get("function_call"), dict) else []


def _written_calls(content: Any) -> list[Any]:
    """The calls that a text is the JSON of; none if it says anything else."""
    if not isinstance(content, str) or not content.startswith("[{") or '"function"' not in content:
        return []
    try:
        calls = msgspec.json.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []
    are_calls = all(
        isinstance(c, dict) and "id" in c and isinstance(c.get("function"), dict) and "arguments" in c["function"]
        for c in calls
    )
    return [_call(call) for call in calls] if are_calls else []


def _call(call: dict[str, Any]) -> dict[str, Any]:
    inner = next((call[k] for k in _CALLS_AS if isinstance(call.get(k), dict)), call)
    arguments = _first(inner, ("arguments", "args", "input", "parameters"))
    call_id = _first(call, _CALL_IDS) or _first(inner, _CALL_IDS)
    name = _first(inner, ("name", "toolName"))
    return tool_call(text(name or ""), arguments, None if call_id is None else text(call_id))


def _beside(part: dict[str, Any]) -> list[dict[str, Any]]:
    """What a part says of a call that a call has no place for: its item's id, a signature."""
    known = (*_CALL_IDS[:-1], *_CALLS_AS, "name", "toolName", "arguments", "args", "input", "type", "toolCallType")
    more = {key: value for key, value in part.items() if key not in known and not is_empty(key, value)}
    return [more] if more.keys() - {"id"} or ("call_id" in part and more) else []


def _result_message(part: dict[str, Any]) -> Message:
    inner = next((part[k] for k in _RESULTS_AS if isinstance(part.get(k), dict)), part)
    body = _first(inner, ("response", "result", "content", "output"))
    return _tool_message({key: value for key, value in inner.items() if key in _OF_RESULTS}, body)


def _tool_message(kept: Message, content: Any) -> Message:
    """What a tool gave back, as a message; an answer that is neither text nor parts is its JSON."""
    if isinstance(content, list) and len(content) == 1 and is_part(content[0]) and _kind(content[0]) == "result":
        return _result_message(content[0] | {k: v for k, v in kept.items() if content[0].get(k) is None})
    if isinstance(content, list) and content and all(is_part(p) and _kind(p) == "text" for p in content):
        content = content_of([_text_part(part) for part in content])
    elif not (content is None or isinstance(content, str) or _is_typed(content)):
        content = text(content)
    message = {"role": "tool", "content": content} | {k: v for k, v in kept.items() if k not in _OF_RESULTS}
    for key, names in (("tool_call_id", _RESULT_IDS), ("name", ("name", "toolName"))):
        if (said := _first(kept, names)) is not None:
            message[key] = text(said)
    failed = _first(kept, ("is_error", "isError"))
    if isinstance(failed, bool) or kept.get("status") in ("error", "success"):
        message["is_error"] = failed if isinstance(failed, bool) else kept["status"] == "error"
    return message


def _is_typed(content: Any) -> bool:
    """Whether it is a list of parts that say what they are: an image among them, say."""
    return isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("type"), str) for p in content)


def _reasoning(part: dict[str, Any]) -> tuple[str, Any]:
    """The text of a part of reasoning, and what proves or hides it."""
    inner = part.get("reasoningContent", part)
    inner = inner.get("reasoningText", inner) if isinstance(inner, dict) else {"text": inner}
    inner = inner if isinstance(inner, dict) else {"text": inner}
    words = next((inner[k] for k in ("thinking", "text", "content", "reasoning", "summary") if inner.get(k)), "")
    if isinstance(words, list):
        words = "\n".join(text_of([piece]) if isinstance(piece, dict) else text(piece) for piece in words)
    return text(words), _first(inner, ("signature", "encrypted_content", "data", "redactedContent"))
