"""ShareGPT: `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}], "system"?, "tools"?}`.

JSON Lines, a JSON array, one object, or Parquet; also `conversation` and `items`. `from` is system, human or user, gpt
or assistant, function_call (a decision whose value is JSON of one {name, arguments} or of several), observation, tool
or function_response, or another name in `lake.formats.chat.chat_messages.ROLES`; `content` may stand for `value`. Pairs
are `chosen` and `rejected` beside the conversations they answer; everything else is as in `lake.formats.messages_chat`.
Sources: LLaMA-Factory 0.9.5 (data/README, v1 converter); axolotl's and OpenChat's documentation.
"""

from collections.abc import Iterator
from typing import Any

from lake.formats.base.format import Format
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError
from lake.formats.base.source import Input
from lake.formats.chat.chat_messages import ROLES
from lake.formats.chat.data_files import rows_of
from lake.formats.chat.messages import Message
from lake.formats.messages_chat import read_rows

NAME = "sharegpt"
_CHATS = ("conversations", "conversation", "messages", "items")


def recognise(look: Look) -> bool:
    """Whether rows have a conversation whose turns have `from` and `value`."""
    for value in rows_of(look):
        if set(value) >= {"conversations", "from", "value"} and set(value.values()) == {None}:
            return True  # of a damaged document, only the keys are known
        if any(_is_chat(value.get(key)) for key in _CHATS):
            return True
    return False


def _is_chat(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and "from" in first and ("value" in first or "content" in first)


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
    if isinstance(found.get("items"), list) and "conversations" not in found:
        found["conversations"] = found.pop("items")
    return found


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise ShapeError(f"Expected `object`, got `{type(turn).__name__}` - at `$.{place}`")
    said, value = turn.get("from"), turn.get("value", turn.get("content"))
    if not isinstance(said, str) or said.lower() not in ROLES:
        raise ShapeError(f"`{place}.from` is {said!r}; valid: {', '.join(ROLES)}")
    if not isinstance(value, str | None):
        raise ShapeError(f"`{place}.value` is {type(value).__name__}; valid: text")
    return {"role": said, "content": value} | {k: v for k, v in turn.items() if k not in ("from", "value", "content")}


FORMAT = Format(NAME, "ShareGPT conversations (from, value)", recognise, read)
