"""Messages of tau2-bench in the form of chat APIs, and those that the ticks of a voice run add up to.

A message of tau2 has `tool_calls` of {id, name, arguments, requestor}; a tool's result has `id` and `error`; results of
one turn may stand in one message, under `tool_messages`. `raw_data` is the provider's answer (of a chat API, or of
Anthropic's with its `thinking_blocks`): what it repeats of the message is left out, finish reason, model and reasoning
get their places.

A tick of a voice run is a fifth of a second in which both sides may speak. What a side says in one utterance is one
message. Where utterances are not told apart, a message ends when the agent gets to hear or read something: so an agent
that speaks twice in a row is one decision. A tool call ends the agent's message.
"""

from collections.abc import Sequence
from typing import Any

from lake.formats.base.fields import moment
from lake.formats.base.rows import ShapeError, rest
from lake.formats.chat.messages import Conversation, Message, conversation, decision, tool_call
from lake.records import SpanRecord

_USUAL = {"is_audio": False, "is_final_chunk": True, "contains_speech": True}
"""Keys of messages that say nothing where they have these values."""
_CHANGED = ("role", "content", "tool_calls", "tool_messages", "turn_idx", "raw_data")
_OF_TOOLS = ("id", "error")
_EMPTY: tuple[Any, ...] = (None, {}, [])


def chat_of(given: Sequence[Any], history: Any) -> Conversation:
    """The decisions of a simulation; `history` is what its task begins with.

    Raises:
        ShapeError: see `conversation`; a tool call without a name.
    """
    messages = [message for index, item in enumerate(given) for message in _messages(item, index)]
    scripted = {id(message) for message in messages[: _scripted(messages, history)]}
    chat = conversation(messages, is_decision=lambda m: m["role"] == "assistant" and id(m) not in scripted)
    for place, step in zip(chat.places, chat.steps, strict=True):
        since = step.context or chat.initial_messages if step is chat.steps[0] else step.context
        seen = decision(messages[place], [message for message in since if _is_seen(message)], is_first=True)
        step.state, step.state_role, step.state_is_error = seen.state, seen.state_role, seen.state_is_error
    return chat


def _scripted(messages: list[Message], history: Any) -> int:
    """How many messages stand there before any model runs: the task's own, or the harness's greeting."""
    if isinstance(history, list) and history:
        wanted = [_said(message) for index, item in enumerate(history) for message in _messages(item, index)]
        return len(wanted) if wanted == [_said(message) for message in messages[: len(wanted)]] else 0
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    is_greeting = first.get("role") == "assistant" and not first.keys() & {"tool_calls", "usage", "raw_data", "ticks"}
    return int(is_greeting and not first.get("cost"))


def _said(message: Any) -> Any:
    return (message.get("role"), message.get("content")) if isinstance(message, dict) else message


def _is_seen(message: Message) -> bool:
    """Whether the agent gets to see it, as something new: neither its own greeting, nor what the user does alone."""
    if message["role"] == "user":
        return not message.get("tool_calls")
    return message["role"] != "assistant" and message.get("requestor") != "user"


def _messages(given: Any, index: int) -> list[Any]:
    if not isinstance(given, dict):
        return [given]
    if isinstance(inner := given.get("tool_messages"), list):
        return [message for item in inner for message in _messages(item, index)]
    is_tool = given.get("role") == "tool"
    kept = {
        key: value
        for key, value in given.items()
        if value is not None and key not in _CHANGED and not (is_tool and key in _OF_TOOLS) and _USUAL.get(key) != value
    }
    message = {"role": given.get("role"), "content": given.get("content")} | kept
    if message.get("requestor") == "assistant":
        del message["requestor"]
    if is_tool:
        message |= {"tool_call_id": given.get("id")} | ({"is_error": True} if given.get("error") is True else {})
    if given.get("turn_idx") not in (None, index):
        message["turn_idx"] = given["turn_idx"]
    if (calls := given.get("tool_calls")) is not None and calls != []:
        message["tool_calls"] = [_call(call, index) for call in calls] if isinstance(calls, list) else calls
    if isinstance(raw := given.get("raw_data"), dict):
        message |= _of_provider(raw, given)
    return [message]


def _call(call: Any, index: int) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ShapeError(f"a tool call at `messages[{index}].tool_calls` is {call!r}; valid: an object with a `name`")
    call_id = call.get("id")
    made = tool_call(call["name"], call.get("arguments"), call_id if isinstance(call_id, str) and call_id else None)
    return made | (
        rest(call, "id", "name", "arguments", *(["requestor"] * (call.get("requestor") == "assistant"))) or {}
    )


def _of_provider(raw: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What a provider's answer adds to the message that was made of it. It is the completion, or its choice alone."""
    choices = raw.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else raw
    said = choice.get("message")
    said = said if isinstance(said, dict) else {}
    found: dict[str, Any] = {}
    for key, place in (("finish_reason", choice), ("model", raw), ("reasoning_content", said)):
        if isinstance(place.get(key), str) and (place is not said or given.get("role") == "assistant"):
            found[key] = place[key]
    if choice is raw and isinstance(blocks := raw.get("thinking_blocks"), list):
        found |= _thought(blocks) | ({"finish_reason": raw["stop_reason"]} if raw.get("stop_reason") else {})
        raw = choice = _left(raw, "thinking_blocks", "role", "stop_reason")
    repeated = ["role"]
    repeated += ["content"] if said.get("content") == given.get("content") else []
    repeated += ["tool_calls"] if _length(said.get("tool_calls")) == _length(given.get("tool_calls")) else []
    left = {"message": _left(said, *repeated, *found)} if said else {}
    kept = _left(choice | left, *found, *(["index"] if choice.get("index") == 0 else []))
    if choice is not raw:
        kept = _left(raw | {"choices": [kept, *raw["choices"][1:]] if kept else raw["choices"][1:]}, *found)
    return found | ({"raw_data": kept} if kept else {})


def _thought(blocks: list[Any]) -> dict[str, Any]:
    """What Anthropic's blocks say, and what proves it."""
    known = [block for block in blocks if isinstance(block, dict)]
    texts = [block["thinking"] for block in known if isinstance(block.get("thinking"), str)]
    seals = [block[key] for block in known for key in ("signature", "data") if block.get(key)]
    found = {"reasoning_content": "\n".join(texts), "signatures": seals}
    return {key: item for key, item in found.items() if item}


def _left(value: dict[str, Any], *known: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in known and item not in _EMPTY}


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def messages_of(ticks: Sequence[Any]) -> list[Message]:
    """The messages of a voice run, each where it begins. Raises ShapeError: a tick that is no object."""
    talk = _Talk()
    for index, tick in enumerate(ticks):
        if not isinstance(tick, dict):
            raise ShapeError(f"Expected `object`, got `{type(tick).__name__}` - at `$.ticks[{index}]`")
        for side, role in (("agent", "assistant"), ("user", "user")):
            talk.add(role, tick.get(f"{side}_chunk"), tick.get(f"{side}_tool_calls"), index)
            talk.messages.extend(tick.get(f"{side}_tool_results") or ())
    return talk.messages


class _Talk:
    """Messages so far, and those that each side may still add to."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._open: dict[str, dict[str, Any]] = {}

    def add(self, role: str, chunk: Any, calls: Any, index: int) -> None:
        """What a side says and calls in a tick."""
        chunk = chunk if isinstance(chunk, dict) else {}
        text, calls = chunk.get("content"), calls or chunk.get("tool_calls")
        if not text and not calls:
            return
        named = {name for name in chunk.get("utterance_ids") or () if isinstance(name, str)}
        message = self._open.get(role)
        if message is None or not self._goes_on(message, named):
            message = {"role": role, "content": None, "ticks": [index, index], "utterance_ids": [], "cost": None}
            self._open[role] = message
            self.messages.append(message)
        message["ticks"][1] = index
        message["utterance_ids"] += sorted(named - {*message["utterance_ids"]})
        if isinstance(text, str):
            message["content"] = (message["content"] or "") + text
        if isinstance(cost := chunk.get("cost"), int | float) and cost:
            message["cost"] = (message["cost"] or 0.0) + cost
        if calls:
            message["tool_calls"] = calls
            del self._open[role]

    def _goes_on(self, message: dict[str, Any], named: set[str]) -> bool:
        known = {*message["utterance_ids"]}
        return bool(known & named) if known and named else self.messages[-1] is message


def spans_of(trace_id: str, ticks: Sequence[Any], steps: Sequence[Any]) -> list[SpanRecord]:
    """Each tick as a span, as it stands in the file, and the step that it is part of."""
    part = {
        tick: number
        for number, step in enumerate(steps)
        for first, last in [(step.extra or {}).get("ticks") or (0, -1)]
        for tick in range(first, last + 1)
    }
    return [
        SpanRecord(
            trace_id=trace_id,
            span_id=str(index),
            kind="tick",
            name="tick",
            step_index=part.get(index),
            started_at=moment(tick.get("timestamp")),
            attributes=rest(tick),
        )
        for index, tick in enumerate(ticks)
    ]
