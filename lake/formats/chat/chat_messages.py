"""Messages as training data spells them, brought into the form of `lake.formats.chat.messages`; and prompts set apart.

Spellings: roles by other names (`ROLES`), of which `function_call` and `tool_call` (a second one in a row is the same
decision's) say their calls in JSON; the text as `value` or `text`; `tool_calls` as JSON text, or without their
`function`; the older `function_call`; `reasoning` or `thinking` beside the content; LLaMA-Factory's parts {type: text |
reasoning | tool_call, value}; parts that `lake.formats.tracing.shapes` takes apart, those of Gemini among them.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from lake.formats.base.json_faults import Rewriter
from lake.formats.base.rows import ShapeError
from lake.formats.chat.messages import Conversation, Message, conversation, tool_call
from lake.formats.tracing.shapes import content_of, is_part, messages_of

_PLAIN = frozenset(("role", "content", "name", "tool_call_id"))
_TEXTS = ("text", "input_text", "output_text")
_OWN = ("user", "assistant", "tool", "system", "developer")
_CALLS = frozenset(("function_call", "tool_call"))
ROLES = {
    **{role: role for role in _OWN},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "chatbot", *sorted(_CALLS)), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function", "tool_response", "ipython"), "tool"),
}
"""Names of roles, in small letters, and whose they are."""
_SAYS = ("value", "text", "system_prompt")
"""Where a message's text stands that has no content."""
WEIGHTS = ("weight", "loss_weight", "train", "training", "trainable", "loss")
RAW = "_raw"
"""The one key of arguments that are no JSON object, in data sets where arguments have to be one; its value: as text."""
_decode = msgspec.json.Decoder().decode


def chat_messages(value: Any, place: str) -> list[Message]:
    """A list of messages, JSON text of one, or one message. Raises ShapeError: it is none of these."""
    found = decoded(value) if isinstance(value, str) else value
    if isinstance(found, dict):
        found = [found]
    if not isinstance(found, list):
        raise ShapeError(f"`{place}` is {type(value).__name__}; valid: a list of messages, or JSON text of one")
    messages: list[Message] = []
    for index, message in enumerate(found):
        if _is_plain(message):
            messages.append(message)
            continue
        spelled = _spelled(message, f"{place}[{index}]")
        if messages and _goes_on(messages[-1], message, spelled[0]):
            calls = [*messages[-1].get("tool_calls", ()), *spelled[0]["tool_calls"]]
            messages[-1] = messages[-1] | {"tool_calls": calls}
        else:
            messages += spelled
    return messages


def _goes_on(before: Any, given: Any, spelled: Any) -> bool:
    """Whether a call is written as a message behind that of the decision that made it, as ms-swift does."""
    if not isinstance(before, dict) or not isinstance(given, dict) or given.get("role") != "tool_call":
        return False
    return before.get("role") == "assistant" and "tool_calls" in spelled


def decoded(text: str) -> Any:
    """JSON text as what it says; None if it is no JSON, or such that it cannot be stored as part of a record."""
    try:
        data = text.encode()
        value = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return value if Rewriter().compared(data, value)[0] else None


def answered(messages: Sequence[Message], start: int = 0, *, place: str) -> Conversation:
    """The decisions of a chat from a place on; what an assistant said before is history, and is observed.

    A message with a weight of 0 is a decision that is not trained on.
    """
    chat = conversation(messages, place=place)
    history = sum(index < start for index in chat.places) if start else 0
    if history == len(chat.steps) > 0:
        chat = Conversation(initial_messages=list(messages))
    elif history:
        chat.steps, chat.places = chat.steps[history:], chat.places[history:]
        chat.initial_messages = list(messages[: chat.places[0]])
        chat.steps[0].context = []
    for step in chat.steps:
        if (extra := step.extra) is not None and any(key in extra and extra[key] == 0 for key in WEIGHTS):
            step.trainable = False
    return chat


def _is_plain(message: Any) -> bool:
    """Whether a message is spelled like ours, as most are."""
    return (
        type(message) is dict
        and message.keys() <= _PLAIN
        and type(message.get("content")) is str
        and message.get("role") in _OWN  # every other name may mean one of these
        and None not in message.values()
    )


def _spelled(given: Any, place: str) -> list[Message]:
    """A message; several where results of tools stand inside it."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        return [given]  # what is wrong with it is told where all messages are checked
    message = _named(given)
    if isinstance(message.get("parts"), list) and "content" not in message:
        return messages_of(message, message["role"])
    for key in ("reasoning", "thinking"):
        if isinstance(message.get(key), str) and "reasoning_content" not in message:
            message["reasoning_content"] = message.pop(key)
    calls = message.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = decoded(calls) if calls.strip() else []
        if not isinstance(calls, list):
            raise ShapeError(f"`{place}.tool_calls` is a text that is no JSON list; valid: a list of tool calls")
    if not calls and isinstance(message.get("function_call"), dict):
        calls = [message.pop("function_call")]
    if calls:
        message["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    if any(isinstance(part, dict) and "value" in part for part in content):
        content = [typed for part in content for typed in _typed(part)]
        message["content"] = content_of(content)
    if any(is_part(part) and part.get("type") not in _TEXTS for part in content):
        return messages_of(message | {"content": content}, message["role"])
    return [message]


def _named(given: dict[str, Any]) -> Message:
    """A message whose role, text and calls stand where others have them, without nulls."""
    message = {key: value for key, value in given.items() if value is not None}
    role = message["role"].lower()
    message["role"] = ROLES.get(role, message["role"])
    if "content" not in message and (key := next((key for key in _SAYS if isinstance(message.get(key), str)), None)):
        message["content"] = message.pop(key)
    if role in _CALLS and (calls := _decoded_calls(message.get("content"))):
        message |= {"content": None, "tool_calls": calls}
    return message


def _decoded_calls(text: Any) -> list[Any]:
    """The calls that JSON text says; none if it says anything else, which is the agent's text then."""
    found = decoded(text) if isinstance(text, str) else text
    calls = found if isinstance(found, list) else [found]
    return calls if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls) else []


def _call(call: Any) -> Any:
    if isinstance(call, dict) and isinstance(call.get("name"), str) and "function" not in call:
        more = {key: value for key, value in call.items() if key not in ("name", "arguments", "id", "type")}
        call_id = call.get("id")
        call = tool_call(call["name"], call.get("arguments"), call_id if isinstance(call_id, str) else None) | more
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and (text := _raw(function.get("arguments"))) is not None:
        return call | {"function": function | {"arguments": text}}
    return call


def _raw(arguments: Any) -> str | None:
    """The text that stands under `RAW` in the arguments of a call."""
    if isinstance(arguments, str) and RAW in arguments[:16]:
        arguments = decoded(arguments)
    text = arguments.get(RAW) if isinstance(arguments, dict) and len(arguments) == 1 else None
    return text if isinstance(text, str) else None


def _typed(part: Any) -> list[Any]:
    """A part of LLaMA-Factory as other APIs write it; a call in several parts if it is several."""
    kind, value = (part.get("type"), part.get("value")) if isinstance(part, dict) else (None, None)
    if kind in ("text", "reasoning") and isinstance(value, str):
        return [{"type": kind, "text": value}]
    if kind == "tool_call":
        if calls := _decoded_calls(value):
            return [{"type": kind} | call for call in calls]
        return [{"type": "text", "text": value}] if isinstance(value, str) else [part]
    return [part]
