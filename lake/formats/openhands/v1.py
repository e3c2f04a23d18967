"""Events of OpenHands V1 (software-agent-sdk): objects with a `kind`, joined by `llm_response_id` and `action_id`.

.. code-block:: text

    SystemPromptEvent   system_prompt, tools, dynamic_context
    MessageEvent        llm_message {role, content, ...}, extended_content; the agent's has an llm_response_id
    ActionEvent         thought, reasoning_content, thinking_blocks, tool_call {id, name, arguments}, action
    ObservationEvent    observation {content, is_error, ...}, tool_call_id; AgentErrorEvent, UserRejectObservation alike
    Condensation        summary of what is forgotten; the agent reads it from then on
    TokenEvent          the exact tokens of the call whose events came before
    LLMCompletionLogEvent   log_data: JSON text of a completion log
    ACPToolCallEvent    a call of an agent that runs elsewhere, once for each of its states
    ConversationStateUpdateEvent   execution_status, stats (sums so far), full_state, ...

A decision is the events that share an `llm_response_id`; an agent's event without one is a decision of its own. What
`action` repeats of the call's arguments is left out. The condenser's calls are not the agent's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import moment, number
from lake.formats.base.rows import rest
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input
from lake.formats.chat.messages import Message, text_of, tool_call
from lake.formats.openhands.talk import Talk
from lake.records import EpisodeRecord, Index

_COMMON = ("id", "timestamp", "source", "kind")
_FINISH = ("finish", "FinishTool")
_LIMITS = ("MaxIterationsReached", "MaxBudgetReached", "MaxBudgetExceeded")
_REPEATED = frozenset(("StreamingDeltaEvent",))
"""Kinds that another event repeats."""
_DECODE = msgspec.json.Decoder().decode


class _Call(msgspec.Struct):
    id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    function: dict[str, Any] | None = None

    def made(self) -> dict[str, Any]:
        """In the form of chat APIs, in which the first versions have it."""
        inner = self.function or {}
        given = self.arguments if self.arguments is not None else inner.get("arguments")
        return tool_call(self.name or str(inner.get("name", "")), given, self.id)


class _Said(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None


class _Event(msgspec.Struct):
    """Fields of the kinds that are read."""

    kind: str
    id: str | int | None = None
    timestamp: str | int | float | None = None
    source: str | None = None
    llm_response_id: str | None = None
    llm_message: _Said | None = None
    extended_content: list[Any] | None = None
    thought: str | list[Any] | None = None
    reasoning_content: str | None = None
    thinking_blocks: list[Any] | None = None
    action: dict[str, Any] | None = None
    tool_call: _Call | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    observation: dict[str, Any] | None = None
    error: str | None = None
    rejection_reason: str | None = None
    system_prompt: dict[str, Any] | str | None = None
    dynamic_context: dict[str, Any] | str | None = None
    tools: list[Any] | None = None
    summary: str | None = None
    prompt_token_ids: list[Index] | None = None
    response_token_ids: list[Index] | None = None
    log_data: str | None = None
    key: str | None = None
    value: Any = None


_SETTINGS = ("temperature", "top_p", "top_k", "max_output_tokens", "seed")
"""How the agent's model was asked, of what the state says of it."""


class Events:
    """Events so far."""

    def __init__(self, name: str) -> None:
        self.task: str | None = None
        """The task, where it has a name."""
        self._name = name
        self._talk = Talk(name)
        self._state: dict[str, Any] = {}
        self._fault: tuple[str, str] | None = None
        self._finished = False
        self._running: dict[str, dict[str, Any]] = {}
        self._handlers: dict[str, Callable[[_Event, dict[str, Any]], None]] = {
            "SystemPromptEvent": self._prompt,
            "MessageEvent": self._message,
            "ActionEvent": self._action,
            "ObservationEvent": self._observation,
            "AgentErrorEvent": self._observation,
            "UserRejectObservation": self._observation,
            "Condensation": self._condensed,
            "CondensationSummaryEvent": self._condensed,
            "TokenEvent": self._tokens,
            "LLMCompletionLogEvent": self._log,
            "ACPToolCallEvent": self._remote,
            "ConversationStateUpdateEvent": self._update,
        }

    def add(self, given: dict[str, Any]) -> None:
        """One more event. Raises msgspec.ValidationError: fields of wrong types."""
        event = msgspec.convert(given, _Event)
        kind = event.kind.rpartition(".")[2]
        if (time := moment(event.timestamp)) is not None:
            self._talk.times.append(time)
        if kind in _REPEATED:
            return
        if kind == "ConversationErrorEvent":
            code, detail = str(given.get("code")), str(given.get("detail"))
            self._fault = code, detail
            self._talk.note("error", kind, given, error=f"{code}: {detail}")
        elif (handle := self._handlers.get(kind)) is not None:
            handle(event, given)
        else:
            self._talk.note("event", kind, given)

    def records(self, _: Input, state: Any = None) -> list[EpisodeRecord]:
        """The conversation's episode; `state` is what base_state.json says of it."""
        self._state |= state if isinstance(state, dict) else {}
        for usage in self._usages():
            self._measure(usage)
        record = self._talk.record(self._name, self.task)
        spent = list(self._usages())
        for field, key in (("prompt_tokens", "prompt_tokens"), ("completion_tokens", "completion_tokens")):
            counts = [_object(usage.get("accumulated_token_usage")).get(key) for usage in spent]
            if found := [count for count in counts if type(count) is int and 0 <= count < 1 << 62]:
                setattr(record, field, sum(found))
        costs = [cost for usage in spent if (cost := number(usage.get("accumulated_cost"))) is not None]
        record.cost = sum(costs) if costs else record.cost
        llm = _object(_object(self._state.get("agent")).get("llm"))
        names = [llm.get("model"), *(usage.get("model_name") for usage in spent)]
        record.policy = next((name for name in names if isinstance(name, str) and name), record.policy)
        record.sampling = record.sampling or {key: llm[key] for key in _SETTINGS if llm.get(key) is not None} or None
        if self._state:
            record.extra = {"state": without_secrets(self._state)}
        self._end(record)
        return [record]

    def _end(self, record: EpisodeRecord) -> None:
        status = self._state.get("execution_status") or self._state.get("agent_status")
        record.stop_reason = status if isinstance(status, str) else None
        if self._fault is not None:
            code, detail = self._fault
            record.stop_reason, record.error = code, f"{code}: {detail}"
            is_limit = code in _LIMITS
            record.status, record.terminated = ("truncated", False) if is_limit else ("failed", None)
        elif self._finished or status == "finished":
            record.terminated = True
        elif status in ("error", "stuck"):
            record.status = "failed"
        elif status in ("running", "paused", "deleting"):
            record.status = "aborted"

    def _usages(self) -> Iterator[dict[str, Any]]:
        usages = _object(_object(self._state.get("stats")).get("usage_to_metrics"))
        return (usage for usage in usages.values() if isinstance(usage, dict))

    def _measure(self, usage: dict[str, Any]) -> None:
        """What the statistics say of single calls."""
        for item in _list(usage.get("response_latencies")):
            call = self._talk.calls.get(str(_object(item).get("response_id")))
            if call is not None and call.latency is None:
                call.latency = number(item.get("latency"))
        for item in _list(usage.get("token_usages")):
            call = self._talk.calls.get(str(_object(item).get("response_id")))
            if call is not None and call.answer is None:
                call.answer = {"model": item.get("model"), "usage": item}

    def _prompt(self, event: _Event, given: dict[str, Any]) -> None:
        self._talk.tools = event.tools or self._talk.tools
        parts = [part for part in (event.system_prompt, event.dynamic_context) if part is not None]
        kept = rest(given, *_COMMON, "system_prompt", "dynamic_context", "tools") or {}
        self._talk.observe(kept | {"role": "system", "content": _content(parts)})

    def _message(self, event: _Event, given: dict[str, Any]) -> None:
        said = event.llm_message or _Said("user")
        known = ("role", "content", "tool_calls", "reasoning_content", "thinking_blocks")
        more = rest(_object(given.get("llm_message")), *known) or {}
        more = {key: value for key, value in more.items() if value not in ([], False)}
        kept = rest(given, "source", "kind", "llm_message", "llm_response_id", "extended_content") or {}
        kept = {key: value for key, value in kept.items() if value not in ([], {})} | more
        if event.source == "agent":
            blocks = _list(_object(given.get("llm_message")).get("thinking_blocks"))
            message: Message = {"content": _content(said.content), "thinking_blocks": blocks or None}
            message["reasoning_content"] = _thought(said.reasoning_content, blocks)
            if said.tool_calls:
                message["tool_calls"] = [call.made() for call in said.tool_calls]
            self._talk.decide(event.llm_response_id or f"event {event.id}", message, kept)
            return
        parts = said.content if isinstance(said.content, list) else [said.content or ""]
        content = _content([*parts, *(event.extended_content or ())])
        self._talk.observe(kept | {"role": said.role, "content": content})

    def _action(self, event: _Event, given: dict[str, Any]) -> None:
        call = event.tool_call or _Call(event.tool_call_id, event.tool_name, event.action)
        made = call.made()
        message: Message = {"content": _content(event.thought), "tool_calls": [made]}
        message["reasoning_content"] = _thought(event.reasoning_content, event.thinking_blocks)
        message["thinking_blocks"] = event.thinking_blocks or None
        known = ("tool_call", "tool_name", "tool_call_id", "llm_response_id", "thought", "reasoning_content", "action")
        kept = rest(given, "source", "kind", "thinking_blocks", *known) or {}
        if kept.get("security_risk") == "UNKNOWN":
            del kept["security_risk"]
        if action := _beyond(event.action or {}, made["function"]["arguments"]):
            kept["action"] = action
        self._finished = made["function"]["name"] in _FINISH
        self._talk.decide(event.llm_response_id or f"event {event.id}", message, kept)

    def _observation(self, event: _Event, given: dict[str, Any]) -> None:
        inner = event.observation or {}
        known = ("observation", "tool_call_id", "tool_name", "error", "rejection_reason", "extended_content", "source")
        kept = rest(given, "kind", *known) or {}
        kept["kind"] = inner.get("kind") or event.kind
        content = inner.get("content", event.error if event.error is not None else event.rejection_reason)
        # The first versions have it under other names.
        named = next((key for key in ("output", "message", "text") if isinstance(inner.get(key), str)), None)
        if content is None:
            content = "" if named is None else inner[named]
        if more := rest(inner, "content", "is_error", "kind", *([named] if named and content == inner[named] else [])):
            kept["observation"] = more
        if event.extended_content:
            content = [*(content if isinstance(content, list) else [content]), *event.extended_content]
        message = kept | {"role": "tool", "tool_call_id": event.tool_call_id, "content": _content(content)}
        message |= {"name": event.tool_name} if event.tool_name else {}
        is_error = True if event.error is not None else inner.get("is_error", inner.get("error"))
        self._talk.observe(message | ({"is_error": is_error} if isinstance(is_error, bool) else {}))

    def _condensed(self, event: _Event, given: dict[str, Any]) -> None:
        if event.summary is None:
            self._talk.note("event", event.kind, given)
        else:
            self._talk.observe((rest(given, "source", "summary") or {}) | {"role": "user", "content": event.summary})

    def _tokens(self, event: _Event, given: dict[str, Any]) -> None:
        call = self._talk.last
        if call is None or call.prompt_ids is not None or not event.prompt_token_ids or not event.response_token_ids:
            self._talk.note("event", event.kind, given)
        else:
            call.prompt_ids, call.action_ids = event.prompt_token_ids, event.response_token_ids

    def _log(self, event: _Event, given: dict[str, Any]) -> None:
        try:
            log = _object(_DECODE(event.log_data or "null"))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            log = {}
        answer = _object(log.get("response"))
        call = self._talk.calls.get(str(answer.get("id")))
        if call is None:
            kept = {key: value for key, value in given.items() if key != "log_data"}
            self._talk.note("prompt", event.kind, kept | (rest(log, "messages", "tools", "input") or {}))
            return
        call.answer, call.cost, call.latency = answer, number(log.get("cost")), number(log.get("latency_sec"))

    def _remote(self, event: _Event, given: dict[str, Any]) -> None:
        """A call of an agent that runs elsewhere: it is a decision when it begins, and a result when it ends."""
        call_id = event.tool_call_id or str(event.id)
        if call_id not in self._running:
            name = given.get("tool_kind") or given.get("title") or "tool"
            call = tool_call(str(name), given.get("raw_input"), call_id)
            kept = rest(given, "source", "kind", "raw_input", "raw_output", "content", "tool_call_id") or {}
            self._talk.decide(f"call {call_id}", {"content": "", "tool_calls": [call]}, kept)
            self._running[call_id] = given
        if given.get("status") in ("completed", "failed"):
            raw, content = given.get("raw_output"), given.get("content")
            said = raw if isinstance(raw, str) else "" if raw is None else msgspec.json.encode(raw).decode()
            message: Message = {"role": "tool", "tool_call_id": call_id, "content": said}
            message |= {"parts": content} if content else {}
            self._talk.observe(message | ({"is_error": True} if given.get("is_error") is True else {}))

    def _update(self, event: _Event, given: dict[str, Any]) -> None:
        """A change of the state. The sums in it grow with each: the last ones count."""
        if event.key == "full_state" and isinstance(event.value, dict):
            self._state |= event.value
        elif event.key in ("stats", "execution_status", "agent_status"):
            self._state[event.key] = event.value
        else:
            self._talk.note("event", event.kind, given)


def _beyond(action: dict[str, Any], arguments: Any) -> dict[str, Any] | None:
    """What the tool's action has that the call's arguments do not."""
    try:
        given = _object(_DECODE(arguments) if isinstance(arguments, str) else arguments)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        given = {}
    return {k: v for k, v in action.items() if v is not None and (k not in given or given[k] != v)} or None


def _content(given: Any) -> Any:
    """Parts as a content: one text where they are only text of one part."""
    parts = given if isinstance(given, list) else [given]
    texts = [text for part in parts if isinstance(text := part.get("text") if isinstance(part, dict) else part, str)]
    if len(parts) <= 1 and len(texts) == len(parts):
        return "".join(texts)
    if all(part is None for part in parts):
        return ""
    return given if isinstance(given, list) else text_of([given]) if isinstance(given, dict) else given


def _thought(said: str | None, blocks: Any) -> str | None:
    """The reasoning: where it is not written out, what the blocks hold of it."""
    texts = [_object(block).get("thinking") for block in _list(blocks)]
    return said or "".join(text for text in texts if isinstance(text, str)) or None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
