"""Rows that a person shaped, in SQL or in a frame, as episodes: an episode a row, a step a row, or a message a row.

.. code-block:: text

    episodes   has `messages`: a list of chat messages, or JSON text of one (`lake.formats.messages` says how they
               become decisions); `step_rewards`: a number or null for each decision
    steps      has `action`; `state`, `reward` and whatever else a step has in docs/reference/jsonl.md
    messages   has `role`; `content`, `tool_calls`, `tool_call_id`, `name`, `reasoning_content`, `is_error`; `reward` of
               an assistant's message is its step's; columns of no other meaning stay with the message

    episode    which rows are one episode (steps, messages); else run_id, task_id, rollout_index, attempt and agent_id
    task_id    else what `episode` says, else the number of the row
    rollout_index   else rows of a task are numbered as they come
    step_index, message_index   the order inside an episode; else the order of the rows
    scores     {name: number} or a list of {"scorer", "value", ...}
    any other field of an episode in docs/reference/jsonl.md, of its first row that has it

What has another name is kept in `extra`: of the episode (episodes), or of the step (steps).
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from lake.errors import UsageError
from lake.formats.grouped import grouped
from lake.formats.json_array import Element
from lake.formats.messages import conversation
from lake.formats.rows import Item, ShapeError, items_of, jsonable
from lake.formats.source import Input
from lake.records import EpisodeRecord, ScoreRecord, StepRecord

Shape = Literal["episodes", "steps", "messages"]
SHAPES: dict[Shape, str] = {"episodes": "messages", "messages": "role", "steps": "action"}
"""Shape -> the column that it must have."""
_KEY = ("run_id", "task_id", "rollout_index", "attempt", "agent_id")
_EPISODE = frozenset(EpisodeRecord.__struct_fields__) - {"steps", "spans", "scores", "source_format", "source_uri"}
_STEP = frozenset(StepRecord.__struct_fields__) - {"tokens"}
_DOCUMENTS = frozenset(
    ("messages", "step_rewards", "tool_calls", "context", "scores", "ground_truth", "tools", "initial_messages")
) | {"final_observation", "sampling", "extra"}
"""Columns that may hold JSON text of a list or an object."""
_OF_A_MESSAGE = frozenset(("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "is_error"))
_NOT_OF_A_MESSAGE = _EPISODE | {"episode", "message_index", "reward", "scores"}
_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode


def shape_of(columns: Iterable[str], named: str | None = None) -> Shape:
    """The shape of rows with some columns. Raises UsageError: none of the three, or not the one that is named."""
    present = set(columns)
    for shape, column in SHAPES.items():
        if (named is None or named == shape) and column in present:
            return shape
    valid = "; ".join(f"{shape}: a column `{column}`" for shape, column in SHAPES.items())
    asked = f"rows of the shape {named!r}" if named is not None else "rows of one of three shapes"
    raise UsageError(f"{asked} are needed ({valid}); there are: {', '.join(columns)}")


def read_rows(rows: Iterable[dict[str, Any]], shape: Shape, file: Input, name: str) -> Iterator[Item]:
    """Records and rejects of rows; a position is the index of an episode's first row."""
    if shape == "episodes":
        for index, row in enumerate(rows):
            yield from _items(index, [row], shape, file, name)
        return
    for _, texts in grouped(_keyed(rows)):
        found = [_decode(text) for text in texts]
        yield from _items(found[0][0], [row for _, row in found], shape, file, name)


def _items(index: int, rows: list[dict[str, Any]], shape: Shape, file: Input, name: str) -> Iterator[Item]:
    rows = [jsonable(row) for row in rows]
    element = Element(index, rows, source=_encode(rows).decode())
    yield from items_of(element, name, lambda found: [_record(found, shape, index, file)])


def _keyed(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Each row with its number, under what makes rows one episode."""
    for index, given in enumerate(rows):
        row = jsonable(given)
        key = row["episode"] if row.get("episode") is not None else [row.get(name) for name in _KEY]
        yield _encode(key).decode(), _encode((index, row))


def _record(given: list[dict[str, Any]], shape: Shape, index: int, file: Input) -> EpisodeRecord:
    rows = [{key: _document(key, value) for key, value in row.items() if value is not None} for row in given]
    fields: dict[str, Any] = {}
    for row in rows:
        for key in row.keys() & _EPISODE - (_STEP if shape == "steps" else frozenset()):
            fields.setdefault(key, row[key])
    fields.setdefault("task_id", str(rows[0].get("episode", index)))
    if "rollout_index" not in fields:
        fields["rollout_index"] = file.next_index(fields.get("run_id"), str(fields["task_id"]))
    chat: dict[str, Any]
    if shape == "steps":
        ordered = sorted(rows, key=lambda row: row["step_index"]) if "step_index" in rows[0] else rows
        chat = {"steps": [_step(row) for row in ordered]}
    else:
        chat = _chat(rows, shape)
    if shape == "episodes":
        known = _EPISODE | {"messages", "step_rewards", "scores", "episode"}
        extra = {key: value for key, value in rows[0].items() if key not in known}
        if extra:
            fields["extra"] = fields.get("extra", {}) | extra
    record = msgspec.convert({"steps": []} | fields, EpisodeRecord, strict=False)
    for key, value in chat.items():
        if value or key == "steps":
            setattr(record, key, value)
    record.scores = _scores(next((row["scores"] for row in rows if "scores" in row), {}))
    return record


def _step(row: dict[str, Any]) -> StepRecord:
    fields = {"state": None} | {key: value for key, value in row.items() if key in _STEP}
    known = _STEP | _EPISODE | {"episode", "step_index", "scores"}
    if extra := {key: value for key, value in row.items() if key not in known}:
        fields["extra"] = fields.get("extra", {}) | extra
    return msgspec.convert(fields, StepRecord, strict=False)


def _chat(rows: list[dict[str, Any]], shape: Shape) -> dict[str, Any]:
    """A chat's fields of an episode."""
    if shape == "episodes":
        messages, rewards = rows[0].get("messages"), rows[0].get("step_rewards")
        if not isinstance(messages, list):
            raise ShapeError(f"`messages` is {type(messages).__name__}; valid: a list of messages, or JSON text of one")
        found = conversation(messages)
        if rewards is not None and (not isinstance(rewards, list) or len(rewards) != len(found.steps)):
            valid = f"valid: a number or null for each of {len(found.steps)} decisions"
            raise ShapeError(f"`step_rewards` is {rewards!r}; {valid}")
    else:
        ordered = sorted(rows, key=lambda row: row["message_index"]) if "message_index" in rows[0] else rows
        messages = [
            {key: value for key, value in row.items() if key in _OF_A_MESSAGE or key not in _NOT_OF_A_MESSAGE}
            for row in ordered
        ]
        found = conversation(messages)
        rewards = [ordered[place].get("reward") for place in found.places]
    for step, reward in zip(found.steps, rewards or (), strict=False):
        step.reward = msgspec.convert(reward, float | None, strict=False)
    return {
        "steps": found.steps,
        "initial_messages": found.initial_messages,
        "final_observation": found.final_observation,
    }


def _scores(given: Any) -> list[ScoreRecord]:
    if isinstance(given, dict):
        given = [{"scorer": scorer, "value": value} for scorer, value in given.items()]
    return msgspec.convert(given, list[ScoreRecord], strict=False)


def _document(key: str, value: Any) -> Any:
    """A value, decoded where it is JSON text of a list or an object in a column that may hold one."""
    if key in _DOCUMENTS and isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return _decode(value)
        except msgspec.DecodeError as error:
            raise ShapeError(f"`{key}` is no JSON: {error}") from error
    return value
