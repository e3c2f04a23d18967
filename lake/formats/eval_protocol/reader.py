"""eval-protocol: its evaluation rows, as lines, arrays or in its SQLite log, and its playback files.

An `EvaluationRow` is an episode: {messages, tools, input_metadata{row_id, completion_params, dataset_info},
rollout_status, ground_truth, evaluation_result, execution_metadata, eval_metadata, created_at}. The tool writes them to
`.eval_protocol/logs.db` (table evaluationrow, one JSON text a rollout, overwritten as it goes on) and to
`.eval_protocol/datasets/DATE.jsonl`; a table of them has them as text in `data_json`. A decision is an assistant
message; one of `weight` 0 is not trained on.

The task is `row_id`, which the runs of a row share (a hash of what precedes the first decision, where there is none);
the sibling number is made of the rollout's id. The tool calls each repetition of a data set a run of its own, so a run
of a lake is its experiment: the repetitions of one policy. Where no evaluation gave ids (a row without `run_id`), they
name no run.

Rewards: those of `control_plane_step`, which stands on the message that ended a step (in recordings of 2025, of the
`metadata` of a tool's answer), are the environment's; they belong to the decision at or before it, and their sum is
`env_return`. So do `step_rewards` of OpenEnv rollouts, one for each decision. `evaluation_result` is a scorer's: its
score under the evaluation's name (`evaluation_result` if it has none), every metric under its own, `step_outputs` by
the index of the assistant's turn. A score that is marked as invalid is none.

Rows of 2025 have `rollout_status` {status: "finished"} and their ids at the top. A playback line {env_index, step,
messages} repeats the whole conversation so far: the last line of a recording of an `env_index` counts, and a step that
does not come after the one before it begins the next recording.

Source: the eval-protocol package, 0.3.33 (models.py, dataset_logger, mcp/execution, tracing).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from lake import ids
from lake.formats.base.fields import as_object, as_text, moment, number, sibling_number, whole
from lake.formats.base.format import Format, above
from lake.formats.base.json_array import Element
from lake.formats.base.json_faults import Rewriter, not_a_number, repeated_key
from lake.formats.base.look import Look, look_or_other
from lake.formats.base.rows import Item, converted, items_of, line_values, rest, values
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input
from lake.formats.base.sqlite_rows import table_rows
from lake.formats.chat.messages import Conversation, conversation, tool_call
from lake.formats.eval_protocol.outcomes import Result, ending, rewards, scores, terminated
from lake.formats.eval_protocol.rows import OURS, with_spelling
from lake.formats.eval_protocol.tokens import add_tokens
from lake.records import EpisodeRecord, Reject, excerpt

NAME = "eval_protocol"
_TABLE = "evaluationrow"
_MARKS = ("input_metadata", "evaluation_result", "rollout_status", "execution_metadata", "eval_metadata")


class _Row(msgspec.Struct):
    """What has to be of its type in a row."""

    messages: list[Any]
    tools: list[Any] | None = None
    input_metadata: dict[str, Any] | None = None
    rollout_status: dict[str, Any] | None = None
    evaluation_result: Result | None = None
    execution_metadata: dict[str, Any] | None = None
    eval_metadata: dict[str, Any] | None = None


class _Line(msgspec.Struct):
    """A line of a playback file."""

    env_index: int | str
    step: int
    messages: list[Any]


def recognise(look: Look) -> bool:
    """Whether a file has rows with the tool's metadata, lines of a playback, or the table of its log."""
    if look.kind == "sqlite":
        return _TABLE in look.names
    if look.kind == "parquet":
        return {"data_json", "row_id", "message_count"} <= set(look.names)
    is_row = any("messages" in value and any(key in value for key in _MARKS) for value in look.objects)
    return is_row or look.has("env_index", "step", "messages") or look.has("data_json", "row_id", "message_count")


def no_trajectory(look: Look) -> str | None:
    """What the tool's data sets are, and its lists of scores."""
    if look.has("user_prompt_template", "environment_context"):
        return "it is a data set of eval-protocol: what rollouts begin with; ingest the rows or recordings of rollouts"
    if look.has("success_rate", "num_rollouts", "avg_score"):
        return "it sums up scores of eval-protocol without its rollouts; ingest the rows or recordings that they are of"
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file: line numbers from 1, else indices from 0."""
    seen = look_or_other(file.path)
    if seen.has("env_index", "step", "messages"):
        yield from _playback(file)
    else:
        items = _logged(file) if seen.kind == "sqlite" else values(file)
        yield from converted(items, NAME, lambda value: [to_record(value, file)])


def _logged(file: Input) -> Iterator[Element | Reject]:
    """The rows of the tool's SQLite log."""
    rewriter, decode = Rewriter(), msgspec.json.Decoder().decode
    for item in table_rows(file, _TABLE, "data"):
        if isinstance(item, Reject):
            yield item
            continue
        index, text = item
        try:
            value = decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raw = excerpt(text.decode("utf-8", errors="backslashreplace"))
            message = not_a_number(text) or f"`data` is not JSON: {error}"
            yield Reject(position=index, reason="malformed", message=message, raw=raw)
            continue
        is_plain, may_repeat = rewriter.compared(text, value)
        yield Element(index, value, repeated_key(text) if may_repeat else None, is_plain, text)


def _playback(file: Input) -> Iterator[Item]:
    """The last line of every recording. The file is read twice, so that no line has to be kept."""
    wanted: dict[int, int] = {}
    newest: dict[str, tuple[int, int, int]] = {}
    for item in line_values(Input(file.path, file.run_id)):
        try:
            line = msgspec.convert(None if isinstance(item, Reject) or item.problem else item.value, _Line)
            _conversation(line.messages)
        except (ValueError, RecursionError):
            continue  # said when it is read again
        assert isinstance(item, Element)
        recording, step, place = newest.get(str(line.env_index), (0, -1, 0))
        if line.step > step:
            wanted.pop(place, None)
        else:
            recording += 1
        newest[str(line.env_index)] = recording, line.step, item.index
        wanted[item.index] = recording
    for item in line_values(file):
        number_of = None if isinstance(item, Reject) else wanted.get(item.index)
        yield from items_of(item, NAME, partial(_recorded, recording=number_of))


def _recorded(value: Any, recording: int | None) -> list[EpisodeRecord]:
    """A line of a playback as an episode; none if a later line repeats it."""
    line = msgspec.convert(value, _Line)
    if recording is None:
        return []
    chat = _conversation(line.messages)
    env_return = rewards(line.messages, chat, {})
    status, reason, error = ending(None, line.messages, is_scored=False)
    return [
        EpisodeRecord(
            task_id=str(line.env_index),
            rollout_index=recording,
            status=status,
            terminated=terminated(line.messages, reason),
            stop_reason=reason,
            error=error,
            env_return=env_return,
            initial_messages=chat.initial_messages,
            final_observation=chat.final_observation,
            steps=chat.steps,
            extra=rest(value, "env_index", "messages"),
        )
    ]


def to_record(value: Any, file: Input) -> EpisodeRecord:
    """One row as an episode.

    Raises:
        msgspec.ValidationError: wrong keys or types.
        ShapeError: a message that has no role, or whose content is no text.
    """
    if isinstance(value, dict) and isinstance(text := value.get("data_json"), str):
        value = msgspec.json.decode(text)
    value = _without_ours(value)
    row = msgspec.convert(value, _Row)
    given, execution = dict(value), dict(row.execution_metadata or {})
    about, evaluation = row.input_metadata or {}, row.eval_metadata or {}
    chat = _conversation(row.messages)
    add_tokens(chat.steps, given, execution)
    env_return = rewards(row.messages, chat, execution["extra"])
    parameters = dict(as_object(without_secrets(about.get("completion_params"))))
    usage, cost = as_object(execution.get("usage")), as_object(execution.get("cost_metrics"))
    task_id = as_text(about.get("row_id")) or _hash(row.messages[: chat.places[0]] if chat.places else row.messages)
    rollout_id, run_id, experiment = (
        as_text(execution.get(key)) or as_text(value.get(key)) for key in ("rollout_id", "run_id", "experiment_id")
    )
    run = (experiment or as_text(value.get("cohort_id")) or run_id) if run_id else None
    status, reason, error = ending(row.rollout_status, row.messages, is_scored=row.evaluation_result is not None)
    if chat.steps and chat.steps[-1].finish_reason is None:
        chat.steps[-1].finish_reason = as_text(execution.get("finish_reason"))
    name = as_text(evaluation.get("name"))
    given_scores, left = scores(row.evaluation_result, as_object(value.get("evaluation_result")), name, len(chat.steps))
    kept = {
        "evaluation_result": left,
        "execution_metadata": {key: item for key, item in execution.items() if item not in (None, {}, [])},
        "input_metadata": rest(about, "row_id", "completion_params"),
    }
    known = ("messages", "tools", "ground_truth", "created_at", "evaluation_result", "execution_metadata")
    record = EpisodeRecord(
        task_id=task_id,
        run_id=run,
        rollout_index=sibling_number(rollout_id) if rollout_id else file.next_index(run, task_id),
        environment=name,
        policy=as_text(parameters.pop("model", None)),
        sampling=parameters or None,
        seed=whole(as_object(about.get("dataset_info")).get("seed")),
        expected_group_size=whole(evaluation.get("num_runs")),
        tools=row.tools,
        ground_truth=value.get("ground_truth"),
        status=status,
        terminated=terminated(row.messages, reason),
        stop_reason=reason,
        error=error,
        env_return=env_return,
        scores=given_scores,
        started_at=moment(value.get("created_at")),
        prompt_tokens=whole(usage.get("prompt_tokens")),
        completion_tokens=whole(usage.get("completion_tokens")),
        cost=number(cost.get("total_cost_dollar")),
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
        extra={**(rest(given, *known, "input_metadata") or {}), **{k: v for k, v in kept.items() if v}} or None,
    )
    if "completion_params" in about:
        public = about | {"completion_params": without_secrets(about["completion_params"])}
        value = value | {"input_metadata": public}
    return with_spelling(record, value)


def _without_ours(value: Any) -> Any:
    """A row without what our own export added to it."""
    execution = as_object(as_object(value).get("execution_metadata"))
    if OURS not in as_object(execution.get("extra")):
        return value
    extra = {key: item for key, item in execution["extra"].items() if key != OURS}
    left = {key: item for key, item in execution.items() if key != "extra"} | ({"extra": extra} if extra else {})
    return value | {"execution_metadata": left}


def _conversation(messages: list[Any]) -> Conversation:
    chat = conversation([_message(message) for message in messages])
    for step in chat.steps:
        if step.extra and step.extra.get("weight") in (0, 1):
            step.trainable = step.extra.pop("weight") != 0
            step.extra = step.extra or None
    return chat


def _message(given: Any) -> Any:
    """A message without what says nothing, its call in the form of today."""
    if not isinstance(given, dict):
        return given
    message = {key: value for key, value in given.items() if value is not None or key == "content"}
    if isinstance(call := message.get("function_call"), dict) and not message.get("tool_calls"):
        del message["function_call"]
        message["tool_calls"] = [tool_call(str(call.get("name")), call.get("arguments"))]
    return message


def _hash(messages: list[Any]) -> str:
    return ids.to_text(ids.bytes_hash(msgspec.json.encode(messages)))


FORMAT = Format(
    NAME,
    "eval-protocol rows, its log and its playback files",
    recognise,
    read,
    no_trajectory,
    is_whole=True,
    run_folder=above(r"\.?eval_protocol|datasets"),
)
