"""The row that an episode of eval-protocol was read from, made again of the record.

A record does not tell how a row spelled what it says: a null, a time, the place and the packing of tokens. So the row
that is made of it is compared with the one that was read, and where they differ, what was read is kept:
`extra.as_read` is a list of [path, value], or [path] for what was not there. Keys of APIs are in neither.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from lake.formats.chat.messages import Message
from lake.formats.eval_protocol.outcomes import control_of
from lake.records import EpisodeRecord, ScoreRecord, StepRecord

Row = dict[str, Any]
AS_READ = "as_read"
OURS = "trajlake"
"""Key of `execution_metadata.extra` under which our own export says what the tool has no place for; not read back."""
_DEFAULT_SCORER = "evaluation_result"
_OF_THE_RESULT = ("agg_score", "standard_error")
_PARTS = ("evaluation_result", "execution_metadata", "input_metadata", AS_READ)


def row_of(record: EpisodeRecord, scores: Sequence[ScoreRecord]) -> Row:
    """The row of a record that was read from one, with the scores that stood in it."""
    extra = record.extra or {}
    row = _row(record, scores)
    for path, *value in extra.get(AS_READ, ()):
        _put(row, path, value)
    return row


def with_spelling(record: EpisodeRecord, value: Row) -> EpisodeRecord:
    """The record, with what it takes to make the row `value` of it that it was read from."""
    if changes := list(_differences(_row(record, record.scores), value)):
        record.extra = (record.extra or {}) | {AS_READ: changes}
    return record


def _row(record: EpisodeRecord, scores: Sequence[ScoreRecord]) -> Row:
    extra = record.extra or {}
    parameters = ({} if record.policy is None else {"model": record.policy}) | (record.sampling or {})
    execution = dict(extra.get("execution_metadata") or {})
    if of_tokens := tokens_of(record.steps):
        execution["extra"] = dict(execution.get("extra") or {}) | of_tokens
    rewards = [step.reward for step in record.steps]
    messages = messages_of(record)
    if any(reward is not None for reward in rewards) and not any(map(control_of, messages)):
        execution["extra"] = dict(execution.get("extra") or {}) | {"step_rewards": rewards}
    about = {"row_id": record.task_id, "completion_params": parameters}
    row = {
        "messages": messages,
        "tools": record.tools,
        "input_metadata": about | (extra.get("input_metadata") or {}),
        "ground_truth": record.ground_truth,
        "evaluation_result": _result(record, scores),
        "execution_metadata": execution,
        "created_at": None if record.started_at is None else msgspec.to_builtins(record.started_at),
    }
    row |= {key: value for key, value in extra.items() if key not in _PARTS}
    return {key: value for key, value in row.items() if value is not None}


def messages_of(record: EpisodeRecord) -> list[Message]:
    """The messages of a row."""
    messages = list(record.initial_messages or ())
    for step in record.steps:
        messages += step.context
        message: Message = {"role": "assistant", "content": step.action}
        message |= {"reasoning_content": step.reasoning, "tool_calls": step.tool_calls}
        message |= {key: value for key, value in (step.extra or {}).items() if key != "payload"}
        if not step.trainable:
            message["weight"] = 0
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages + (record.final_observation or [])


def _result(record: EpisodeRecord, scores: Sequence[ScoreRecord]) -> Row | None:
    left = (record.extra or {}).get("evaluation_result") or {}
    if not scores and not left:
        return None
    name = (record.environment or _DEFAULT_SCORER).replace("@", "_").strip()
    result: Row = {}
    metrics: Row = {}
    outputs = []
    for score in sorted(scores, key=lambda one: (-1 if one.step_index is None else one.step_index, one.scorer)):
        if score.step_index is not None:
            about: Row = {
                "step_index": score.step_index,
                "base_reward": score.value,
                "terminated": False,
                "metrics": {},
            }
            outputs.append(about | {"reason": score.reason} | (score.metrics or {}))
        elif score.scorer == name:
            said = _said(score)
            data = said.pop("data")
            result = said | {key: data[key] for key in _OF_THE_RESULT if key in data}
        else:
            metrics[score.scorer] = _said(score)
    outputs += left.get("step_outputs", ())
    result |= {"metrics": metrics, "step_outputs": outputs or None}
    result |= {key: value for key, value in left.items() if key != "step_outputs"}
    return {key: _known(value) for key, value in result.items() if value is not None}


def _said(score: ScoreRecord) -> Row:
    """A score as it stands in a row."""
    data = dict(score.metrics or {})
    is_valid = data.pop("is_score_valid", True)
    given = data.pop("score", None) if not is_valid else data.pop("value", None) if score.value is None else score.value
    return {"score": given, "is_score_valid": is_valid, "reason": score.reason, "error": score.error, "data": data}


def _known(value: Any) -> Any:
    """A value without the nulls that the tool leaves out: of metrics, and of what is said of a step."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if item is not None}
    return [_known(item) for item in value] if isinstance(value, list) else value


def tokens_of(steps: Sequence[StepRecord]) -> Row:
    """The exact tokens, where the tool's rollouts write them."""
    turns = []
    ends: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        payload: Row = dict((step.extra or {}).get("payload") or {})
        if (tokens := step.tokens) is not None:
            prefix = tokens.prefix_step_index
            start = prefix if isinstance(prefix, int) else index - 1 if prefix is not None and index else None
            prompt = [*(ends[start] if start is not None else ()), *tokens.context_ids]
            ends[index] = [*prompt, *tokens.action_ids]
            payload |= {"prompt_token_ids": prompt, "completion_token_ids": tokens.action_ids}
            if tokens.action_logprobs is not None:
                payload["completion_logprobs"] = [_double(value) for value in tokens.action_logprobs]
        if payload:
            turns.append({"assistant_turn_index": index} | payload)
    if len(steps) == 1 and turns:
        return {key: value for key, value in turns[0].items() if key != "assistant_turn_index"}
    return {"assistant_turn_payloads": turns} if turns else {}


def _double(value: float) -> float:
    """A log-probability as it comes back out of a table: engines print those of float32 with all digits of a double."""
    import numpy as np

    return float(np.float32(value))


def _differences(ours: Any, theirs: Any) -> Iterable[list[Any]]:
    """How to make one value of another."""
    waiting: list[tuple[list[str | int], Any, Any]] = [([], ours, theirs)]
    while waiting:
        path, mine, other = waiting.pop()
        if isinstance(mine, dict) and isinstance(other, dict):
            yield from ([[*path, key]] for key in mine if key not in other)
            yield from ([[*path, key], other[key]] for key in other if key not in mine)
            waiting += [([*path, key], mine[key], other[key]) for key in mine if key in other]
        elif isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other) and _is_deep(other):
            waiting += [([*path, place], mine[place], other[place]) for place in range(len(mine))]
        elif type(mine) is not type(other) or msgspec.json.encode(mine) != msgspec.json.encode(other):
            yield [path, other]


def _is_deep(values: list[Any]) -> bool:
    return any(isinstance(value, dict | list) for value in values)


def _put(row: Any, path: Sequence[str | int], value: Sequence[Any]) -> None:
    """Change one place of a row, or take it out. Raises KeyError, TypeError, ...: there is no such place."""
    for key in path[:-1]:
        row = row[key]
    if isinstance(row, dict) and not isinstance(path[-1], str):
        raise TypeError(f"{path[-1]!r} is no key")
    if value:
        row[path[-1]] = value[0]
    else:
        del row[path[-1]]
