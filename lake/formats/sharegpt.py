"""ShareGPT: `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}], "system"?, "tools"?}`.

JSON Lines, a JSON array, one object, or Parquet; also `conversation`. `from` is system, human or user, gpt or
assistant, function_call (a decision whose value is JSON of one {name, arguments} or of several), observation, tool or
function_response. Pairs are `chosen` and `rejected` beside the conversations they answer; everything else is as in
`lake.formats.messages_chat`. Sources: LLaMA-Factory 0.9.5 (data/README, v1 converter); axolotl's documentation.
"""

from collections.abc import Iterator
from typing import Any

from lake.formats.base.format import Format
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError
from lake.formats.base.source import Input
from lake.formats.chat.chat_messages import decoded
from lake.formats.chat.messages import Message
from lake.formats.messages_chat import leaves, read_rows

NAME = "sharegpt"
_CHATS = ("conversations", "conversation", "messages")
_ROLES = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "bot": "assistant"},
    **{"function_call": "assistant", "observation": "tool", "tool": "tool", "function_response": "tool"},
}


def recognise(look: Look) -> bool:
    """Whether rows have a conversation whose turns have `from` and `value`."""
    if look.kind == "parquet":
        return bool(set(look.names).intersection(_CHATS)) and {"from", "value"} <= leaves(look)
    for value in look.objects:
        if set(value) >= {"conversations", "from", "value"} and set(value.values()) == {None}:
            return True  # of a damaged document, only the keys are known
        if any(_is_chat(value.get(key)) for key in _CHATS):
            return True
    return False


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and value[0].keys() >= {"from", "value"}
    )


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file: line numbers from 1, else indices from 0."""
    return read_rows(file, NAME, to_row)


def to_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row with messages instead of turns. Raises ShapeError: a turn of the wrong shape."""
    found = dict(row)
    for key in (*_CHATS, "chosen", "rejected"):
        value = row.get(key)
        if isinstance(value, list):
            found[key] = [_message(turn, f"{key}[{index}]") for index, turn in enumerate(value)]
        elif isinstance(value, dict):
            found[key] = [_message(value, key)]
    return found


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise ShapeError(f"Expected `object`, got `{type(turn).__name__}` - at `$.{place}`")
    said, value = turn.get("from"), turn.get("value")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise ShapeError(f"`{place}.from` is {said!r}; valid: {', '.join(_ROLES)}")
    if not isinstance(value, str | None):
        raise ShapeError(f"`{place}.value` is {type(value).__name__}; valid: text")
    message = {"role": role, "content": value} | {k: v for k, v in turn.items() if k not in ("from", "value")}
    if said == "function_call":
        found = decoded(value or "")
        calls = found if isinstance(found, list) else [found]
        # What is no call is the agent's text, as it stands.
        if calls and all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
            message |= {"content": None, "tool_calls": calls}
    return message


FORMAT = Format(NAME, "ShareGPT conversations (from, value)", recognise, read)
