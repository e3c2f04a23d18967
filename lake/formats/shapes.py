"""Rows that a person shaped, in SQL or in a frame, as episodes: an episode a row, a step a row, or a message a row.

.. code-block:: text

    episodes   has `messages`: a list of chat messages, or JSON text of one (`lake.formats.chat.messages` says how they
               become decisions); `step_rewards`: a number or null for each decision
    steps      has `action`; `state`, `reward` and whatever else a step has in docs/reference/jsonl.md but `tokens`
    messages   has `role`; `content`, `tool_calls`, `tool_call_id`, `name`, `reasoning_content`, `is_error`; `reward` of
               an assistant's message is its step's; columns of no other meaning stay with the message

    episode    which rows are one episode (steps, messages); else run_id, task_id, rollout_index, attempt, agent_id,
               collection_round and seed
    task_id    else what `episode` says, else the number of the row
    rollout_index   else rows of a task are numbered as they come
    step_index, message_index   the order inside an episode; else the order of the rows
    scores     {name: number} or a list of {"scorer", "value", ...}
    any other field of an episode in docs/reference/jsonl.md, of its first row that has it; in `steps`, a name that a
    step has too is the step's

What has another name is kept in `extra`: of the episode (episodes), or of the step (steps). NULL is what is not given.
What is wrong is told with the number of its row, from 0.
"""

import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from math import isfinite
from typing import Any, Literal

import msgspec

from lake.errors import UsageError
from lake.formats.base.arrow import Unreadable
from lake.formats.base.grouped import grouped
from lake.formats.base.json_array import Element
from lake.formats.base.rows import Item, ShapeError, explained, items_of, jsonable
from lake.formats.base.source import Input
from lake.formats.chat.messages import checked, conversation
from lake.records import EpisodeRecord, ScoreRecord, StepRecord, printable

Shape = Literal["episodes", "steps", "messages"]
SHAPES: dict[Shape, str] = {"episodes": "messages", "messages": "role", "steps": "action"}
"""Shape -> the column that it must have."""
_KEY = ("run_id", "task_id", "rollout_index", "attempt", "agent_id", "collection_round", "seed")
_EPISODE = frozenset(EpisodeRecord.__struct_fields__) - {"steps", "spans", "scores", "source_format", "source_uri"}
# Not `tokens`: rows cannot tell an absent `prefix_step_index` from one that is null.
_STEP = frozenset(StepRecord.__struct_fields__) - {"tokens"}
_DOCUMENTS = frozenset(
    ("messages", "step_rewards", "tool_calls", "context", "scores", "ground_truth", "tools", "initial_messages")
) | {"final_observation", "sampling", "extra"}
"""Columns that may hold JSON text of a list or an object."""
_ABOUT_ROWS = frozenset(("episode", "scores"))
_OF_A_MESSAGE = frozenset(("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "is_error"))
_NOT_OF_A_MESSAGE = _EPISODE | _ABOUT_ROWS | {"message_index", "reward"}
_MEANT: dict[Shape, frozenset[str]] = {
    "episodes": _EPISODE | _ABOUT_ROWS | {"messages", "step_rewards"},
    "steps": _EPISODE | _ABOUT_ROWS | _STEP | {"step_index"},
    "messages": _OF_A_MESSAGE | _NOT_OF_A_MESSAGE,
}
"""Shape -> the columns that mean something."""
_CLOSE = 0.7
"""How like a known name another has to be for it to be asked whether that is meant."""
_FIELD = re.compile(r"`\$\.(\w+)")
_encode, _decode = msgspec.json.Encoder(enc_hook=str).encode, msgspec.json.Decoder().decode
_Row = dict[str, Any]


def shape_of(columns: Iterable[str], named: str | None = None) -> Shape:
    """The shape of rows with some columns. Raises UsageError: none of the three, or not the one that is named."""
    present = set(columns)
    for shape, column in SHAPES.items():
        if (named is None or named == shape) and column in present:
            return shape
    valid = "; ".join(f"{shape}: a column `{column}`" for shape, column in SHAPES.items())
    asked = f"rows of the shape {named!r}" if named is not None else "rows of one of three shapes"
    raise UsageError(f"{asked} are needed ({valid}); there are: {', '.join(columns)}")


def unknown_columns(columns: Iterable[str], shape: Shape) -> str:
    """The columns that mean nothing, where they go and what they might have meant, as a sentence; empty if all do."""
    known = _MEANT[shape]
    unknown = [column for column in columns if column not in known]
    free = sorted(known - set(columns))
    named = [
        printable(column) + "".join(f" ({close}?)" for close in get_close_matches(column, free, 1, _CLOSE))
        for column in unknown
    ]
    kept = "with their message" if shape == "messages" else "in extra"
    return f"columns without a meaning here, kept {kept}: {', '.join(named)}" if named else ""


def read_rows(rows: Iterable[_Row], shape: Shape, file: Input, name: str) -> Iterator[Item]:
    """Records and rejects of rows; a position is the number of an episode's first row."""
    if shape == "episodes":
        for number, row in enumerate(rows):
            yield from _items([number], [jsonable(row)], shape, file, name)
        return
    for _, pieces in grouped(_keyed(rows)):
        file.meter.done += sum(map(len, pieces))
        numbers, found = zip(*map(pickle.loads, pieces), strict=True)
        yield from _items(numbers, found, shape, file, name)


def _keyed(rows: Iterable[_Row]) -> Iterator[tuple[str, bytes]]:
    """Each row with its number, under what makes rows one episode."""
    for number, given in enumerate(rows):
        row = jsonable(given)
        key = [row["episode"]] if row.get("episode") is not None else [None, *map(row.get, _KEY)]
        yield _encode(key).decode(), pickle.dumps((number, row))


def _items(numbers: Sequence[int], rows: Sequence[_Row], shape: Shape, file: Input, name: str) -> Iterator[Item]:
    element = Element(numbers[0], rows, source=None)
    yield from items_of(element, name, lambda found: [_record(numbers, found, shape, file)])


def _record(numbers: Sequence[int], given: Sequence[_Row], shape: Shape, file: Input) -> EpisodeRecord:
    rows = []
    for number, row in zip(numbers, given, strict=True):
        with _named(number):
            rows.append({key: _value(key, value) for key, value in row.items() if value is not None})
    is_keyed = rows[0].get("episode") is None
    fields, origins = _fields(numbers, rows, _EPISODE - _of_steps(shape, is_keyed=is_keyed))
    fields.setdefault("task_id", _name(rows[0].get("episode", numbers[0])))
    if "rollout_index" not in fields:
        fields["rollout_index"] = file.next_index(*(str(fields.get(key)) for key in _KEY))
    numbers, rows = _ordered(numbers, rows, "step_index" if shape == "steps" else "message_index")
    chat = _steps(numbers, rows) if shape == "steps" else _chat(numbers, rows, shape)
    if shape == "episodes":
        fields |= _with_extra(fields, rows[0], _MEANT[shape])
    try:
        record = msgspec.convert({"steps": []} | fields, EpisodeRecord, strict=False)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error))
        raise ShapeError(f"row {origins.get(field[1] if field else '', numbers[0])}: {error}") from error
    for key, value in chat.items():
        if value or key == "steps":
            setattr(record, key, value)
    for number, row in zip(numbers, rows, strict=True):
        if "scores" in row:
            with _named(number):
                record.scores = _scores(row["scores"])
            break
    return record


@contextmanager
def _named(number: int) -> Iterator[None]:
    """What is wrong is told with the number of the row."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ShapeError(f"row {number}: {explained(error)}") from error


def _of_steps(shape: Shape, *, is_keyed: bool) -> frozenset[str]:
    """Names that an episode has too, and that mean the step's."""
    if shape != "steps":
        return frozenset()
    return _STEP - {"agent_id"} if is_keyed else _STEP


def _fields(numbers: Sequence[int], rows: Sequence[_Row], names: frozenset[str]) -> tuple[_Row, dict[str, int]]:
    """Fields of an episode, each of the first row that has it, and which row that is."""
    fields: _Row = {}
    origins: dict[str, int] = {}
    for number, row in zip(numbers, rows, strict=True):
        for key in row.keys() & names - fields.keys():
            fields[key], origins[key] = row[key], number
    return fields, origins


def _name(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode()


def _ordered(numbers: Sequence[int], rows: Sequence[_Row], column: str) -> tuple[list[int], list[_Row]]:
    """The rows of an episode in their order, and their numbers."""
    if not any(column in row for row in rows):
        return list(numbers), list(rows)
    places: dict[int, tuple[int, _Row]] = {}
    for number, row in zip(numbers, rows, strict=True):
        with _named(number):
            try:
                place = msgspec.convert(row.get(column), int, strict=False)
            except msgspec.ValidationError:
                raise ShapeError(f"`{column}` is {row.get(column)!r}; valid: a whole number") from None
            if place in places:
                raise ShapeError(f"`{column}` is {place}, as in row {places[place][0]}; valid: each number once")
            places[place] = number, row
    ordered = [places[place] for place in sorted(places)]
    return [number for number, _ in ordered], [row for _, row in ordered]


def _with_extra(fields: _Row, row: _Row, known: frozenset[str]) -> _Row:
    """What a row has beyond what is known, as `extra`; nothing if there is nothing."""
    found = {key: value for key, value in row.items() if key not in known}
    return {"extra": fields.get("extra", {}) | found} if found else {}


def _steps(numbers: Sequence[int], rows: Sequence[_Row]) -> dict[str, Any]:
    steps = []
    for number, row in zip(numbers, rows, strict=True):
        with _named(number):
            fields = {"state": None} | {key: value for key, value in row.items() if key in _STEP}
            fields |= _with_extra(fields, row, _MEANT["steps"])
            steps.append(msgspec.convert(fields, StepRecord, strict=False))
    return {"steps": steps}


def _chat(numbers: Sequence[int], rows: Sequence[_Row], shape: Shape) -> dict[str, Any]:
    """A chat's fields of an episode."""
    if shape == "episodes":
        with _named(numbers[0]):
            messages, rewards = rows[0].get("messages"), rows[0].get("step_rewards")
            if not isinstance(messages, list):
                kind = type(messages).__name__
                raise ShapeError(f"`messages` is {kind}; valid: a list of messages, or JSON text of one")
            found = conversation(messages)
            if rewards is not None and (not isinstance(rewards, list) or len(rewards) != len(found.steps)):
                valid = f"valid: a number or null for each of {len(found.steps)} decisions"
                raise ShapeError(f"`step_rewards` is {rewards!r}; {valid}")
            numbers = [numbers[0]] * len(found.steps)
    else:
        messages = []
        for number, row in zip(numbers, rows, strict=True):
            kept = {key: value for key, value in row.items() if key in _OF_A_MESSAGE or key not in _NOT_OF_A_MESSAGE}
            with _named(number):
                messages.append(checked(kept, "message"))
        found = conversation(messages)
        rewards = [rows[place].get("reward") for place in found.places]
        numbers = [numbers[place] for place in found.places]
    for step, reward, number in zip(found.steps, rewards or (), numbers, strict=False):
        with _named(number):
            step.reward = _reward(reward)
    return {
        "steps": found.steps,
        "initial_messages": found.initial_messages,
        "final_observation": found.final_observation,
    }


def _reward(value: Any) -> float | None:
    try:
        return msgspec.convert(value, float | None, strict=False)
    except msgspec.ValidationError:
        raise ShapeError(f"a reward is {value!r}; valid: a number, or null if it is unknown") from None


def _scores(given: Any) -> list[ScoreRecord]:
    if isinstance(given, dict):
        given = [{"scorer": scorer, "value": value} for scorer, value in given.items()]
    return msgspec.convert(given, list[ScoreRecord], strict=False)


def _value(key: str, value: Any) -> Any:
    """A value, decoded where it is JSON text of a list or an object in a column that may hold one."""
    if isinstance(value, Unreadable):
        raise ShapeError(value)
    if key in _DOCUMENTS and isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return _decode(value)
        except msgspec.DecodeError as error:
            raise ShapeError(f"`{key}` is no JSON: {error}") from error
    if isinstance(value, float) and not isfinite(value):
        raise ShapeError(f"`{key}` is {value}; valid: a finite number, or NULL if it is unknown")
    return value
