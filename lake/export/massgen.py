"""MassGen's layout of RL traces, `traces/YYYYMMDD/{agent}/{trace_id}.json` and `metadata/trace_index.json`.

A trace that was ingested from MassGen is written as it was, byte for byte: its spans and everything else of it are kept
(`lake.formats.massgen.traces` has the spec). The day is that of its start in UTC. What scorers said of it since is
added: each score is a reward span, behind the spans of its step or at the end, and counts in the total reward.
`metadata.trajlake` names these spans and the total as it was, so that the trace is read as the one that it is.

An episode of another source becomes a trace: a prompt span for each decision, a tool span for each call with its
result, a reward span for each step reward and score, and the score that counts as the total reward.
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
from lake.export.files import replace
from lake.export.target import Choices, Exported, Losses, Row, Target, call_of, file_name, last_words, prompts, put_back
from lake.formats.base.fields import moment, number
from lake.formats.chat.exported_rows import ENV_RETURN
from lake.formats.chat.messages import text_of
from lake.formats.massgen.traces import INITIAL, NAME, OURS
from lake.records import ScoreRecord
from lake.write.scores import RECORDED

_STATUSES = {"completed": "completed", "failed": "failed", "truncated": "completed", "aborted": "running"}
_LONGEST_TASK = 500
_NAMESPACE = uuid.UUID("6b1f0a5e-3d0f-4f4e-9d55-5a0c7e3d1a10")
_IN_INDEX = ("agent_id", "task", "start_time", "status", "total_reward")


def _files(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    for exported in group:
        yield put_back(partial(_file, choices=choices), [exported], losses)


def _file(episodes: Sequence[Exported], losses: Losses, *, choices: Choices) -> Row:
    (exported,) = episodes
    is_own = exported.record.source_format == NAME
    trace = _with_scores(_as_it_was(exported), exported, choices, losses) if is_own else _made(exported, losses)
    day = moment(trace.get("start_time")) or datetime.fromtimestamp(0, UTC)
    agent, name = (file_name(str(trace[key])) for key in ("agent_id", "trace_id"))
    path = f"traces/{day:%Y%m%d}/{agent}/{name}.json"
    return {"path": path, "text": _text(trace), "id": ids.to_text(exported.episode.episode_id)}


def _text(trace: Row) -> str:
    """As the tool writes it; what is nested too deeply for its way in the nearest other one."""
    try:
        return json.dumps(trace, indent=2)
    except RecursionError:
        return msgspec.json.format(msgspec.json.encode(trace), indent=2).decode()


def _as_it_was(exported: Exported) -> Row:
    """The trace that an episode was read from. Raises KeyError, TypeError, ...: it was read from none."""
    kept = (exported.record.extra or {})["massgen"]
    by_id = {span.span_id: span.attributes for span in exported.record.spans}
    spans = [by_id[span_id] for span_id in kept["spans"]]
    trace: Row = {}
    for key, value in kept["trace"].items():
        trace[key] = value
        if key == "task":
            trace["spans"] = spans
        elif key == "metadata" and isinstance(value, dict) and value.get("messages") == INITIAL:
            trace[key] = value | {"messages": exported.record.initial_messages}
    return trace


def _with_scores(trace: Row, exported: Exported, choices: Choices, losses: Losses) -> Row:
    """The trace with a reward span for each score that did not stand in it."""
    added = [score for version, score in exported.episode.scores if version != RECORDED]
    scores = [score for score in added if score.value is not None]
    losses.add("scores without a value", len(added) - len(scores))
    about = trace.get("metadata", {})
    if not scores or not isinstance(about, dict):
        losses.add("scores of functions", len(scores))
        return trace
    spans, total = list(trace.get("spans") or ()), trace.get("total_reward")
    ends = {record.span_id: record.step_index for record in exported.record.spans}
    owners = [ends[span_id] for span_id in (exported.record.extra or {})["massgen"]["spans"]]
    last = {owner: place for place, owner in enumerate(owners)}
    ended = trace.get("end_time") or (spans[-1].get("timestamp") if spans else None) or trace.get("start_time") or 0.0
    rewards: dict[str, int | None] = {}
    later: dict[int, list[Row]] = {}
    for score in scores:
        place = last.get(score.step_index, len(spans) - 1) if score.step_index is not None else len(spans) - 1
        at = ended if score.step_index is None or place < 0 else spans[place].get("timestamp")
        span = {"span_id": f"{OURS}-{len(rewards)}", "span_type": "reward", "timestamp": at}
        span |= {"reward": score.value, "reward_type": score.scorer, "reason": score.reason}
        rewards[str(span["span_id"])] = score.step_index
        later.setdefault(place, []).append(span)
    together = [*later.get(-1, ()), *(s for at, span in enumerate(spans) for s in (span, *later.get(at, ())))]
    was = {key: trace[key] for key in ("total_reward",) if key in trace}
    ours = was | {"rewards": rewards} | ({} if "metadata" in trace else {"is_only_metadata": True})
    said = {"spans": together, "metadata": about | {OURS: ours}}
    is_scorers = choices.score not in (None, ENV_RETURN)
    return trace | said | {"total_reward": exported.score if is_scorers else (number(total) or 0.0) + _sum(scores)}


def _sum(scores: Sequence[ScoreRecord]) -> float:
    """What the scorers say of the episode, added up; of one that says nothing of the whole, its steps."""
    of_scorer: dict[str, float] = {}
    for score in sorted(scores, key=lambda score: score.step_index is None):
        value = score.value or 0.0
        of_scorer[score.scorer] = value if score.step_index is None else of_scorer.get(score.scorer, 0.0) + value
    return sum(of_scorer.values())


def _made(exported: Exported, losses: Losses) -> Row:
    """A trace of an episode that has another source."""
    record = exported.record
    losses.add("messages of others", len(record.initial_messages or ()) + len(record.final_observation or ()))
    start = record.started_at.timestamp() if record.started_at else 0.0
    end = record.ended_at.timestamp() if record.ended_at else None
    spans: list[Row] = []

    def add(kind: str, at: float, span_id: str | None = None, **fields: Any) -> None:
        spans.append({"span_id": span_id or f"span-{len(spans)}", "span_type": kind, "timestamp": at} | fields)

    rewards = [(score.step_index, score.scorer, score.value, score.reason) for _, score in exported.episode.scores]
    losses.add("scores without a value", sum(value is None for _, _, value, _ in rewards))
    since = prompts(record)
    for index, step in enumerate(record.steps):
        at = step.started_at.timestamp() if step.started_at else start
        said: Row = {"input": step.state or "", "output": step.action, "model": step.model or record.policy or ""}
        said |= {"input_tokens": step.prompt_tokens, "output_tokens": step.completion_tokens}
        add("prompt", at, **said, reasoning=step.reasoning)
        after = since[index + 1] if index + 1 < len(record.steps) else last_words(record)
        for call in step.tool_calls or ():
            add("tool", at, **_tool(call, after))
        if step.reward is not None:
            add("reward", at, reward=step.reward, reward_type="environment", reason=None)
        for _, scorer, value, reason in (found for found in rewards if found[0] == index):
            if value is not None:
                add("reward", at, reward=value, reward_type=scorer, reason=reason)
    for _, scorer, value, reason in (found for found in rewards if found[0] is None):
        if value is not None:
            add("reward", end or start, reward=value, reward_type=scorer, reason=reason)
    about = {"agent_id": record.agent_id or "agent", "model": record.policy}
    return {
        "trace_id": str(uuid.uuid5(_NAMESPACE, str(exported.episode.episode_id))),
        "agent_id": record.agent_id or "agent",
        "task": record.task_id if len(record.task_id) <= _LONGEST_TASK else f"{record.task_id[:_LONGEST_TASK]}...",
        "spans": spans,
        "metadata": about | ({"error": record.error} if record.error else {}),
        "start_time": start,
        "end_time": end,
        "duration": None if end is None else end - start,
        "total_reward": exported.score,
        "status": _STATUSES[record.status],
    }


def _tool(call: Any, after: Sequence[Row]) -> Row:
    """The fields of a tool's span: the call, and its answer among the messages after it."""
    said = call_of(call)
    arguments = {"raw": said.arguments} if isinstance(said.arguments, str) else said.arguments
    answer = next((m for m in after if m["role"] == "tool" and m.get("tool_call_id") == said.id), None)
    failed = bool(answer and answer.get("is_error"))
    text = None if answer is None else text_of(answer.get("content"), "\n")
    return {
        "span_id": said.id,
        "tool_name": said.name or "unknown",
        "arguments": arguments if isinstance(arguments, dict) else {"value": arguments},
        "result": None if failed else text,
        "success": not failed,
        "execution_time": 0.0,
        "error": text if failed else None,
    }


def _index(folder: Path) -> None:
    """Write the index of the traces that lie in a folder."""
    found: list[Row] = []
    for path in folder.glob("traces/*/*/*.json"):
        trace = msgspec.json.decode(path.read_bytes())
        found.append({key: trace.get(key) for key in (*_IN_INDEX, "trace_id")} | {"task": str(trace["task"])[:100]})
    traces: dict[str, Row] = {}
    agents: dict[str, list[str]] = {}
    for trace in sorted(found, key=lambda one: (number(one["start_time"]) or 0.0, str(one["trace_id"]))):
        name = str(trace.pop("trace_id"))
        traces[name] = trace
        agents.setdefault(str(trace["agent_id"]), []).append(name)
    target = folder / "metadata" / "trace_index.json"
    target.parent.mkdir(exist_ok=True)
    replace(target, json.dumps({"traces": traces, "agents": agents}, indent=2).encode())


TARGET = Target(
    "massgen",
    "MassGen's folder of RL traces; its own come out as they went in",
    "tree",
    _files,
    holds=frozenset(("spans",)),
    finish=_index,
)
