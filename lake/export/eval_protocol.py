"""Rows of eval-protocol, as JSON lines or in its SQLite log, `logs.db`.

An episode that was read from a row gives the same row, without API keys (`lake.formats.eval_protocol`). An episode of
another source, or one that was read from a playback, becomes an `EvaluationRow`:

.. code-block:: text

    messages             the chat; messages that are not learned from have `weight` 0
    input_metadata       row_id: the task; completion_params: model and sampling; dataset_info: {seed}
    rollout_status       how the episode ended
    evaluation_result    score: the score of the export; metrics: the scores of all scorers; step_outputs: step rewards
    execution_metadata   rollout_id: the episode's id; run_id, experiment_id: the run; tokens in
                         extra.assistant_turn_payloads
    eval_metadata        name: the environment; num_runs: the size of the group

`execution_metadata.extra.trajlake` holds the advantages, a number or null for each decision. It is not read back.

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
    build_conversation,
    list_message_weights,
    parse_call,
    restore_or_convert,
    sort_by_rollout,
)
from lake.formats.eval_protocol import EXPORT_KEY, NAME, build_row, build_token_fields
from lake.write.rows import encode_json
from lake.write.scores import RECORDED

_TABLE = (
    'CREATE TABLE "evaluationrow" ("id" INTEGER NOT NULL PRIMARY KEY, "rollout_id" VARCHAR(255) NOT NULL, '
    '"data" TEXT NOT NULL)',
    'CREATE UNIQUE INDEX "evaluationrow_rollout_id" ON "evaluationrow" ("rollout_id")',
    'INSERT INTO "evaluationrow" ("rollout_id", "data") SELECT CASE WHEN EXISTS (SELECT 1 FROM "evaluationrow" WHERE '
    "\"rollout_id\" = :rollout_id) THEN :rollout_id || '-' || :id ELSE :rollout_id END, :data",
)
_PLAYBACK_KEYS = frozenset(("step",))
"""Keys of `extra` of an episode that was read from a playback."""
_CODES = {"completed": 100, "truncated": 100, "aborted": 1, "failed": 13}
_REASONS = frozenset(
    ("max_steps", "control_plane_signal", "user_stop", "skippable_error", "non_skippable_error", "stop", "length")
) | {"tool_calls"}
_MESSAGE_KEYS = ("role", "content", "reasoning_content", "name", "tool_call_id", "tool_calls", "weight")
_BLOCK_TYPES = ("text", "image_url")


def _build_rows(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    for exported in sort_by_rollout(group):
        yield restore_or_convert(partial(_build_row, choices=choices), [exported], losses)


def _build_row(episodes: Sequence[Exported], losses: Losses, *, choices: Choices) -> Row:
    (exported,) = episodes
    record = exported.record
    if record.source_format == NAME and (record.extra or {}).keys() != _PLAYBACK_KEYS:
        row = build_row(record, [score for version, score in exported.source_scores if version == RECORDED])
        losses.add("scores that are not the evaluation's", len(exported.computed_scores))
    else:
        row = _convert_episode(exported, choices, losses)
    if (advantages := exported.list_advantages()) is not None:
        notes = {"id": ids.to_text(exported.episode.episode_id), "advantages": advantages}
        execution = row.get("execution_metadata") or {}
        extra = (execution.get("extra") or {}) | {EXPORT_KEY: notes}
        row["execution_metadata"] = execution | {"extra": extra}
    return row


def _build_log_rows(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    rows = _build_rows(group, choices, losses)
    for exported, row in zip(sort_by_rollout(group), rows, strict=True):
        episode_id = ids.to_text(exported.episode.episode_id)
        execution = row.get("execution_metadata") or {}
        rollout_id = execution.get("rollout_id") or row.get("rollout_id")
        yield {
            "id": episode_id,
            "rollout_id": rollout_id if isinstance(rollout_id, str) else episode_id,
            "data": msgspec.json.encode(row).decode(),
        }


def _convert_episode(exported: Exported, choices: Choices, losses: Losses) -> Row:
    record = exported.record
    episode_id = ids.to_text(exported.episode.episode_id)
    weights = list_message_weights(exported, losses)
    messages = [
        _convert_message(message, weight, losses)
        for message, weight in zip(build_conversation(record), weights, strict=True)
    ]
    losses.add("step scores", sum(score.step_index is not None for _, score in exported.episode.scores))
    model = {} if record.policy is None else {"model": record.policy}
    metadata: Row = {"row_id": record.task_id, "completion_params": model | (record.sampling or {})}
    if record.seed is not None:
        metadata["dataset_info"] = {"seed": record.seed}
    execution: Row = {"invocation_id": record.run_id, "experiment_id": record.run_id, "rollout_id": episode_id}
    execution |= {"run_id": record.run_id}
    if record.prompt_tokens is not None and record.completion_tokens is not None:
        total = record.prompt_tokens + record.completion_tokens
        usage = {"prompt_tokens": record.prompt_tokens, "completion_tokens": record.completion_tokens}
        execution["usage"] = usage | {"total_tokens": total}
    if record.cost is not None:
        execution["cost_metrics"] = {"total_cost_dollar": record.cost}
    if token_fields := build_token_fields(record.steps):
        execution["extra"] = token_fields
    row: Row = {
        "messages": messages,
        "tools": [tool for tool in record.tools or () if isinstance(tool, dict)] or None,
        "input_metadata": metadata,
        "rollout_status": _build_status(exported),
        "ground_truth": record.ground_truth,
        "evaluation_result": _build_evaluation(exported, choices),
        "execution_metadata": execution,
        "created_at": None if record.started_at is None else msgspec.to_builtins(record.started_at),
    }
    if record.environment is not None:
        runs = {"num_runs": record.expected_group_size or 1, "aggregation_method": "mean"}
        row["eval_metadata"] = {"name": record.environment, "version": "0"} | runs
    return {key: value for key, value in row.items() if value is not None}


def _build_status(exported: Exported) -> Row:
    record = exported.record
    reason = record.stop_reason if record.stop_reason in _REASONS else None
    if record.status == "truncated" and reason not in ("max_steps", "length"):
        reason = "max_steps"
    details = []
    if reason is not None:
        kind = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "TERMINATION_REASON"}
        details = [kind | {"domain": "evalprotocol.io", "metadata": {"termination_reason": reason}}]
    message = {"completed": "Rollout finished", "truncated": "Rollout finished"}.get(record.status)
    text = message or record.error or record.stop_reason or f"Rollout {record.status}"
    return {"code": _CODES[record.status], "message": text, "details": details}


def _build_evaluation(exported: Exported, choices: Choices) -> Row | None:
    """Return scores and step rewards. The format requires a number, so an unknown score is 0 and marked as invalid."""
    total = exported.score
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
    if total is None and not metrics and not outputs:
        return None
    evaluation = {"score": 0.0 if total is None else total, "is_score_valid": total is not None}
    return evaluation | {"reason": choices.score, "metrics": metrics} | ({"step_outputs": outputs} if outputs else {})


def _convert_message(message: Row, weight: int | None, losses: Losses) -> Row:
    """Return a message as in chat APIs: without unknown keys, and with arguments as JSON text."""
    converted = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    losses.add_names("keys of messages", message.keys() - set(_MESSAGE_KEYS))
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in converted and not isinstance(converted[key], str):
            converted[key] = encode_json(converted[key])
    converted["content"] = _convert_content(message.get("content"))
    if isinstance(calls := converted.pop("tool_calls", None), list) and calls:
        converted["tool_calls"] = [_convert_call(call, index) for index, call in enumerate(calls)]
    return converted | ({} if weight is None else {"weight": weight})


def _convert_content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return encode_json(content)
    blocks = [{"type": "text", "text": block} if isinstance(block, str) else block for block in content]
    return [
        block
        if isinstance(block, dict) and block.get("type") in _BLOCK_TYPES
        else {"type": "text", "text": encode_json(block)}
        for block in blocks
    ]


def _convert_call(source: Any, index: int) -> Row:
    call = parse_call(source)
    arguments = call.raw if isinstance(call.raw, str) else encode_json({} if call.raw is None else call.raw)
    function = {"name": call.name or "unknown", "arguments": arguments}
    return {"id": call.id or f"call-{index}", "type": "function", "function": function}


_FACT_KINDS = frozenset(("tokens", "advantages"))
TARGETS = (
    Target(
        "eval-protocol",
        "eval-protocol's rows (JSONL); its own come out as they went in",
        "jsonl",
        _build_rows,
        fact_kinds=_FACT_KINDS,
    ),
    Target(
        "eval-protocol-db",
        "the same as its SQLite log",
        "sqlite",
        _build_log_rows,
        partial(list, _TABLE),
        fact_kinds=_FACT_KINDS,
    ),
)
