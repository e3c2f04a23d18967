"""Chats that models are trained on: Hugging Face and OpenAI `messages`, TRL, LLaMA-Factory, Alpaca, Anthropic HH.

.. code-block:: text

    {messages: [{role, content, tool_calls?, ...}], tools?}     one episode; also `conversation(s)`, JSON text of a list
    {prompt, completion}                                        one episode; text or messages; also `response`
    {instruction, input?, system?, history?, output}            the same (Alpaca)
    {prompt?, chosen, rejected}                                 two siblings, 0 chosen and 1 rejected, with the score
    {chosen_messages, rejected_messages}                        `preference` 1 and 0; text or messages
    {..., label: true}                                          the score `label` (KTO); also `kto_tag`

JSON Lines, a JSON array, one object, or Parquet; `lake.formats.chat_rows` says more of the forms and their sources.

Decisions are what an assistant completed: what it says in a prompt, and what chosen and rejected share, is history. A
message of weight 0 (`weight`, `loss_weight`, `train`) is a decision that is not trained on.

The task is the file's column of ids (of `task_id`, `prompt_id`, `example_id`, `id`, `conversation_id`, `uuid` the first
that its first row has), and rows of an id are siblings; without one it is the row's position. `reward`, `score`,
`rating`, `rewards` and `scores` (objects of several) are scores, of a pair also `score_chosen` or `chosen_score`: rows
do not say that an environment gave them.
"""

from collections.abc import Callable, Iterator
from typing import Any

from lake import ids
from lake.formats.base.fields import Scores, as_object, as_text, number, whole
from lake.formats.base.format import Format
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, items_of, rest, values
from lake.formats.base.source import Input
from lake.formats.chat.chat_messages import answered, chat_messages, decoded
from lake.formats.chat.messages import Conversation
from lake.formats.chat_rows import ANSWERS, CHATS, PAIRS, SIDES, chats_of
from lake.records import EpisodeRecord, Reject

NAME = "messages"
IDS = ("task_id", "prompt_id", "example_id", "id", "conversation_id", "uuid")
_OURS = frozenset(("id", "run_id", "task_id", "rollout_index", "messages", "prompt_messages"))
"""Columns of our own export (`lake.export.chats`)."""
_SCORES = ("reward", "score", "rating", "label", "kto_tag", "rewards", "scores")
_OTHERS = frozenset(
    # Keys of rows of other formats that have messages or prompts too.
    (
        *("steps", "traj", "trajectory", "trajectory_format", "trajectory_id", "simulations", "samples", "events"),
        *("spans", "trace", "trace_id", "rollout", "rollout_id", "rollout_status", "input_metadata", "env_index"),
        *("evaluation_result", "execution_metadata", "eval_metadata", "generation_ms", "total_ms", "transcripts"),
        *("responses_create_params", "group_index", "exit_status", "sessionId", "kwargs"),
    )
)


def recognise(look: Look) -> bool:
    """Whether rows have chat messages, or a prompt and what answers it, and no mark of another format."""
    if look.kind == "parquet":
        names, inner = set(look.names), leaves(look)
        chats = bool(names.intersection(CHATS)) and not {"from", "value"} <= inner
        pairs = any(names.issuperset(pair) for pair in PAIRS) and not {"from", "value"} <= inner
        answers = ("prompt" in names and bool(names.intersection(ANSWERS))) or {"instruction", "output"} <= names
        return (chats or pairs or answers) and not names & (_OTHERS | {"step"})
    return any(
        _is_row(value) and not value.keys() & _OTHERS and not isinstance(value.get("response"), dict)
        for value in look.objects
    )


def leaves(look: Look) -> frozenset[str]:
    """The names of the fields inside the columns of a Parquet file, at any depth."""
    import pyarrow.parquet as pq

    try:
        waiting = [field.type for field in pq.read_schema(look.path)]
    except (OSError, ValueError):
        return frozenset()
    found: set[str] = set()
    while waiting:
        inner = [kind.field(place) for kind in [waiting.pop()] for place in range(kind.num_fields)]
        found.update(field.name for field in inner)
        waiting += [field.type for field in inner]
    return frozenset(found)


def _is_row(value: dict[str, Any]) -> bool:
    if "role" in value and value.keys() >= {"content"} and all(inner is None for inner in value.values()):
        return any(key in value for key in (*CHATS, *PAIRS[0]))  # of a damaged document, only the keys are known
    if any(_is_chat(value.get(key)) for key in CHATS):
        return True
    for pair in PAIRS:
        first, second = (value.get(key) for key in pair)
        if first is not None and type(first) is type(second) and (isinstance(first, str) or _is_chat(first)):
            return True
    has_prompt = isinstance(prompt := value.get("prompt"), str) or _is_chat(prompt)
    if has_prompt and any(isinstance(value.get(key), str) or _is_chat(value.get(key)) for key in ANSWERS):
        return True
    return isinstance(value.get("instruction"), str) and isinstance(value.get("output"), str)


def _is_chat(value: Any) -> bool:
    if isinstance(value, str):
        return value.lstrip().startswith("[{") and '"role"' in value
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and isinstance(first.get("role"), str)


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file: line numbers from 1, else indices from 0."""
    return read_rows(file, NAME, lambda row: row)


def read_rows(file: Input, name: str, to_row: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[Item]:
    """Records and rejects of a file of the format `name`, whose rows `to_row` brings into the form of this one."""
    for item in values(file):
        place = 0 if isinstance(item, Reject) else item.index

        def convert(row: Any, place: int = place) -> list[EpisodeRecord]:
            if not isinstance(row, dict):
                raise ShapeError(f"Expected `object`, got `{type(row).__name__}`")
            return to_records(to_row(row), place, file)

        yield from items_of(item, name, convert)


def to_records(row: dict[str, Any], place: int, file: Input) -> list[EpisodeRecord]:
    """The episodes of a row: one, or the two of a pair. `place` is its position in the file.

    Raises:
        ShapeError, msgspec.ValidationError: a message of the wrong shape; a row that is of none of the forms.
    """
    if _OURS.issubset(row) and isinstance(row["id"], str) and ids.is_text(row["id"]):
        return [_exported(row)]
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
        task_id=row["task_id"],
        run_id=as_text(row["run_id"]),
        rollout_index=whole(row["rollout_index"]) or 0,
        env_return=number(row.get("reward")),
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
    )
    given, further = (
        decoded(value) if isinstance(value := row.get(key), str) else value for key in ("scores", "further")
    )
    scores = Scores()
    for name, score in as_object(given).items():
        scores.add(name, score)
    left = rest(row, *_OURS, "reward", "scores", "advantages", "further") or {}
    _tell(record, left | as_object(further), scores)
    record.scores = scores.records
    return record


def _record(
    row: dict[str, Any], chat: Conversation, place: int, file: Input, known: list[str], side: str | None
) -> EpisodeRecord:
    task, column = _task(row, place, file)
    record = EpisodeRecord(
        task_id=task,
        rollout_index=file.next_index(task) if file.memory["ids"] else int(side == "rejected"),
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
    )
    left = rest(row, *known, column) or {}
    scores = Scores()
    if side is not None:
        left = _of_side(left, side)
        scores.add("preference", side == "chosen")
    if left:
        _tell(record, left, scores)
    record.scores = scores.records
    return record


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
    for key in _SCORES:
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
    for key, field in (("model", "policy"), ("split", "split")):
        if isinstance(left.get(key), str):
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


FORMAT = Format(NAME, "chat messages, prompts and answers, preferences", recognise, read)
