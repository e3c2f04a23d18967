"""Inspect Scout's transcript database: a Parquet table with a transcript a row.

.. code-block:: text

    transcript_id   the episode's id; the only column that Scout requires
    source_type     `trajlake`; source_id: the run; source_uri: the file that the episode was read from
    messages        JSON text: a list of Inspect's chat messages
    any other       metadata that Scout can query: the columns of `episodes`, and `score_NAME` of every scorer as JSON

A message has id, role, content (text, or parts), of the assistant also tool_calls [{id, function, arguments}] and a
reasoning part, of a tool tool_call_id, function and error. Advantages stand in `metadata` of the messages they are of.

Source: the database schema in the documentation of inspect_scout.
"""

from typing import Any

from lake import ids
from lake.export.target import Exported, Losses, Row, Target, call_of, each, last_words, prompts
from lake.write.rows import json_text

_PLAIN = {
    "run_id": "string",
    "task_id": "string",
    "rollout_index": "int32",
    "attempt": "int32",
    "environment": "string",
    "split": "string",
    "agent_id": "string",
    "policy": "string",
    "policy_version": "int64",
    "status": "string",
    "stop_reason": "string",
    "error": "string",
    "env_return": "double",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "cost": "double",
}


def _row(exported: Exported, losses: Losses) -> Row:
    record = exported.record
    episode_id = ids.to_text(exported.episode.episode_id)
    messages: list[Row] = []
    for index, (step, since) in enumerate(zip(record.steps, prompts(record), strict=True)):
        messages += [_observed(message) for message in since]
        content: Any = step.action
        if step.reasoning is not None:
            content = [{"type": "reasoning", "reasoning": step.reasoning}, {"type": "text", "text": step.action}]
        credit = exported.credit_S.get(index)
        judged = {"step_index": index, "reward": step.reward, "advantage": credit and credit.advantage}
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [_call(call, place) for place, call in enumerate(step.tool_calls or ())] or None,
            "model": step.model,
            "metadata": {key: value for key, value in judged.items() if value is not None},
        }
        messages.append({key: value for key, value in message.items() if value is not None})
    messages += [_observed(message) for message in last_words(record)]
    for place, message in enumerate(messages):
        message.setdefault("id", f"{episode_id}-{place}")
    losses.add("step scores", sum(score.step_index is not None for _, score in exported.episode.scores))
    scores = {score.scorer: score.value for _, score in exported.episode.scores if score.step_index is None}
    return {
        "transcript_id": episode_id,
        "source_type": "trajlake",
        "source_id": record.run_id,
        "source_uri": record.source_uri,
        "messages": json_text(messages),
        "scores": json_text(scores),
        "metadata": json_text(record.extra),
    } | {name: getattr(record, name) for name in _PLAIN}


def _observed(message: Row) -> Row:
    """A message that the policy saw, in Inspect's form."""
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    known: Row = {"role": role, "content": message.get("content") or ""}
    if role == "tool":
        known |= {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
        if message.get("is_error"):
            known["error"] = {"type": "unknown", "message": str(known["content"])}
    if role == "assistant":
        known["tool_calls"] = [_call(call, at) for at, call in enumerate(message.get("tool_calls") or ())] or None
    return {key: value for key, value in known.items() if value is not None}


def _call(given: Any, place: int) -> Row:
    call = call_of(given)
    arguments = {"text": call.arguments} if isinstance(call.arguments, str) else call.arguments
    return {
        "id": call.id or f"call-{place}",
        "function": call.name or "unknown",
        "arguments": arguments if isinstance(arguments, dict) else {"value": arguments},
        "type": "function",
    }


def _schema() -> Any:
    import pyarrow as pa

    text = ("transcript_id", "source_type", "source_id", "source_uri", "messages", "scores", "metadata")
    plain = {name: pa.type_for_alias(kind) for name, kind in _PLAIN.items()}
    return pa.schema(dict.fromkeys(text, pa.string()) | plain)


TARGET = Target(
    "scout",
    "Inspect Scout's transcript database (Parquet)",
    "parquet",
    each(_row),
    _schema,
    holds=frozenset(("advantages",)),
)
