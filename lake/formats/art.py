"""ART trajectory groups: `trajectories/{split}/{step}.parquet`, a row per trajectory.

.. code-block:: text

    group_index, group_metadata, group_metrics, group_logs        group; metadata names the task if it has one
    reward, metrics, metadata, tools, logs                        return and scores; tools; extra
    messages [{role, content, tool_calls, tool_call_id, trainable}]
    version 2 adds format_version, trajectory_index, group_json, and trajectory_json, which counts: messages_and_choices
    (a choice was sampled by the policy that is trained), additional_histories, exchanges, policy versions

Columns but `messages` and `logs` are JSON text. An assistant's message that is not trainable is a decision that is not
trained on. Siblings are the trajectories of a group; the task is the group's `task_id`, `scenario_id`, `task`,
`scenario`, `example_id`, `instance_id` or `id`, else the group's index. An additional history (a sub-agent's, say) is
an episode of its own without return, its relation `subagent`. The training step and the split stand in the names of the
file (`0005`) and its folder only, from which they are read; as each split counts its groups anew, the task of one that
is not trained on is called `TASK [SPLIT]`. In version 2 a group without trajectories is a row that holds none.

Versions: without a number (openpipe-art to 0.5.18, utils/trajectory_logging.py), and 2 (OpenPipe/ART after 0.5.18, in
the module whose schema carries `art.trajectory_parquet.version`). Of version 2, exchanges with chat completions are
read, and those with other APIs are not.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import Scores, finite, free_number, is_score_name, moment, number
from lake.formats.base.format import Format, above
from lake.formats.base.look import Look
from lake.formats.base.rows import (
    Item,
    ShapeError,
    UnsupportedError,
    episode_text_id,
    items_of,
    parquet_rows,
    rest,
)
from lake.formats.base.source import Input, stem
from lake.formats.chat.answers import tell
from lake.formats.chat.calls import Calls
from lake.formats.chat.chat_completions import completion
from lake.formats.chat.chat_messages import answered, chat_messages
from lake.formats.chat.messages import Conversation, Message
from lake.formats.chat.tokens import Lineage
from lake.records import EpisodeRecord, Int64

NAME = "art"
_TASKS = ("task_id", "scenario_id", "task", "scenario", "example_id", "instance_id", "id")
_SPLITS = ("train", "val", "test")
_GROUP = ("group_metadata", "group_metrics", "group_logs")
_decode = msgspec.json.Decoder().decode


class _History(msgspec.Struct, kw_only=True):
    messages_and_choices: list[Any] = []
    tools: list[Any] | None = None


class _Trajectory(_History, kw_only=True):
    additional_histories: list[_History] = []
    exchanges: dict[str, list[Any]] = {}
    reward: float | None = None
    initial_policy_version: Int64 | None = None
    metrics: dict[str, Any] = {}


class _Group(msgspec.Struct):
    metadata: dict[str, Any] = {}


class _Exchange(msgspec.Struct):
    """A request to a chat API and its response."""

    request: dict[str, Any]
    response: dict[str, Any]
    model: str | None = None
    start_time: str | None = None
    end_time: str | None = None


def recognise(look: Look) -> bool:
    """Whether a Parquet file has the columns of trajectory groups."""
    return look.kind == "parquet" and set(look.names).issuperset(
        ("group_index", "group_metadata", "reward", "messages")
    )


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with indices from 0."""
    for item in parquet_rows(file):
        yield from items_of(item, NAME, lambda row: to_records(row, file))


def to_records(row: dict[str, Any], file: Input) -> list[EpisodeRecord]:
    """A row as the episodes of its histories, the main one first; none of a group without trajectories.

    Raises:
        UnsupportedError: a version that is not known; exchanges with another API than that of chat completions.
        ShapeError, msgspec.ValidationError: a column or a message of the wrong shape.
    """
    version = row.get("format_version")
    if version not in (None, 2):
        raise UnsupportedError(
            f"`format_version` is {version}; known: 2, and files without one. Write it as one of these"
        )
    if version == 2:
        if row.get("trajectory_json") is None:
            return []
        value, group = _json(row, "trajectory_json", dict), _json(row, "group_json", dict)
    else:
        texts = {key: _json(row, key, list if key == "tools" else dict) for key in ("metrics", "metadata", "tools")}
        flat = {"messages_and_choices": row.get("messages"), "reward": row.get("reward"), "logs": row.get("logs")}
        value = {key: item for key, item in (texts | flat).items() if item}
        group = {key.removeprefix("group_"): item for key in _GROUP if (item := _json(row, key, dict))}
    trajectory = msgspec.convert(value, _Trajectory)
    reward = trajectory.reward if trajectory.reward is not None else number(row.get("reward"))
    metadata = msgspec.convert(group, _Group).metadata
    names = [metadata[key] for key in _TASKS if isinstance(metadata.get(key), str | int) and str(metadata[key]).strip()]
    task = str(names[0] if names else row["group_index"])
    scores = Scores()
    if reward is not None:
        scores.add("reward", reward)
    for key, score in trajectory.metrics.items():
        if is_score_name(key) and number(score) is not None:
            scores.add(key, score)
    chat = _exchanged(trajectory.exchanges) if trajectory.exchanges else _chat(trajectory)
    step, folder = stem(file.path), file.path.absolute().parent.name
    split = folder if folder in _SPLITS else None
    if split not in (None, "train"):
        task = f"{task} [{split}]"
    known = (*_History.__struct_fields__, "additional_histories", "exchanges", "reward", "initial_policy_version")
    extra = (rest(value, *known) or {}) | {"group": group | {"index": row["group_index"]}}
    record = EpisodeRecord(
        task_id=task,
        rollout_index=free_number(file, row.get("trajectory_index"), task),
        split=split,
        collection_round=int(step) if step.isdecimal() and len(step) < 10 else None,
        policy_version=trajectory.initial_policy_version,
        env_return=finite(reward),
        tools=trajectory.tools,
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
        scores=scores.records,
        source_version=None if version is None else str(version),
        extra=extra,
    )
    return [record, *_histories(record, trajectory, file)]


def _histories(record: EpisodeRecord, trajectory: _Trajectory, file: Input) -> Iterator[EpisodeRecord]:
    if not trajectory.additional_histories:
        return
    record.source_format = NAME  # its id depends on it
    parent = episode_text_id(record, file)
    for index, history in enumerate(trajectory.additional_histories, 1):
        chat = _chat(history)
        if not chat.steps:
            record.extra = (record.extra or {}) | {f"history {index}": history.messages_and_choices}
            continue
        yield EpisodeRecord(
            task_id=record.task_id,
            rollout_index=record.rollout_index,
            collection_round=record.collection_round,
            split=record.split,
            agent_id=f"history {index}",
            relation="subagent",
            parent_episode_id=parent,
            root_episode_id=parent,
            policy_version=record.policy_version,
            tools=history.tools,
            initial_messages=chat.initial_messages,
            final_observation=chat.final_observation,
            steps=chat.steps,
            source_version=record.source_version,
        )


def _chat(history: _History) -> Conversation:
    """The decisions of a history, which are trained on if they were sampled by the policy that is trained."""
    place = "messages_and_choices"
    chat = answered(chat_messages([_message(item) for item in history.messages_and_choices], place), place=place)
    for step in chat.steps:
        extra = step.extra or {}
        extra.pop("trainable", None)
        if isinstance(extra.get("finish_reason"), str):
            step.finish_reason = extra.pop("finish_reason")
        step.extra = extra or None
    return chat


def _message(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    if isinstance(item.get("message"), dict) and "finish_reason" in item:
        return {"role": "assistant"} | item["message"] | (rest(item, "message", "index") or {}) | {"trainable": True}
    if item.get("role") != "assistant":
        return rest(item, "trainable")
    return item if "trainable" in item else item | {"trainable": False}


def _exchanged(exchanges: dict[str, list[Any]]) -> Conversation:
    """The decisions of requests that each repeat their history, in the order of their times."""
    if others := [api for api, calls in exchanges.items() if calls and api != "chat_completions"]:
        raise UnsupportedError(f"`exchanges` are of {', '.join(others)}; known: chat_completions")
    given = msgspec.convert(exchanges.get("chat_completions"), list[_Exchange])
    calls, lineage = Calls(), Lineage()
    for index, exchange in enumerate(sorted(given, key=lambda exchange: exchange.start_time or "")):
        answer: Message | None = completion(exchange.response).message
        if answer is None:
            raise ShapeError(f"`exchanges.chat_completions[{index}].response` has no choice; valid: at least one")
        place = f"exchanges.chat_completions[{index}].request.messages"
        step = calls.add(chat_messages(exchange.request.get("messages"), place), answer, place=place)
        left = tell(step, exchange.response, lineage, index) or {}
        step.model = exchange.model or step.model
        begun, ended = moment(exchange.start_time), moment(exchange.end_time)
        step.started_at = begun or step.started_at
        step.latency = (ended - begun).total_seconds() if begun and ended else None
        more = {"request": rest(exchange.request, "messages", "model", "stream"), "response": left}
        step.extra = (step.extra or {}) | {key: item for key, item in more.items() if item} or None
    return Conversation(initial_messages=calls.initial_messages, steps=calls.steps)


def _json(row: dict[str, Any], key: str, kind: type) -> Any:
    """What a column of JSON text says; a list of logs is no text."""
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = _decode(value)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ShapeError(f"`{key}` is no JSON: {error}") from error
    if value is None or isinstance(value, kind) or key.endswith("logs"):
        return value
    raise ShapeError(f"`{key}` is JSON of {type(value).__name__}; valid: {kind.__name__}")


FORMAT = Format(
    NAME, "ART trajectory groups (Parquet)", recognise, read, run_folder=above("train|val|test|trajectories")
)
