"""One ATIF document: its fields, its steps as decisions, and the exact tokens of them."""

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from lake.formats.base.fields import moment
from lake.formats.base.rows import UnsupportedError, rest
from lake.formats.chat.messages import Conversation, Message, conversation, tool_call
from lake.formats.chat.messages import checked as checked_message
from lake.formats.chat.tokens import Lineage
from lake.records import EpisodeRecord, Index, Int64, StepRecord

_VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
_ON_STEPS = ("source", "message", "tool_calls", "observation", "metrics", "step_id", "timestamp", "model_name")
_OF_AGENTS = ("is_copied_context", "reasoning_content")
OURS = "trajlake"
"""Key of `extra` under which our own export says what ATIF has no place for; not read back but for the names."""


class Metrics(msgspec.Struct):
    """Tokens and cost of a step."""

    prompt_tokens: Int64 | None = None
    completion_tokens: Int64 | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[Index] | None = None
    completion_token_ids: list[Index] | None = None
    logprobs: list[float] | None = None


class Call(msgspec.Struct):
    """A tool call."""

    function_name: str
    arguments: dict[str, Any] | str | None = None
    tool_call_id: str | None = None
    extra: dict[str, Any] | None = None


class Ref(msgspec.Struct):
    """A sub-agent that a result refers to."""

    trajectory_id: str | None = None
    trajectory_path: str | None = None
    session_id: str | None = None


class Result(msgspec.Struct):
    """What came back: of a call, or of nothing that was called."""

    source_call_id: str | None = None
    content: str | list[Any] | None = None
    subagent_trajectory_ref: list[Ref] | None = None


class Observation(msgspec.Struct):
    """What came back for a step."""

    results: list[Result]


class Step(msgspec.Struct):
    """A step; `Any` parts are looked at as messages."""

    source: Literal["system", "user", "agent"]
    step_id: int | None = None
    message: str | list[Any] | None = None
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None


class Agent(msgspec.Struct):
    """Who acts."""

    name: str = "agent"
    version: str | None = None
    model_name: str | None = None
    tool_definitions: list[Any] | None = None
    extra: dict[str, Any] | None = None


class Totals(msgspec.Struct):
    """Sums over a document."""

    total_prompt_tokens: Int64 | None = None
    total_completion_tokens: Int64 | None = None
    total_cost_usd: float | None = None


class Document(msgspec.Struct):
    """A whole document."""

    schema_version: str
    agent: Agent
    steps: list[Step]
    session_id: str | None = None
    trajectory_id: str | None = None
    final_metrics: Totals | None = None
    continued_trajectory_ref: str | None = None
    subagent_trajectories: "list[Document] | None" = None
    extra: dict[str, Any] | None = None


def checked(value: Any) -> Document:
    """A document of a known version. Raises UnsupportedError, and msgspec.ValidationError with the path."""
    version = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(version, str):
        _check_version(version)
    document = msgspec.convert(value, Document)
    inner = list(document.subagent_trajectories or ())
    while inner:
        below = inner.pop()
        _check_version(below.schema_version)
        inner += below.subagent_trajectories or ()
    return document


def _check_version(version: str) -> None:
    if version not in _VERSIONS:
        raise UnsupportedError(f"`schema_version` is {version!r}; known: {_VERSIONS[0]} to {_VERSIONS[-1]}")


def without_ours(kept: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an object, without what our own export added to its `extra`."""
    if isinstance(extra := kept.get("extra"), dict):
        kept["extra"] = {key: value for key, value in extra.items() if key != OURS}
        if not kept["extra"]:
            del kept["extra"]
    return kept


def file_name(ref: str | None) -> str | None:
    """The name at the end of a path or an address."""
    return re.split(r"[/\\]", ref)[-1] if ref else None


def refs(steps: list[Step]) -> Iterator[tuple[int | None, Ref]]:
    """The sub-agents that a document refers to, and the index of the last decision before each."""
    decisions = 0
    for step in steps:
        decisions += step.source == "agent"
        for result in step.observation.results if step.observation else ():
            for ref in result.subagent_trajectory_ref or ():
                yield (decisions - 1 if decisions else None), ref


def decisions_in(steps: list[Step]) -> int:
    """How many steps are the agent's."""
    return sum(step.source == "agent" for step in steps)


def chat_of(document: Document, value: dict[str, Any]) -> tuple[Conversation, list[int]]:
    """The steps as messages, those as decisions, and of each decision the index of its step."""
    messages: list[Message] = []
    origins: list[int] = []
    for index, (step, given) in enumerate(zip(document.steps, value["steps"], strict=True)):
        is_agent = step.source == "agent"
        kept = without_ours(rest(given, *_ON_STEPS, *(_OF_AGENTS if is_agent else ())) or {})
        if step.step_id not in (None, index + 1):
            kept["step_id"] = step.step_id
        if step.timestamp is not None and (not is_agent or moment(step.timestamp) is None):
            kept["timestamp"] = step.timestamp
        message: Message = kept | {"role": "assistant" if is_agent else step.source, "content": step.message}
        if step.tool_calls is not None:
            message["tool_calls"] = [
                tool_call(call.function_name, call.arguments, call.tool_call_id) for call in step.tool_calls
            ]
            if more := {str(at): call.extra for at, call in enumerate(step.tool_calls) if call.extra}:
                message["tool_call_extra"] = more
        if is_agent and step.reasoning_content:
            message["reasoning_content"] = step.reasoning_content
        messages.append(checked_message(message, f"steps[{index}]"))
        origins += [index] if is_agent else []
        names = {call.tool_call_id: call.function_name for call in step.tool_calls or ()}
        results = step.observation.results if step.observation else []
        for result, raw in zip(results, (given.get("observation") or {}).get("results") or (), strict=True):
            _observe(messages, message, result, raw, names)
            checked_message(messages[-1], f"steps[{index}].observation")
    return conversation(messages, place="steps"), origins


def _observe(
    messages: list[Message], of: Message, result: Result, raw: dict[str, Any], names: dict[str | None, str]
) -> None:
    """Add the message that a result is. One that only names sub-agents is none, and stays with its step."""
    kept = rest(raw, "source_call_id", "content") or {}
    if result.source_call_id is not None:
        name = {"name": names[result.source_call_id]} if result.source_call_id in names else {}
        said = {"role": "tool", "tool_call_id": result.source_call_id} | name | {"content": result.content}
        messages.append(kept | said)
    elif result.content is not None:
        messages.append(kept | {"role": "user", "content": result.content})
    elif kept:
        of.setdefault("observation", []).append(kept)


def complete(step: StepRecord, said: Step, given: dict[str, Any], lineage: Lineage, index: int) -> None:
    """Write on a decision what its step says beyond the message."""
    step.model = said.model_name
    step.started_at = moment(said.timestamp)
    step.is_copied_context = said.is_copied_context is True
    step.trainable = not step.is_copied_context and said.llm_call_count != 0
    if (metrics := said.metrics) is None:
        return
    step.prompt_tokens, step.completion_tokens = metrics.prompt_tokens, metrics.completion_tokens
    step.cost = metrics.cost_usd
    known = ["prompt_tokens", "completion_tokens", "cost_usd"]
    prompt, sampled = metrics.prompt_token_ids, metrics.completion_token_ids
    if prompt and sampled and _is_one_call(said):
        logprobs = metrics.logprobs if metrics.logprobs and len(metrics.logprobs) == len(sampled) else None
        step.tokens = lineage.add(index, prompt, sampled, logprobs)
        known += ["prompt_token_ids", "completion_token_ids", *(["logprobs"] if logprobs else [])]
    if more := rest(given["metrics"], *known):
        step.extra = (step.extra or {}) | {"metrics": more}


def _is_one_call(said: Step) -> bool:
    """Whether a step's ids are those of one call: where it hides several, the counts of tokens tell."""
    metrics = said.metrics or Metrics()
    if said.llm_call_count in (None, 1):
        return True
    counted = (metrics.prompt_tokens, metrics.completion_tokens)
    return counted == (len(metrics.prompt_token_ids or ()), len(metrics.completion_token_ids or ()))


class _Turns(msgspec.Struct):
    prompt_token_ids: list[list[Index]]
    completion_token_ids: list[list[Index]]
    logprobs: list[list[float]] | None = None
    extra: dict[str, Any] | None = None


def attach(record: EpisodeRecord, detail: dict[str, Any], calls: list[int]) -> bool:
    """Give some decisions the turns of a chat history, if they are as many and as long as the decisions say."""
    try:
        turns = msgspec.convert(detail, _Turns)
    except msgspec.ValidationError:
        return False
    prompts, sampled = turns.prompt_token_ids, turns.completion_token_ids
    if not len(prompts) == len(sampled) == len(calls):
        return False
    for index, ids in zip(calls, sampled, strict=True):
        if record.steps[index].completion_tokens not in (None, len(ids)):
            return False
    logprobs = turns.logprobs if turns.logprobs and list(map(len, turns.logprobs)) == list(map(len, sampled)) else None
    lineage = Lineage()
    for turn, index in enumerate(calls):
        step = record.steps[index]
        step.tokens = lineage.add(index, prompts[turn], sampled[turn], logprobs[turn] if logprobs else None)
        more = {
            name: values[turn]
            for name, values in (turns.extra or {}).items()
            if isinstance(values, list) and len(values) == len(calls) and values[turn] is not None
        }
        if more:
            step.extra = (step.extra or {}) | {"rollout_details": more}
    return True
