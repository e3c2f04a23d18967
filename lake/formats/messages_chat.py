"""Chats that models are trained on: OpenAI's `messages`, TRL, LLaMA-Factory, ms-swift, Alpaca, Gemini, Anthropic HH.

.. code-block:: text

    {messages: [{role, content, tool_calls?, ...}], tools?}     one episode; also `conversation(s)`, `contents`,
                                                                `trajectory`; JSON text of a list
    {prompt, completion}                                        one episode; text or messages; also `query` or
                                                                `question`, and `response` or `output`
    {instruction, input?, system?, history?, output}            the same (Alpaca); also `context` and `response`
    {prompt?, chosen, rejected}                                 two siblings, 0 chosen and 1 rejected, with the score
    {chosen_messages, rejected_messages}                        `preference` 1 and 0; text or messages
    {input, preferred_output, non_preferred_output}             the same (OpenAI)
    {messages, rejected_response or rejected_messages}          the same (ms-swift); also {query, response,
                                                                rejected_response}, {instruction, output: [two texts]}
    {..., label: true}                                          the score `label` (KTO); also `kto_tag`

JSON Lines, a JSON array, one object, or Parquet; `lake.formats.chat.data_rows` says more of the forms and sources.

Decisions are what an assistant completed: what it says in a prompt, and what chosen and rejected share, is history. A
message of weight 0 (`weight`, `loss_weight`, `train`, `loss`) is a decision that is not trained on.

The task is the file's column of ids (of `task_id`, `prompt_id`, `example_id`, `instance_id`, `id`, `conversation_id`,
`conversation_hash`, `uuid` the first that its first row has), and rows of an id are siblings; without one it is the
row's number, from 1. `reward`, `score`, `rating`, `resolved`, `rewards` and `scores` (objects of several) are scores,
of a pair also `score_chosen` or `chosen_score`: rows do not say that an environment gave them.

A row of our own export says which episode it is of (`lake.formats.chat.exported_rows`); of its one step, its agent.

The same rows are the same episodes, whatever file holds them. Parquet does not tell a null inside an object from a key
that is missing, so nulls are left out of all of them, but for arguments of calls, tools and scores.
"""

from collections.abc import Callable, Iterator
from typing import Any

from lake.formats.base.fields import Scores, as_object, number, whole
from lake.formats.base.format import Format
from lake.formats.base.json_array import Element
from lake.formats.base.rows import Item, ShapeError, items_of, rest, values
from lake.formats.base.source import Input
from lake.formats.chat.chat_messages import answered, chat_messages, decoded
from lake.formats.chat.data_files import SCORES, no_trajectory, recognise
from lake.formats.chat.data_rows import SIDES, chats_of, spelled
from lake.formats.chat.exported_rows import CALLED, NAMES, names_its_episode, outcome_columns, return_of, tell_its_name
from lake.formats.chat.messages import Conversation
from lake.records import EpisodeRecord

NAME = "messages"
IDS = ("task_id", "prompt_id", "example_id", "instance_id", "id", "conversation_id", "conversation_hash", "uuid")
_OURS = frozenset((*NAMES, "messages", "prompt_messages"))
"""Columns of our own export (`lake.export.chats`)."""
_EXACT = frozenset(("arguments", "tools", "functions", "rewards", "scores"))
"""Keys whose values stay as they are: a null there is what a model wrote or read, or a score that was not given."""


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file: line numbers from 1, else indices from 0."""
    return read_rows(file, NAME, lambda row: row)


def read_rows(file: Input, name: str, to_row: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[Item]:
    """Records and rejects of a file of the format `name`, whose rows `to_row` brings into the form of this one."""
    for place, item in enumerate(values(file), 1):
        may_have_nulls = isinstance(item, Element) and not (
            isinstance(item.source, bytes) and b"null" not in item.source
        )

        def convert(row: Any, place: int = place, may_have_nulls: bool = may_have_nulls) -> list[EpisodeRecord]:
            if not isinstance(row, dict):
                raise ShapeError(f"Expected `object`, got `{type(row).__name__}`")
            return to_records(to_row(_without_nulls(row) if may_have_nulls else row), place, file)

        yield from items_of(item, name, convert)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None}
        return {key: item if key in _EXACT else _without_nulls(item) for key, item in kept.items()}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def to_records(row: dict[str, Any], place: int, file: Input) -> list[EpisodeRecord]:
    """The episodes of a row: one, or the two of a pair. `place` is the row's number in the file, from 1.

    Raises:
        ShapeError, msgspec.ValidationError: a message of the wrong shape; a row that is of none of the forms.
    """
    if _OURS.issubset(row) and names_its_episode(row):
        return [_exported(row)]
    row = spelled(row)
    found = chats_of(row)
    sides = SIDES if len(found.chats) > 1 else (None,)
    return [_record(row, chat, place, file, found.known, side) for side, chat in zip(sides, found.chats, strict=True)]


def _exported(row: dict[str, Any]) -> EpisodeRecord:
    """The episode of a row of our own export, which says what it is called, and where its decisions begin.

    Raises:
        ShapeError: a message of the wrong shape.
    """
    chat = answered(chat_messages(row["messages"], "messages"), whole(row["prompt_messages"]) or 0, place="messages")
    record = EpisodeRecord(
        task_id="",
        env_return=number(return_of(row, "reward")),
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
    )
    tell_its_name(record, row)
    given, further = (
        decoded(value) if isinstance(value := row.get(key), str) else value for key in ("scores", "further")
    )
    scores = Scores()
    for name, score in as_object(given).items():
        scores.add(name, score)
    ours = (*_OURS, *CALLED, *outcome_columns(row), "reward", "scores", "advantages", "further")
    left = rest(row, *ours) or {}
    _tell(record, left | as_object(further), scores)
    record.scores = scores.records
    return record


def _record(
    row: dict[str, Any], chat: Conversation, place: int, file: Input, known: list[str], side: str | None
) -> EpisodeRecord:
    record = EpisodeRecord(
        task_id="",
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
    )
    left = rest(row, *known) or {}
    scores = Scores()
    if side is not None:
        left = _of_side(left, side)
        scores.add("preference", side == "chosen")
    if names_its_episode(left):
        _tell_origin(record, left)
    else:
        record.task_id, column = _task(row, place, file)
        left.pop(column, None)
        is_counted = bool(file.memory["ids"])
        record.rollout_index = file.next_index(record.task_id) if is_counted else int(side == "rejected")
    if left:
        _tell(record, left, scores)
    record.scores = scores.records
    return record


def _tell_origin(record: EpisodeRecord, left: dict[str, Any]) -> None:
    """Tell a record which episode, or which step of one, a row of our own export is, and take that out of it."""
    tell_its_name(record, left)
    for name in CALLED:
        left.pop(name, None)
    if (index := whole(left.pop("step_index", left.pop("step", None)))) is not None:
        record.agent_id = " ".join(filter(None, (record.agent_id, f"step {index}")))
        left.pop("advantage", None)
        if record.steps:
            record.steps[-1].reward = number(left.pop("step_reward", None))
        # The row's reward is that of the whole episode, of which the decision is one.
        record.env_return = number(return_of(left, "reward"))
        for name in ("reward", *outcome_columns(left)):
            left.pop(name, None)


def _task(row: dict[str, Any], place: int, file: Input) -> tuple[str, str]:
    """The task of a row, and the column that names it, empty if none does."""
    column: str | None = file.memory.get("ids")
    if column is None:
        column = file.memory["ids"] = next((key for key in IDS if _is_name(row.get(key))), "")
    if not column:
        return str(place), ""
    return (str(row[column]), column) if _is_name(row.get(column)) else (f"row {place}", "")


def _tell(record: EpisodeRecord, left: dict[str, Any], scores: Scores) -> None:
    """Tell a record the fields of its row that are no chat."""
    for key in SCORES:
        value = left.get(key)
        if key in ("rewards", "scores") and isinstance(value, dict):
            for name, score in left.pop(key).items():
                scores.add(name, score)
        elif number(value) is not None and (key != "label" or value in (0, 1)):
            scores.add(key, left.pop(key))
    for key in ("tools", "functions"):
        value = left.get(key)
        tools = decoded(value) if isinstance(value, str) else value
        if isinstance(tools, list) and record.tools is None:
            record.tools = tools
            del left[key]
    for key, field in (("model", "policy"), ("model_name", "policy"), ("split", "split")):
        if isinstance(left.get(key), str) and getattr(record, field) is None:
            setattr(record, field, left.pop(key))
    record.ground_truth = left.pop("ground_truth", None)
    record.extra = left or None


def _is_name(value: Any) -> bool:
    return (isinstance(value, str) and bool(value.strip())) or (isinstance(value, int) and not isinstance(value, bool))


def _of_side(fields: dict[str, Any], side: str) -> dict[str, Any]:
    """The fields of a pair that are said of one side or of both, those of one under their common name."""
    found: dict[str, Any] = {}
    for key, value in fields.items():
        names = [name for name in SIDES if name in key]
        if names == [side]:
            common = key.replace(side, "").strip("_-. ")
            found[common if common and common not in fields else key] = value
        elif len(names) != 1:
            found[key] = value
    return found


FORMAT = Format(NAME, "chat messages, prompts and answers, preferences", recognise, read, no_trajectory)
