"""agent-lightning (Microsoft, MIT) 0.x: spans, as lines, an array, or a page {items: [span], ...} of its REST API.

.. code-block:: text

    span        {rollout_id, attempt_id, sequence_id, trace_id, span_id, parent_id, name, attributes {flat names:
                values}, status {status_code, description}, start_time, end_time (seconds), events, links, resource}
    a call      the span's name contains `openai.chat.completion` (the agent's client, by AgentOps or Weave), or is
                `litellm_request` or `raw_gen_ai_request` (the proxy)
    messages    gen_ai.prompt.N.*, gen_ai.completion.N.*, gen_ai.request.*       (AgentOps, litellm_request)
                agentlightning.operation.input.*, agentlightning.operation.output.*                      (Weave)
                llm.PROVIDER.messages, llm.PROVIDER.choices as text of Python literals         (raw_gen_ai_request)
    tokens      prompt_token_ids, response_token_ids, those of the response (Weave, proxy); logprobs.content
    rewards     agentlightning.reward.N.{name, value}, the first one counts                            (0.3)
                attribute `reward` of a span agentlightning.reward or agentlightning.annotation        (0.2)
                agentops.task.output, agentops.entity.output: {"type": "reward", "value": number}      (0.1)

An episode is an attempt of a rollout. task_id is the rollout's id, because spans do not contain its input; attempts are
numbered as they appear. Spans of an attempt are ordered by `sequence_id`, as their clocks may differ. The agent's
client and the proxy may both record a call: spans with the same response id are one call, and so are nested ones.
Sub-agents are found as in any other trace (`tracing.episodes`). Calls inside a reward span are a judge's, and not
decisions. `env_return` is the last reward, each reward a score; one that links to a response is a score of that step.
All spans are kept, without their messages and tokens. Text of literals is parsed as literals, never evaluated.

Source: agent-lightning 0.1 to 0.3: types/tracer.py, semconv.py, emitter/reward.py, adapter/triplet.py.
"""

import ast
import re
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from lake.formats.agent_lightning import group_by_rollout
from lake.formats.base.fields import parse_number, parse_time
from lake.formats.base.format import FileHead, Format, Item, get_parent_folder, read_head
from lake.formats.base.json_array import Element
from lake.formats.base.rows import (
    ShapeError,
    convert_value,
    make_episode_text_id,
    omit_fields,
    read_object_members,
    read_values,
)
from lake.formats.base.source import Input
from lake.formats.chat.completions import Completion, Lineage, parse_completion, parse_logprobs
from lake.formats.chat.messages import make_tool_call
from lake.formats.otlp.conventions import build_genai_call
from lake.formats.tracing.episodes import ModelCall, Score, Span, Tool, Trace, build_episodes, group_traces
from lake.formats.tracing.payloads import decode_payload, get_text, parse_numeric, pop_indexed, to_messages
from lake.records import EpisodeRecord, Index, Reject, read_sampling

NAME = "agent_lightning_spans"

# ---------------------------------------------------------------- one span

_CALL = re.compile(r"openai\.chat\.completion|^(?:raw_gen_ai_request|litellm_request)$")
_INPUT, _OUTPUT = "agentlightning.operation.input", "agentlightning.operation.output"
_REWARD = "agentlightning.reward"
_REWARD_SPANS = (_REWARD, "agentlightning.annotation")
_LINK = "agentlightning.link"
_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop")
_NO_SETTINGS = ("type", "streaming", "stream")
_RESPONSE_KEYS = ("messages", "choices", "prompt_token_ids", "response_token_ids", "usage", "id", "model", "tools")
_CAPTURE = "turn_off_message_logging: false of LiteLLM, or TRACELOOP_TRACE_CONTENT=true of the agent's tracer"
_LONGEST_LITERAL = 16 << 20
_NOT_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class CallTokens(msgspec.Struct):
    """The exact tokens of a call."""

    prompt: list[int]
    action: list[int]
    logprobs: list[float] | None = None


class RecordedCall(msgspec.Struct):
    """A call as one span recorded it."""

    call: ModelCall
    response_id: str | None = None
    tokens: CallTokens | None = None
    is_exact: bool = False
    """Whether it has the provider's own fields, not a tracer's version of them."""


def is_call(name: str) -> bool:
    """Return whether a span of this name is a model call."""
    return _CALL.search(name) is not None


def read_recorded_call(attributes: dict[str, Any]) -> RecordedCall:
    """Build the call that attributes describe; its messages and tokens are removed from them."""
    proxy: dict[str, Any] = {}  # the request and response in the provider's form
    for key in [key for key in attributes if key.startswith("llm.") and key.count(".") == 2]:
        name = key.rpartition(".")[2]
        if name in _RESPONSE_KEYS:
            proxy[name] = parse_literal(attributes.pop(key))
        elif name in _SETTINGS:
            proxy[name] = attributes[key]
    weave_keys = (f"{_INPUT}.messages", f"{_OUTPUT}.choices")
    weave = {key: pop_indexed(attributes, key) for key in weave_keys if _has_prefix(attributes, key)}
    functions = [tool for key in ("functions", "tools") for tool in pop_indexed(attributes, f"gen_ai.request.{key}")]
    call = build_genai_call(attributes, [])
    tools = [{k: decode_payload(v) for k, v in tool.items()} if isinstance(tool, dict) else tool for tool in functions]
    call.tools = call.tools or tools or _as_list(proxy.get("tools"))
    sampling = {name: setting for name, setting in call.sampling.items() if name not in _NO_SETTINGS}
    call.sampling = sampling or {name: proxy[name] for name in _SETTINGS if proxy.get(name) is not None}
    response_id = get_text(attributes, "gen_ai.response.id", f"{_OUTPUT}.id") or get_text(proxy, "id")
    for source in (proxy, weave):
        prompt = source.get("messages", source.get(f"{_INPUT}.messages"))
        choices = source.get("choices", source.get(f"{_OUTPUT}.choices"))
        if isinstance(prompt, list) and not call.prompt:
            call.prompt = [message for entry in prompt for message in to_messages(entry, "user")] or None
        if isinstance(choices, list) and not call.answers:
            _add_answer(call, {**proxy, "choices": choices})
    call.model = call.model or get_text(attributes, f"{_OUTPUT}.model", f"{_INPUT}.model")
    tokens = _pop_tokens(attributes, proxy, weave.get(f"{_OUTPUT}.choices"))
    if tokens is not None and not call.answers:
        # The tokens of the answer are known, its text is not.
        call.answers = [{"role": "assistant", "content": ""}]
    return RecordedCall(call, response_id, tokens, is_exact="choices" in proxy)


def read_rewards(name: str, attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the rewards of a span by name, the one that counts first; a value may be null."""
    listed = pop_indexed(dict(attributes), _REWARD) if _has_prefix(attributes, _REWARD) else []
    if listed:
        rewards = [reward for reward in listed if isinstance(reward, dict) and "value" in reward]
        return [(get_text(reward, "name") or "reward", parse_numeric(reward.get("value"))) for reward in rewards]
    for key in ("agentops.task.output", "agentops.entity.output"):
        output = decode_payload(attributes.get(key))
        if isinstance(output, dict) and output.get("type") == "reward":
            return [("reward", parse_numeric(output.get("value")))]
    is_reward_span = name in _REWARD_SPANS and "reward" in attributes
    return [("reward", parse_numeric(attributes["reward"]))] if is_reward_span else []


def is_reward(name: str, attributes: dict[str, Any]) -> bool:
    """Return whether a span computes or holds a reward: calls inside it are a judge's."""
    return bool(read_rewards(name, attributes)) or attributes.get("agentlightning.operation.name") == _REWARD


def get_agent_name(name: str, attributes: dict[str, Any]) -> str | None:
    """Return the agent of a span, by the attributes of the tracers that the tool knows."""
    keys = ["agent.name", "recipient_agent_type", "langchain.chain.type", "executor.id"]
    keys += ["operation.name"] * _has_agentops_kind(attributes, "agent")
    keys += [f"{_INPUT}.name"] * (attributes.get("type") == "agent")
    keys += ["lc_name"] * name.startswith("langchain.Chain.")
    return get_text(attributes, *keys)


def build_span_tool(name: str, attributes: dict[str, Any]) -> Tool | None:
    """Build the execution of a tool that a span describes; None for another span."""
    tool_name = get_text(attributes, "tool.name", "gen_ai.tool.name")
    if tool_name is None and not _has_agentops_kind(attributes, "tool"):
        return None
    output = attributes.get("tool.result", attributes.get("gen_ai.tool.call.result"))
    is_text = output is None or isinstance(output, str)
    tool_name = tool_name or get_text(attributes, "operation.name")
    return Tool(
        name=tool_name or name,
        is_named=tool_name is not None,
        call_id=get_text(attributes, "tool.call.id", "tool.call_id", "gen_ai.tool.call.id"),
        arguments=attributes.get("tool.parameters", attributes.get("gen_ai.tool.call.arguments")),
        result=output if is_text else msgspec.json.encode(output).decode(),
    )


def read_links(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the attributes, with their values, of the spans that a span is about."""
    links = pop_indexed(dict(attributes), _LINK) if _has_prefix(attributes, _LINK) else []
    pairs = [(link.get("key_match"), link.get("value_match")) for link in links if isinstance(link, dict)]
    return [(key, match) for key, match in pairs if isinstance(key, str)]


def parse_literal(text: Any) -> Any:
    """Parse text of a Python literal or of JSON; other text, and other values, stay unchanged."""
    decoded = decode_payload(text)
    if not isinstance(decoded, str) or len(decoded) > _LONGEST_LITERAL:
        return decoded
    try:
        return ast.literal_eval(decoded)
    except _NOT_LITERAL:
        return decoded


def _add_answer(call: ModelCall, response: dict[str, Any]) -> None:
    try:
        answer = parse_completion(response)
    except ShapeError:
        call.extra["choices"] = response["choices"]
        return
    call.answers = [answer.message] if answer.message else []
    call.model = call.model or answer.model
    call.finish_reason = call.finish_reason or answer.finish_reason
    call.prompt_tokens = answer.prompt_tokens if call.prompt_tokens is None else call.prompt_tokens
    call.completion_tokens = answer.completion_tokens if call.completion_tokens is None else call.completion_tokens
    call.extra |= {key: field for key, field in answer.extra.items() if key in ("choices", "choice", "usage")}


def _pop_tokens(attributes: dict[str, Any], proxy: dict[str, Any], choices: list[Any] | None) -> CallTokens | None:
    answer = Completion()
    for listed in (proxy.get("choices"), choices):
        try:
            if isinstance(listed, list) and not answer.action_ids:
                answer = parse_completion({"choices": listed})
        except ShapeError:
            continue
    prompts = [attributes.pop("prompt_token_ids", None), attributes.pop(f"{_OUTPUT}.prompt_token_ids", None)]
    prompts += [proxy.get("prompt_token_ids"), answer.prompt_ids]
    actions = [attributes.pop("response_token_ids", None), attributes.pop(f"{_OUTPUT}.response_token_ids.0", None)]
    actions += [next(iter(_as_list(proxy.get("response_token_ids"))), None), answer.action_ids]
    sequences: list[list[int]] = []
    for candidates in (prompts, actions):
        for candidate in candidates:
            try:
                token_ids = msgspec.convert(parse_literal(candidate), list[Index])
            except msgspec.ValidationError:
                continue
            if token_ids:
                sequences.append(token_ids)
                break
        else:
            return None
    prompt, action = sequences
    logprobs = parse_logprobs({"content": decode_payload(attributes.get("logprobs.content"))}, len(action))
    if logprobs is not None:
        del attributes["logprobs.content"]
    elif answer.logprobs is not None and len(answer.logprobs) == len(action):
        logprobs = answer.logprobs
    return CallTokens(prompt, action, logprobs)


def _has_agentops_kind(attributes: dict[str, Any], kind: str) -> bool:
    # AgentOps also writes the name of its enumeration.
    return str(attributes.get("agentops.span.kind")).rpartition(".")[2].lower() == kind


def _as_list(field: Any) -> list[Any]:
    return field if isinstance(field, list) else []


def _has_prefix(attributes: dict[str, Any], prefix: str) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for key in attributes)


def to_seconds(time: Any) -> float | None:
    """Return a time in seconds; some tracers write nanoseconds."""
    number = parse_number(time)
    return None if not number or number < 0 else number / 1e9 if number > 1e12 else number


# ---------------------------------------------------------------- attempts

_MAPPED_KEYS = frozenset(
    ("rollout_id", "attempt_id", "trace_id", "span_id", "parent_id", "name", "attributes", "status")
)
_MAPPED_KEYS |= {"start_time", "end_time", "resource", "context", "parent"}


class _StoredSpan(msgspec.Struct):
    rollout_id: str
    span_id: str
    name: str
    attributes: dict[str, Any]
    attempt_id: str | None = None
    trace_id: str = ""
    parent_id: str | None = None
    sequence_id: int = 0
    status: dict[str, Any] | None = None
    start_time: Any = None
    end_time: Any = None


def recognise(head: FileHead) -> bool:
    """Return whether a file holds spans of attempts of rollouts, or a page of them."""
    keys = ("rollout_id", "attempt_id", "span_id", "attributes")
    pages = [span for page in head.objects for span in _as_list(page.get("items"))[:1]]
    return head.has(*keys) or any(isinstance(span, dict) and all(key in span for key in keys) for span in pages)


def read(file: Input) -> Iterator[Item]:
    """Read the records and rejects of a file; a record has the position of its rollout's first span."""
    elements = read_values(file, by_line=True)
    if read_head(file.path).has("items"):
        elements = (item for item in read_object_members(file, "items") if isinstance(item, Element | Reject))
    lost: dict[str, int] = {}
    for item in group_traces(group_by_rollout(elements, _check_span, lost)):
        if isinstance(item, Reject):
            yield item
        else:
            rollout_id, element = item
            convert = partial(convert_spans, file=file, lost=lost.get(rollout_id, 0))
            yield from convert_value(element, NAME, convert)


def _check_span(span: Any) -> None:
    _SpanAttempt([(msgspec.convert(span, _StoredSpan), span)])


def convert_spans(rows: list[dict[str, Any]], file: Input, lost: int = 0) -> list[EpisodeRecord]:
    """Convert the spans of a rollout to the episodes of each attempt.

    Raises:
        ShapeError: an attempt has no call with messages, and no reward.
    """
    attempts: dict[str, list[tuple[_StoredSpan, dict[str, Any]]]] = {}
    for row in rows:
        span = msgspec.convert(row, _StoredSpan)
        attempts.setdefault(span.attempt_id or "0", []).append((span, row))
    records: list[EpisodeRecord] = []
    previous: EpisodeRecord | None = None
    for number, (attempt_id, spans) in enumerate(attempts.items()):
        attempt_records = _SpanAttempt(spans).build_records(attempt_id, number, file)
        root = attempt_records[0]
        if previous is not None:
            root.relation, root.parent_episode_id = "retry", make_episode_text_id(previous, file)
        if lost:
            root.extra = (root.extra or {}) | {"lost_spans": lost}
        previous = root
        records += attempt_records
    return records


class _SpanAttempt:
    """The spans of an attempt in their order."""

    def __init__(self, spans: list[tuple[_StoredSpan, dict[str, Any]]]) -> None:
        pairs = sorted(spans, key=lambda pair: (pair[0].sequence_id, to_seconds(pair[0].start_time) or 0.0))
        self.stored = {span.span_id: span for span, _ in pairs}
        self.rows = {span.span_id: row for span, row in pairs}
        self.calls: dict[str, RecordedCall] = {}
        """The call that each span recorded."""
        self.step_spans: dict[str, str] = {}
        """Each span with a call -> the span that becomes the step."""
        self.resource = next((row["resource"] for row in self.rows.values() if row.get("resource")), None)
        self.spans = {span_id: self._build_span(s, number) for number, (span_id, s) in enumerate(self.stored.items())}
        self._merge_calls()
        self.env_return = self._add_rewards()

    def build_records(self, attempt_id: str, attempt: int, file: Input) -> list[EpisodeRecord]:
        """Build the episode of the attempt, then those of its sub-agents."""
        first = next(iter(self.stored.values()))
        extra = {"attempt_id": attempt_id, "resource": self.resource}
        trace = Trace(
            id=first.rollout_id,
            spans=list(self.spans.values()),
            task_id=first.rollout_id,
            attempt=attempt,
            capture_setting=_CAPTURE,
            extra={key: field for key, field in extra.items() if field},
        )
        records = build_episodes(trace, file, NAME)
        for record in records:
            self._add_times_and_tokens(record)
        records[0].env_return = self.env_return
        return records

    def _build_span(self, stored: _StoredSpan, number: int) -> Span:
        row, attributes, status = self.rows[stored.span_id], stored.attributes, stored.status or {}
        description = status.get("description")
        error = description if isinstance(description, str) and description else "ERROR"
        extra = {key: field for key, field in (omit_fields(row, *_MAPPED_KEYS) or {}).items() if field not in ([], {})}
        if row.get("resource") not in (None, self.resource):
            extra["resource"] = row["resource"]
        span = Span(
            id=stored.span_id,
            parent=stored.parent_id,
            name=stored.name,
            # The order stands for the time, because machines' clocks differ; `_add_times_and_tokens` sets the times.
            start=number,
            error=error if status.get("status_code") == "ERROR" else None,
            attributes=dict(attributes) | extra,
        )
        if is_reward(stored.name, attributes):
            span.kind = "reward"
        elif (tool := build_span_tool(stored.name, attributes)) is not None:
            span.kind, span.tool = "tool", tool
        elif (agent := get_agent_name(stored.name, attributes)) is not None:
            span.kind, span.agent = "agent", agent
        return span

    def _merge_calls(self) -> None:
        """Read the calls. Of the spans of one call, the one with the provider's fields becomes the step."""
        for span_id, stored in self.stored.items():
            if is_call(stored.name) and not self._is_judged(stored):
                self.spans[span_id].kind = "llm"
                self.calls[span_id] = read_recorded_call(self.spans[span_id].attributes)
        groups: dict[str, list[str]] = {}
        for span_id, recorded in self.calls.items():
            outer = self.calls.get(self.stored[span_id].parent_id or "")
            response_id = recorded.response_id or (outer and outer.response_id)
            key = f"span {span_id}" if response_id is None else f"response {response_id}"
            groups.setdefault(key, []).append(span_id)

        def rank(span_id: str) -> tuple[bool, bool]:
            call = self.calls[span_id].call
            return not self.calls[span_id].is_exact, not (call.prompt and call.answers)

        for span_ids in groups.values():
            ranked = sorted(span_ids, key=rank)
            calls = [self.calls[span_id] for span_id in ranked]
            self.step_spans |= dict.fromkeys(span_ids, ranked[0])
            merged = self.spans[ranked[0]].call = calls[0].call
            for name in ("prompt", "answers", "tools", "sampling", "model"):
                candidates = (getattr(recorded.call, name) for recorded in calls)
                setattr(merged, name, next((field for field in candidates if field), getattr(merged, name)))
            calls[0].tokens = next((recorded.tokens for recorded in calls if recorded.tokens), None)
            # The tool calls of an answer may only be in spans inside the call's.
            inside = [span for span in self.spans.values() if span.tool is not None and span.parent in span_ids]
            tools = [span.tool for span in inside if span.tool and span.tool.is_call]
            for span in inside:
                span.kind, span.tool = "tool_call", None
            if merged.answers and not merged.answers[0].get("tool_calls") and tools:
                tool_calls = [make_tool_call(tool.name, tool.arguments, tool.call_id) for tool in tools]
                merged.answers[0] = {**merged.answers[0], "tool_calls": tool_calls}

    def _is_judged(self, stored: _StoredSpan) -> bool:
        """Return whether a span runs inside a reward."""
        visited: set[str] = set()
        parent = stored.parent_id
        while parent is not None and parent in self.stored and parent not in visited:
            visited.add(parent)
            if self.spans[parent].kind == "reward":
                return True
            parent = self.stored[parent].parent_id
        return False

    def _add_rewards(self) -> float | None:
        """Add the rewards to their spans, and return the last number, which is the attempt's return."""
        env_return = None
        for span_id, stored in self.stored.items():
            rewards = read_rewards(stored.name, stored.attributes)
            links = dict(read_links(stored.attributes))
            target = self._find_linked_call(links) if links else None
            for name, reward in rewards:
                metrics = {"span_id": span_id, "links": links} if links else {"span_id": span_id}
                self.spans[target or span_id].scores.append(Score(scorer=name, value=reward, metrics=metrics))
            number = parse_number(rewards[0][1]) if rewards else None
            env_return = env_return if number is None else number
        return env_return

    def _find_linked_call(self, links: dict[str, Any]) -> str | None:
        """Return the step's span of the call whose attributes match all links."""
        for span_id, recorded in self.calls.items():
            stored = self.stored[span_id]
            span_ids = {"span_id": span_id, "trace_id": stored.trace_id, "gen_ai.response.id": recorded.response_id}
            attributes = {**span_ids, **stored.attributes}
            if all(attributes.get(key) == match for key, match in links.items()):
                return self.step_spans[span_id]
        return None

    def _add_times_and_tokens(self, record: EpisodeRecord) -> None:
        lineage = Lineage()
        for index, step in enumerate(record.steps):
            span_id = (step.extra or {}).get("span_id")
            if span_id not in self.stored:
                continue
            start, end = to_seconds(self.stored[span_id].start_time), to_seconds(self.stored[span_id].end_time)
            step.started_at = parse_time(start)
            step.latency = end - start if start and end and end >= start else None
            if (tokens := self.calls[span_id].tokens) is not None:
                sampling = read_sampling(self.calls[span_id].call.sampling)
                step.tokens = lineage.add(index, tokens.prompt, tokens.action, tokens.logprobs, **sampling)
                step.trainable = True
        times: list[datetime] = []
        for span in record.spans:
            stored = self.stored[span.span_id]
            span.trace_id = stored.trace_id or span.trace_id
            span.started_at = parse_time(to_seconds(stored.start_time))
            span.ended_at = parse_time(to_seconds(stored.end_time))
            times += [time for time in (span.started_at, span.ended_at) if time is not None]
        record.started_at, record.ended_at = min(times, default=None), max(times, default=None)


FORMAT = Format(NAME, "agent-lightning 0.x spans", recognise, read, is_whole=True, run_folder=get_parent_folder)
