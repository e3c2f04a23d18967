"""eval-protocol: its rows, as JSON Lines or in the table of its log, `logs.db`.

An episode that was read from a row is written as that row was, without keys of APIs
(`lake.formats.eval_protocol.rows`). Of any other, and of one from a playback, an `EvaluationRow` is made:

.. code-block:: text

    messages             the chat; of a message that is not learned from, `weight` is 0
    input_metadata       row_id: the task; completion_params: model and sampling; dataset_info: {seed}
    rollout_status       how it ended
    evaluation_result    score: the return, or `--score`; metrics: what each scorer says; step_outputs: step rewards
    execution_metadata   rollout_id: the episode's id; run_id, experiment_id: the run; tokens in
                         extra.assistant_turn_payloads
    eval_metadata        name: the environment; num_runs: the size of the group

Advantages, a number or null for each decision, stand in `execution_metadata.extra.trajlake`, which is not read back.

Source: models.py and dataset_logger of eval-protocol 0.3.33.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from lake import ids
from lake.export.target import (
    Choices,
    Exported,
    Losses,
    Row,
    Target,
    by_rollout,
    call_of,
    conversation,
    learned,
    put_back,
)
from lake.formats.eval_protocol.reader import NAME
from lake.formats.eval_protocol.rows import OURS, row_of, tokens_of
from lake.write.rows import json_text
from lake.write.scores import RECORDED

_TABLE = (
    'CREATE TABLE "evaluationrow" ("id" INTEGER NOT NULL PRIMARY KEY, "rollout_id" VARCHAR(255) NOT NULL, '
    '"data" TEXT NOT NULL)',
    'CREATE UNIQUE INDEX "evaluationrow_rollout_id" ON "evaluationrow" ("rollout_id")',
    'INSERT INTO "evaluationrow" ("rollout_id", "data") SELECT CASE WHEN EXISTS (SELECT 1 FROM "evaluationrow" WHERE '
    "\"rollout_id\" = :rollout_id) THEN :rollout_id || '-' || :id ELSE :rollout_id END, :data",
)
_PLAYED = frozenset(("step",))
"""What is kept of a line of a playback, and nothing else."""
_CODES = {"completed": 100, "truncated": 100, "aborted": 1, "failed": 13}
_REASONS = frozenset(
    ("max_steps", "control_plane_signal", "user_stop", "skippable_error", "non_skippable_error", "stop", "length")
) | {"tool_calls"}
_MESSAGE = ("role", "content", "reasoning_content", "name", "tool_call_id", "tool_calls", "weight")
_PARTS = ("text", "image_url")


def _rows(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    for exported in by_rollout(group):
        yield put_back(partial(_row, choices=choices), [exported], losses)


def _row(episodes: Sequence[Exported], losses: Losses, *, choices: Choices) -> Row:
    (exported,) = episodes
    record = exported.record
    if record.source_format == NAME and (record.extra or {}).keys() != _PLAYED:
        row = row_of(record, [score for version, score in exported.came_with if version == RECORDED])
        losses.add("scores that are not the evaluation's", len(exported.computed))
    else:
        row = _made(exported, choices, losses)
    if (advantages := exported.advantages()) is not None:
        ours = {"id": ids.to_text(exported.episode.episode_id), "advantages": advantages}
        execution = row.get("execution_metadata") or {}
        extra = (execution.get("extra") or {}) | {OURS: ours}
        row["execution_metadata"] = execution | {"extra": extra}
    return row


def _logged(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    rows = _rows(group, choices, losses)
    for exported, row in zip(by_rollout(group), rows, strict=True):
        episode_id = ids.to_text(exported.episode.episode_id)
        execution = row.get("execution_metadata") or {}
        rollout_id = execution.get("rollout_id") or row.get("rollout_id")
        yield {
            "id": episode_id,
            "rollout_id": rollout_id if isinstance(rollout_id, str) else episode_id,
            "data": msgspec.json.encode(row).decode(),
        }


def _made(exported: Exported, choices: Choices, losses: Losses) -> Row:
    record = exported.record
    episode_id = ids.to_text(exported.episode.episode_id)
    weights = learned(exported, losses)
    messages = [
        _message(message, weight, losses) for message, weight in zip(conversation(record), weights, strict=True)
    ]
    losses.add("step scores", sum(score.step_index is not None for _, score in exported.episode.scores))
    model = {} if record.policy is None else {"model": record.policy}
    about: Row = {"row_id": record.task_id, "completion_params": model | (record.sampling or {})}
    if record.seed is not None:
        about["dataset_info"] = {"seed": record.seed}
    execution: Row = {"invocation_id": record.run_id, "experiment_id": record.run_id, "rollout_id": episode_id}
    execution |= {"run_id": record.run_id}
    if record.prompt_tokens is not None and record.completion_tokens is not None:
        total = record.prompt_tokens + record.completion_tokens
        usage = {"prompt_tokens": record.prompt_tokens, "completion_tokens": record.completion_tokens}
        execution["usage"] = usage | {"total_tokens": total}
    if record.cost is not None:
        execution["cost_metrics"] = {"total_cost_dollar": record.cost}
    if of_tokens := tokens_of(record.steps):
        execution["extra"] = of_tokens
    row: Row = {
        "messages": messages,
        "tools": [tool for tool in record.tools or () if isinstance(tool, dict)] or None,
        "input_metadata": about,
        "rollout_status": _status(exported),
        "ground_truth": record.ground_truth,
        "evaluation_result": _result(exported, choices),
        "execution_metadata": execution,
        "created_at": None if record.started_at is None else msgspec.to_builtins(record.started_at),
    }
    if record.environment is not None:
        runs = {"num_runs": record.expected_group_size or 1, "aggregation_method": "mean"}
        row["eval_metadata"] = {"name": record.environment, "version": "0"} | runs
    return {key: value for key, value in row.items() if value is not None}


def _status(exported: Exported) -> Row:
    record = exported.record
    reason = record.stop_reason if record.stop_reason in _REASONS else None
    if record.status == "truncated" and reason not in ("max_steps", "length"):
        reason = "max_steps"
    details = []
    if reason is not None:
        kind = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "TERMINATION_REASON"}
        details = [kind | {"domain": "evalprotocol.io", "metadata": {"termination_reason": reason}}]
    message = {"completed": "Rollout finished", "truncated": "Rollout finished"}.get(record.status)
    told = message or record.error or record.stop_reason or f"Rollout {record.status}"
    return {"code": _CODES[record.status], "message": told, "details": details}


def _result(exported: Exported, choices: Choices) -> Row | None:
    """What is said of the rollout. A score is a number there, so an unknown one is marked as invalid."""
    value = exported.score
    metrics = {
        score.scorer: {
            "is_score_valid": score.value is not None,
            "score": 0.0 if score.value is None else score.value,
            "reason": score.reason or score.error or "",
            "data": score.metrics or {},
        }
        for _, score in exported.episode.scores
        if score.step_index is None
    }
    outputs = [
        {"step_index": index, "base_reward": step.reward, "terminated": False, "metrics": {}}
        for index, step in enumerate(exported.record.steps)
        if step.reward is not None
    ]
    if value is None and not metrics and not outputs:
        return None
    known = {"score": 0.0 if value is None else value, "is_score_valid": value is not None}
    return known | {"reason": choices.score, "metrics": metrics} | ({"step_outputs": outputs} if outputs else {})


def _message(message: Row, weight: int | None, losses: Losses) -> Row:
    """A message as chat APIs have it: what they have no place for is left out, arguments are JSON text."""
    known = {key: message[key] for key in _MESSAGE if message.get(key) is not None}
    losses.add_names("keys of messages", message.keys() - set(_MESSAGE))
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in known and not isinstance(known[key], str):
            known[key] = json_text(known[key])
    known["content"] = _content(message.get("content"))
    if isinstance(calls := known.pop("tool_calls", None), list) and calls:
        known["tool_calls"] = [_call(call, place) for place, call in enumerate(calls)]
    return known | ({} if weight is None else {"weight": weight})


def _content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json_text(content)
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return [
        part if isinstance(part, dict) and part.get("type") in _PARTS else {"type": "text", "text": json_text(part)}
        for part in parts
    ]


def _call(given: Any, place: int) -> Row:
    call = call_of(given)
    arguments = call.raw if isinstance(call.raw, str) else json_text({} if call.raw is None else call.raw)
    function = {"name": call.name or "unknown", "arguments": arguments}
    return {"id": call.id or f"call-{place}", "type": "function", "function": function}


_HELD = frozenset(("tokens", "advantages"))
TARGETS = (
    Target(
        "eval-protocol", "eval-protocol's rows (JSONL); its own come out as they went in", "jsonl", _rows, holds=_HELD
    ),
    Target("eval-protocol-db", "the same as its SQLite log", "sqlite", _logged, partial(list, _TABLE), holds=_HELD),
)
