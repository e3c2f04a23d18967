"""What data sets hold: messages, plain for lines, and flat for tables in which all have one type; and scores.

Arguments of tool calls are objects everywhere, so that they have one type in a file: those that are no JSON object
stand as text under the key `RAW`, from which chats are read as they were.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lake import ids
from lake.export.target import Call, Exported, Losses, Row, call_of, conversation, learned
from lake.formats import messages_chat
from lake.formats.chat.chat_messages import RAW, WEIGHTS
from lake.formats.chat.exported_rows import CALLED, ENV_RETURN, OUTCOME, REWARD_OF, SCORES, names_of
from lake.records import EpisodeRecord
from lake.write.rows import json_text
from lake.write.scores import RECORDED

KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "weight")
"""Keys of messages that chat templates and trainers know."""
_PARTS = ("function", "custom")


def chat(exported: Exported, losses: Losses) -> list[Row]:
    """The whole chat of an episode; what is not learned from has the weight 0, as OpenAI's fine-tuning takes it."""
    messages = []
    for message, weight in zip(conversation(exported.record), learned(exported, losses), strict=True):
        made = plain(message, exported, losses)
        if weight is not None and made.keys().isdisjoint(WEIGHTS):
            made["weight"] = weight
        messages.append(made)
    return messages


def plain(message: Row, exported: Exported, losses: Losses) -> Row:
    """A message as chat templates expect it: arguments of tool calls as objects, no nulls, no keys of other tools.

    What calls tools and says nothing has no content, as in the answers of chat APIs.
    """
    known = message.keys() if exported.record.source_format == messages_chat.NAME else KEYS
    losses.add_names("keys of messages", message.keys() - set(known))
    made = {key: value for key, value in message.items() if key in known and (value is not None or key == "content")}
    if isinstance(calls := made.get("tool_calls"), list):
        made["tool_calls"] = [_plain_call(call) for call in calls]
        if calls and made.get("content") == "":
            made["content"] = None
    return made


def _plain_call(call: Any) -> Any:
    """A call whose arguments are an object."""
    said = call_of(call)
    if not isinstance(call, dict) or said.raw is None:
        return call
    part = next((part for part in _PARTS if isinstance(call.get(part), dict)), None)
    inner = call if part is None else call[part]
    if "arguments" not in inner:
        return call
    made = inner | {"arguments": _object(said)}
    return made if part is None else call | {part: made}


def _object(said: Call) -> Row:
    given = said.arguments
    if isinstance(given, dict) and given.keys() != {RAW}:
        return given
    return {RAW: said.raw if isinstance(said.raw, str) else json_text(said.raw)}


def score_columns(exported: Exported, losses: Losses, own: str, fits: Callable[[str], bool]) -> Row:
    """Scores of the whole episode as columns; those that none can be made of are in `SCORES`.

    `own`: the format of the rows; of an episode that was read from it, columns are the scores that came with it.
    `fits`: whether a column may have a name.
    """
    is_own = exported.record.source_format == own
    found = exported.came_with if is_own else exported.episode.scores
    losses.add("step scores", sum(score.step_index is not None for _, score in found))
    if is_own:
        losses.add("scores of functions", len(exported.computed))
    columns: Row = {}
    others: Row = {}
    for version, score in found:
        if score.step_index is None:
            is_column = version == RECORDED if is_own else score.value is not None
            is_free = fits(score.scorer) and score.scorer not in (*CALLED, *OUTCOME, SCORES)
            (columns if is_column and is_free else others)[score.scorer] = score.value
    return columns | ({SCORES: others} if others else {})


def return_beside(record: EpisodeRecord, score: str | None) -> Row:
    """What a row says beside the score that counts, where that is a scorer's: whose it is, and the return."""
    return {} if score in (None, ENV_RETURN) else {REWARD_OF: score, ENV_RETURN: record.env_return}


def named(exported: Exported) -> Row:
    """What a row says of the episode that it is of."""
    return names_of(exported.record, ids.to_text(exported.episode.episode_id))


def flat(messages: Iterable[Row], losses: Losses) -> list[Row]:
    """Messages for a table: content that is no text, arguments and what else has many types are JSON text."""
    return [_flat_message(message, losses) for message in messages]


def _flat_message(message: Row, losses: Losses) -> Row:
    losses.add_names("keys of messages", message.keys() - set(KEYS))
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
    arguments = call.raw if isinstance(call.raw, dict | None) else _object(call)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json_text(arguments)}}


def flat_type() -> Any:
    """The type of a column of flat messages. Arguments are marked as JSON: `datasets` gives chat templates objects."""
    import pyarrow as pa

    text = pa.string()
    call = pa.struct({"id": text, "type": text, "function": pa.struct({"name": text, "arguments": pa.json_()})})
    others: Sequence[tuple[str, Any]] = (("tool_calls", pa.list_(call)), ("weight", pa.int64()))
    return pa.list_(pa.struct(dict.fromkeys(KEYS, text) | dict(others)))
