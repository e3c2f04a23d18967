"""Inspect Scout's transcript database: a Parquet table with one transcript per row.

.. code-block:: text

    transcript_id   the episode's id; Scout requires no other column
    source_type     `trajlake`; source_id: the run; source_uri: the source file of the episode
    messages        JSON text: a list of Inspect's chat messages
    date, task_set, task_id, task_repeat, agent, model, model_options, score, message_count, total_time, total_tokens,
    error, limit    as in Scout; task_set: the environment, score: the score of the export
    any other       metadata that Scout can query: further columns of `episodes`; `scores` of the scorers; `metadata`:
                    further data of the source, as JSON

A message has id, role and content (text, or parts: text, reasoning and images). An assistant message also has
tool_calls [{id, function, arguments}], and `metadata` with step_index, reward and advantage. A tool message has
tool_call_id, function and error.

Source: the schema of inspect_scout 0.6; the messages of inspect_ai 0.3.
"""

from typing import Any

from lake import ids
from lake.export.target import (
    Exported,
    Losses,
    Row,
    Target,
    build_answer,
    convert_each,
    is_decision,
    list_final_messages,
    list_new_messages,
    parse_call,
)
from lake.formats.chat.messages import join_text
from lake.write.rows import encode_json

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


def _build_row(exported: Exported, losses: Losses) -> Row:
    record = exported.record
    episode_id = ids.to_text(exported.episode.episode_id)
    messages: list[Row] = []
    for index, (step, since) in enumerate(zip(record.steps, list_new_messages(record), strict=True)):
        messages += [_convert_message(message, losses) for message in since]
        if not is_decision(step):
            continue
        content = _convert_content(build_answer(step).get("content"), losses)
        if step.reasoning is not None:
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            content = [{"type": "reasoning", "reasoning": step.reasoning}, *blocks]
        credit = exported.step_credit.get(index)
        metadata = {"step_index": index, "reward": step.reward, "advantage": credit and credit.advantage}
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [_convert_call(call, index) for index, call in enumerate(step.tool_calls or ())] or None,
            "model": step.model,
            "metadata": {key: value for key, value in metadata.items() if value is not None},
        }
        messages.append({key: value for key, value in message.items() if value is not None})
    messages += [_convert_message(message, losses) for message in list_final_messages(record)]
    for number, message in enumerate(messages):
        message["id"] = f"{episode_id}-{number}"
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
        "model_options": encode_json(record.sampling),
        "score": encode_json(exported.score),
        "message_count": len(messages),
        "total_time": (times[1] - times[0]).total_seconds() if times[0] and times[1] else None,
        "total_tokens": sum(tokens) if tokens else None,
        "limit": record.stop_reason if record.status == "truncated" else None,
        "messages": encode_json(messages),
        "scores": encode_json(scores),
        "metadata": encode_json(record.extra),
    } | {name: getattr(record, name) for name in _PLAIN}


def _convert_message(message: Row, losses: Losses) -> Row:
    """Return a message before a decision in Inspect's form."""
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    role = role if role in _ROLES else "user"
    converted: Row = {"role": role, "content": _convert_content(message.get("content"), losses)}
    if role == "tool":
        converted |= {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
        if message.get("is_error"):
            converted["error"] = {"type": "unknown", "message": str(converted["content"])}
    if role == "assistant":
        converted["tool_calls"] = [
            _convert_call(call, index) for index, call in enumerate(message.get("tool_calls") or ())
        ] or None
    return {key: value for key, value in converted.items() if value is not None}


def _convert_content(content: Any, losses: Losses) -> Any:
    """Return content as text, or as Inspect's text and image blocks."""
    if not isinstance(content, list):
        return content or ""
    blocks: list[Row] = []
    for block in content:
        image = block.get("image_url") if isinstance(block, dict) else None
        address = image.get("url") if isinstance(image, dict) else image
        if isinstance(address, str):
            blocks.append({"type": "image", "image": address})
        elif text := join_text([block], ""):
            blocks.append({"type": "text", "text": text})
        else:
            losses.add("parts that are neither text nor images")
    return blocks


def _convert_call(source: Any, index: int) -> Row:
    call = parse_call(source)
    arguments = {"text": call.arguments} if isinstance(call.arguments, str) else call.arguments
    return {
        "id": call.id or f"call-{index}",
        "function": call.name or "unknown",
        "arguments": arguments if isinstance(arguments, dict) else {"value": arguments},
        "type": "function",
    }


def _build_schema() -> Any:
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
    convert_each(_build_row),
    _build_schema,
    fact_kinds=frozenset(("advantages",)),
)
