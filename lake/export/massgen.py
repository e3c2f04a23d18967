"""MassGen's layout of RL traces, `traces/YYYYMMDD/{agent}/{trace_id}.json` and `metadata/trace_index.json`.

A trace that was ingested from MassGen is written byte for byte, since the lake keeps all its data
(`lake.formats.massgen` has the specification). The day is its start in UTC. Each score that the lake added becomes a
reward span, after the spans of its step or at the end, and counts in the total reward. `metadata.trajlake` names these
spans and the original total, so that reading gives the same trace again.

An episode of another source becomes a trace: a prompt span for each decision, a tool span for each call with its
result, a reward span for each step reward and score, and the score of the export as the total reward.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lake import ids
from lake.export.target import (
    Choices,
    Exported,
    Losses,
    Row,
    Target,
    list_final_messages,
    list_new_messages,
    parse_call,
    restore_or_convert,
    to_file_name,
)
from lake.formats.base.fields import parse_number, parse_time
from lake.formats.chat.data_sets import ENV_RETURN
from lake.formats.chat.messages import join_text
from lake.formats.massgen import EXPORT_KEY, INITIAL_MESSAGES, TRACES_NAME
from lake.records import ScoreRecord
from lake.write.scores import RECORDED

_STATUSES = {"completed": "completed", "failed": "failed", "truncated": "completed", "aborted": "running"}
_LONGEST_TASK = 500
_NAMESPACE = uuid.UUID("6b1f0a5e-3d0f-4f4e-9d55-5a0c7e3d1a10")
_INDEX_KEYS = ("agent_id", "task", "start_time", "status", "total_reward")


def _convert(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    for exported in group:
        yield restore_or_convert(partial(_build_file, choices=choices), [exported], losses)


def _build_file(episodes: Sequence[Exported], losses: Losses, *, choices: Choices) -> Row:
    (exported,) = episodes
    if exported.record.source_format == TRACES_NAME:
        trace = _add_scores(_restore_trace(exported), exported, choices, losses)
    else:
        trace = _convert_episode(exported, losses)
    day = parse_time(trace.get("start_time")) or datetime.fromtimestamp(0, UTC)
    agent, name = (to_file_name(str(trace[key])) for key in ("agent_id", "trace_id"))
    try:
        text = json.dumps(trace, indent=2)
    except RecursionError:  # msgspec has no limit, but writes numbers and text slightly differently
        text = msgspec.json.format(msgspec.json.encode(trace), indent=2).decode()
    path = f"traces/{day:%Y%m%d}/{agent}/{name}.json"
    return {"path": path, "text": text, "id": ids.to_text(exported.episode.episode_id)}


def _restore_trace(exported: Exported) -> Row:
    """Return the original trace of an episode. Raises KeyError, TypeError, ...: the episode has none."""
    original = (exported.record.extra or {})["massgen"]
    by_id = {span.span_id: span.attributes for span in exported.record.spans}
    spans = [by_id[span_id] for span_id in original["spans"]]
    trace: Row = {}
    for key, field in original["trace"].items():
        trace[key] = field
        if key == "task":
            trace["spans"] = spans
        elif key == "metadata" and isinstance(field, dict) and field.get("messages") == INITIAL_MESSAGES:
            trace[key] = field | {"messages": exported.record.initial_messages}
    return trace


def _add_scores(trace: Row, exported: Exported, choices: Choices, losses: Losses) -> Row:
    """Return a trace with a reward span for each score that it does not contain."""
    added = [score for version, score in exported.episode.scores if version != RECORDED]
    scores = [score for score in added if score.value is not None]
    losses.add("scores without a value", len(added) - len(scores))
    metadata = trace.get("metadata", {})
    if not scores or not isinstance(metadata, dict):
        losses.add("scores of functions", len(scores))
        return trace
    spans = list(trace.get("spans") or ())
    step_of_span = {record.span_id: record.step_index for record in exported.record.spans}
    steps = [step_of_span[span_id] for span_id in (exported.record.extra or {})["massgen"]["spans"]]
    last_span = {step: number for number, step in enumerate(steps)}
    end = trace.get("end_time") or (spans[-1].get("timestamp") if spans else None) or trace.get("start_time") or 0.0
    rewards: dict[str, int | None] = {}
    following: dict[int, list[Row]] = {}  # number of a span -> reward spans to insert after it
    for score in scores:
        number = last_span.get(score.step_index, len(spans) - 1) if score.step_index is not None else len(spans) - 1
        time = end if score.step_index is None or number < 0 else spans[number].get("timestamp")
        span = {"span_id": f"{EXPORT_KEY}-{len(rewards)}", "span_type": "reward", "timestamp": time}
        span |= {"reward": score.value, "reward_type": score.scorer, "reason": score.reason}
        rewards[str(span["span_id"])] = score.step_index
        following.setdefault(number, []).append(span)
    merged = list(following.get(-1, ()))
    for number, span in enumerate(spans):
        merged += [span, *following.get(number, ())]
    notes: Row = {"total_reward": trace["total_reward"]} if "total_reward" in trace else {}
    notes |= {"rewards": rewards} | ({} if "metadata" in trace else {"is_only_metadata": True})
    reward = exported.score
    if choices.score in (None, ENV_RETURN):
        reward = (parse_number(trace.get("total_reward")) or 0.0) + _sum_scores(scores)
    return trace | {"spans": merged, "metadata": metadata | {EXPORT_KEY: notes}} | {"total_reward": reward}


def _sum_scores(scores: Sequence[ScoreRecord]) -> float:
    """Add up the scores of all scorers; a scorer without a score of the whole episode counts with its step scores."""
    by_scorer: dict[str, float] = {}
    for score in sorted(scores, key=lambda score: score.step_index is None):
        number = score.value or 0.0
        by_scorer[score.scorer] = number if score.step_index is None else by_scorer.get(score.scorer, 0.0) + number
    return sum(by_scorer.values())


def _convert_episode(exported: Exported, losses: Losses) -> Row:
    """Return the trace of an episode of another source."""
    record = exported.record
    losses.add("messages of others", len(record.initial_messages or ()) + len(record.final_observation or ()))
    start = record.started_at.timestamp() if record.started_at else 0.0
    end = record.ended_at.timestamp() if record.ended_at else None
    spans: list[Row] = []

    def add_span(kind: str, time: float, span_id: str | None = None, **fields: Any) -> None:
        spans.append({"span_id": span_id or f"span-{len(spans)}", "span_type": kind, "timestamp": time} | fields)

    def add_rewards(time: float, step_index: int | None) -> None:
        for _, score in exported.episode.scores:
            if score.step_index == step_index and score.value is not None:
                add_span("reward", time, reward=score.value, reward_type=score.scorer, reason=score.reason)

    losses.add("scores without a value", sum(score.value is None for _, score in exported.episode.scores))
    new_messages = list_new_messages(record)
    for index, step in enumerate(record.steps):
        time = step.started_at.timestamp() if step.started_at else start
        prompt: Row = {"input": step.state or "", "output": step.action, "model": step.model or record.policy or ""}
        prompt |= {"input_tokens": step.prompt_tokens, "output_tokens": step.completion_tokens}
        add_span("prompt", time, **prompt, reasoning=step.reasoning)
        after = new_messages[index + 1] if index + 1 < len(record.steps) else list_final_messages(record)
        for call in step.tool_calls or ():
            add_span("tool", time, **_build_tool_fields(call, after))
        if step.reward is not None:
            add_span("reward", time, reward=step.reward, reward_type="environment", reason=None)
        add_rewards(time, index)
    add_rewards(end or start, None)
    metadata = {"agent_id": record.agent_id or "agent", "model": record.policy}
    return {
        "trace_id": str(uuid.uuid5(_NAMESPACE, str(exported.episode.episode_id))),
        "agent_id": record.agent_id or "agent",
        "task": record.task_id if len(record.task_id) <= _LONGEST_TASK else f"{record.task_id[:_LONGEST_TASK]}...",
        "spans": spans,
        "metadata": metadata | ({"error": record.error} if record.error else {}),
        "start_time": start,
        "end_time": end,
        "duration": None if end is None else end - start,
        "total_reward": exported.score,
        "status": _STATUSES[record.status],
    }


def _build_tool_fields(source: Any, after: Sequence[Row]) -> Row:
    """Return the fields of a tool span: a call, and its answer among the messages after it."""
    call = parse_call(source)
    arguments = {"raw": call.arguments} if isinstance(call.arguments, str) else call.arguments
    answer = next((m for m in after if m["role"] == "tool" and m.get("tool_call_id") == call.id), None)
    failed = bool(answer and answer.get("is_error"))
    text = None if answer is None else join_text(answer.get("content"), "\n")
    return {
        "span_id": call.id,
        "tool_name": call.name or "unknown",
        "arguments": arguments if isinstance(arguments, dict) else {"value": arguments},
        "result": None if failed else text,
        "success": not failed,
        "execution_time": 0.0,
        "error": text if failed else None,
    }


def _index(folder: Path) -> tuple[str, bytes]:
    """Return the path and the content of the index of a folder's traces."""
    entries: list[Row] = []
    for path in folder.glob("traces/*/*/*.json"):
        trace = msgspec.json.decode(path.read_bytes())
        entries.append({key: trace.get(key) for key in (*_INDEX_KEYS, "trace_id")} | {"task": str(trace["task"])[:100]})
    traces: dict[str, Row] = {}
    agents: dict[str, list[str]] = {}
    for trace in sorted(entries, key=lambda entry: (parse_number(entry["start_time"]) or 0.0, str(entry["trace_id"]))):
        name = str(trace.pop("trace_id"))
        traces[name] = trace
        agents.setdefault(str(trace["agent_id"]), []).append(name)
    return "metadata/trace_index.json", json.dumps({"traces": traces, "agents": agents}, indent=2).encode()


TARGET = Target(
    "massgen",
    "MassGen's folder of RL traces; its own come out as they went in",
    "tree",
    _convert,
    fact_kinds=frozenset(("spans",)),
    index=_index,
)
