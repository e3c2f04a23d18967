"""ShareGPT: `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}], "system"?, "tools"?}`.

Files: JSON Lines, a JSON array, one object, or Parquet; also `conversation` and `items`. `from` is system, human or
user, gpt or assistant, function_call (a decision whose value is JSON of one or several {name, arguments}), observation,
tool or function_response, or another name in `lake.formats.chat.data_sets.ROLES`. `content` may replace `value`. Pairs
have `chosen` and `rejected` next to the conversations that they answer.

Episodes, steps and scores: as in `lake.formats.messages_chat`. Refused: turns without a known `from` or a text.

Sources: LLaMA-Factory 0.9.5 (data/README, v1 converter); axolotl's and OpenChat's documentation.
"""

from collections.abc import Iterator
from typing import Any

from lake.formats.base.format import FileHead, Format, Item
from lake.formats.base.rows import ShapeError
from lake.formats.base.source import Input
from lake.formats.chat.data_sets import ROLES, read_head_rows
from lake.formats.chat.messages import Message
from lake.formats.messages_chat import read_rows

NAME = "sharegpt"
_CHATS = ("conversations", "conversation", "messages", "items")


def recognise(look: FileHead) -> bool:
    """Return whether rows have a conversation whose turns have `from` and `value`."""
    for value in read_head_rows(look):
        if set(value) >= {"conversations", "from", "value"} and set(value.values()) == {None}:
            return True  # a damaged document shows only its keys
        chats = (value.get(key) for key in _CHATS)
        turns = (chat[0] for chat in chats if isinstance(chat, list) and chat and isinstance(chat[0], dict))
        if any("from" in turn and ("value" in turn or "content" in turn) for turn in turns):
            return True
    return False


def read(file: Input) -> Iterator[Item]:
    """Yield records and rejects of a file: line numbers from 1, else indices from 0."""
    return read_rows(file, NAME, convert_row)


def convert_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with messages instead of turns. Raises ShapeError: a turn of a wrong shape."""
    converted_row = dict(row)
    for key in (*_CHATS, "chosen", "rejected"):
        turns = row.get(key)
        if isinstance(turns, list):
            converted_row[key] = [_convert_turn(turn, f"{key}[{index}]") for index, turn in enumerate(turns)]
        elif isinstance(turns, dict):
            converted_row[key] = [_convert_turn(turns, key)]
    if isinstance(converted_row.get("items"), list) and "conversations" not in converted_row:
        converted_row["conversations"] = converted_row.pop("items")
    return converted_row


def _convert_turn(turn: Any, path: str) -> Message:
    if not isinstance(turn, dict):
        raise ShapeError(f"Expected `object`, got `{type(turn).__name__}` - at `$.{path}`")
    role, content = turn.get("from"), turn.get("value", turn.get("content"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise ShapeError(f"`{path}.from` is {role!r}; valid: {', '.join(ROLES)}")
    if not isinstance(content, str | None):
        raise ShapeError(f"`{path}.value` is {type(content).__name__}; valid: text")
    fields = {key: field for key, field in turn.items() if key not in ("from", "value", "content")}
    return {"role": role, "content": content} | fields


FORMAT = Format(NAME, "ShareGPT conversations (from, value)", recognise, read)
