"""Inspect Scout's transcript database: a Parquet table with a transcript a row.

.. code-block:: text

    transcript_id   the episode's id; the only column that Scout requires
    source_type     `trajlake`; source_id: the run; source_uri: the file that the episode was read from
    messages        JSON text: a list of Inspect's chat messages
    date, task_set, task_id, task_repeat, agent, model, model_options, score, message_count, total_time, total_tokens,
    error, limit    as Scout calls them; task_set: the environment, score: the return
    any other       metadata that Scout can query: further columns of `episodes`; `scores` of the scorers, and
                    `metadata`, what the source had and no column holds, as JSON

A message has id, role, content (text, or parts of text, reasoning and images), of the assistant also tool_calls [{id,
function, arguments}], of a tool tool_call_id, function and error. `metadata` of an assistant's message has step_index,
reward and advantage.

Source: the schema of inspect_scout 0.6; the messages of inspect_ai 0.3.
"""

from typing import Any

from lake import ids
from lake.export.target import Exported, Losses, Row, Target, answer, call_of, each, is_decision, last_words, prompts
from lake.formats.chat.messages import text_of
from lake.write.rows import json_text

_ROLES = frozenset(("system", "user", "assistant", "tool"))
_PLAIN = {
    "run_id": "string",
    "task_id": "string",
    "rollout_index": "int32",
    "attempt": "int32",
    "split": "string",
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
        messages += [_observed(message, losses) for message in since]
        if not is_decision(step):
            continue
        content = _content(answer(step).get("content"), losses)
        if step.reasoning is not None:
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            content = [{"type": "reasoning", "reasoning": step.reasoning}, *parts]
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
    messages += [_observed(message, losses) for message in last_words(record)]
    for place, message in enumerate(messages):
        message["id"] = f"{episode_id}-{place}"
    losses.add("step scores", sum(score.step_index is not None for _, score in exported.episode.scores))
    scores = {score.scorer: score.value for _, score in exported.episode.scores if score.step_index is None}
    tokens = [count for count in (record.prompt_tokens, record.completion_tokens) if count is not None]
    times = record.started_at, record.ended_at
    return {
        "transcript_id": episode_id,
        "source_type": "trajlake",
        "source_id": record.run_id,
        "source_uri": record.source_uri,
        "date": times[0] and times[0].isoformat(),
        "task_set": record.environment,
        "task_repeat": record.rollout_index,
        "agent": record.agent_id,
        "model": record.policy,
        "model_options": json_text(record.sampling),
        "score": json_text(exported.score),
        "message_count": len(messages),
        "total_time": (times[1] - times[0]).total_seconds() if times[0] and times[1] else None,
        "total_tokens": sum(tokens) if tokens else None,
        "limit": record.stop_reason if record.status == "truncated" else None,
        "messages": json_text(messages),
        "scores": json_text(scores),
        "metadata": json_text(record.extra),
    } | {name: getattr(record, name) for name in _PLAIN}


def _observed(message: Row, losses: Losses) -> Row:
    """A message that the policy saw, in Inspect's form."""
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    role = role if role in _ROLES else "user"
    known: Row = {"role": role, "content": _content(message.get("content"), losses)}
    if role == "tool":
        known |= {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
        if message.get("is_error"):
            known["error"] = {"type": "unknown", "message": str(known["content"])}
    if role == "assistant":
        known["tool_calls"] = [_call(call, at) for at, call in enumerate(message.get("tool_calls") or ())] or None
    return {key: value for key, value in known.items() if value is not None}


def _content(content: Any, losses: Losses) -> Any:
    """Text, or parts as Inspect has them."""
    if not isinstance(content, list):
        return content or ""
    parts: list[Row] = []
    for part in content:
        image = part.get("image_url") if isinstance(part, dict) else None
        address = image.get("url") if isinstance(image, dict) else image
        if isinstance(address, str):
            parts.append({"type": "image", "image": address})
        elif text := text_of([part], ""):
            parts.append({"type": "text", "text": text})
        else:
            losses.add("parts that are neither text nor images")
    return parts


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

    text = ["transcript_id", "source_type", "source_id", "source_uri", "date", "task_set", "agent", "model", "limit"]
    text += ["model_options", "score", "messages", "scores", "metadata"]
    counted = {"task_repeat": "int64", "message_count": "int64", "total_time": "double", "total_tokens": "int64"}
    plain = {name: pa.type_for_alias(kind) for name, kind in (counted | _PLAIN).items()}
    return pa.schema(dict.fromkeys(text, pa.string()) | plain)


TARGET = Target(
    "scout",
    "Inspect Scout's transcript database (Parquet)",
    "parquet",
    each(_row),
    _schema,
    holds=frozenset(("advantages",)),
)
