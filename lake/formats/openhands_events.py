"""Events of OpenHands conversations, of V0 and V1, as messages, decisions and spans.

V0 (and OpenDevin), actions and observations:

.. code-block:: text

    id, timestamp, source (agent, user, environment), message (for a person), cause (the action that it answers)
    action, args                    run, read, edit, browse, message, finish, delegate, ...; system is the prompt
    observation, content, extras    results; error, agent_state_changed, null, ...
    tool_call_metadata              {function_name, tool_call_id, model_response (the complete answer), ...}
    llm_metrics                     sums so far

A decision is the actions that share an answer (`model_response.id`). An action of the agent without one is a separate
decision. The tool makes some actions itself: the prompt, changes of state, condensed memory. Events that follow a
`delegate` action, up to its observation, are the sub-agent's.

V1 (software-agent-sdk), objects with a `kind`, joined by `llm_response_id` and `action_id`:

.. code-block:: text

    SystemPromptEvent   system_prompt, tools, dynamic_context
    MessageEvent        llm_message {role, content, ...}, extended_content; the agent's has an llm_response_id
    ActionEvent         thought, reasoning_content, thinking_blocks, tool_call {id, name, arguments}, action
    ObservationEvent    observation {content, is_error, ...}, tool_call_id; AgentErrorEvent, UserRejectObservation alike
    Condensation        summary that replaces forgotten events; the agent reads it from then on
    TokenEvent          the exact tokens of the call whose events came before
    LLMCompletionLogEvent   log_data: JSON text of a completion log
    ACPToolCallEvent    a call of an agent that runs elsewhere, once for each of its states
    ConversationStateUpdateEvent   execution_status, stats (sums so far), full_state, ...

A decision is the events that share an `llm_response_id`; an agent's event without one is a separate decision. The
condenser's calls are not the agent's.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

from lake.formats.base.fields import as_object, hash_rollout_index, make_prompt_task_id, parse_number, parse_time
from lake.formats.base.rows import make_episode_text_id, omit_fields
from lake.formats.base.source import Input
from lake.formats.chat.completions import Lineage, apply_answer
from lake.formats.chat.messages import Message, check_message, join_text, make_tool_call, parse_chat
from lake.formats.chat.sessions import SpanList, parse_token_count, set_chat_fields
from lake.formats.tracing.payloads import list_objects, to_text
from lake.records import EpisodeRecord, Index
from lake.secrets import remove_keys

NAME = "openhands"
_CALL_KEY = "call"
"""Key of a decision's message with the key of its call, until the steps are made."""
_TOOL_ACTIONS = frozenset(("change_agent_state", "condensation", "condensation_request", "loop_recovery", "null"))
_TOOL_ACTIONS |= {"pause", "recall", "resume", "start", "stop", "system", "task_tracking_reset"}
"""Actions that no model decided on, in spite of their source."""
_HIDDEN_OBSERVATIONS = frozenset(("agent_state_changed", "null", "recall", "user_rejected_state", "server_ready"))
"""Observations that a model does not read."""
_V0_LIMITS = ("maximum iteration", "max iteration", "maximum budget", "max budget")
_COMMON_KEYS = ("id", "timestamp", "source", "kind")
_FINISH_TOOLS = ("finish", "FinishTool")
_V1_LIMITS = ("MaxIterationsReached", "MaxBudgetReached", "MaxBudgetExceeded")
_DECODE = msgspec.json.Decoder().decode
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "max_output_tokens", "seed")
"""Sampling settings in the state of the agent's model."""


class OpenHandsCall(msgspec.Struct):
    """The model call of a decision."""

    key: str
    answer: Any = None
    prompt_ids: list[int] | None = None
    action_ids: list[int] | None = None
    cost: float | None = None
    latency: float | None = None
    started_at: datetime | None = None


class AgentConversation:
    """The messages, calls and spans of one agent."""

    def __init__(self, name: str) -> None:
        self.messages: list[Message] = []
        self.calls: dict[str, OpenHandsCall] = {}
        self.times: list[datetime] = []
        self.tools: list[Any] | None = None
        self.version: str | None = None
        self._decisions: dict[str, Message] = {}
        self._spans = SpanList(name)

    def extend_decision(self, key: str, message: Message, event: dict[str, Any], answer: Any = None) -> None:
        """Add an event to a decision, which has the position of its first event. Raises ShapeError: a wrong message."""
        check_message(message | {"role": "assistant"}, "event")
        events = [event] if event else []
        if (decision := self._decisions.get(key)) is None:
            self.calls[key] = OpenHandsCall(key, answer, started_at=parse_time(event.get("timestamp")))
            self._decisions[key] = message | {"role": "assistant", _CALL_KEY: key, "events": events}
            self.messages.append(self._decisions[key])
            return
        decision["events"] += events
        if text := join_text(message.get("content")):
            decision["content"] = join_text(decision.get("content")) + text
        for name in ("tool_calls", "thinking_blocks", "reasoning_content"):
            if message.get(name):
                decision[name] = decision[name] + message[name] if decision.get(name) else message[name]

    def add_observation(self, message: Message) -> None:
        """Add a message that the agent sees. Raises ShapeError: a message of a wrong shape."""
        self.messages.append(check_message(message, "event"))

    def add_span(self, kind: str, name: str, event: dict[str, Any], *, error: str | None = None) -> None:
        """Add an event that is not a message."""
        span_id = str(event.get("id", f"{name}-{len(self._spans.records)}"))
        time, attributes = parse_time(event.get("timestamp")), omit_fields(event, "id", "timestamp")
        steps = len(self._decisions)
        self._spans.add(kind, name, span_id, steps=steps, started_at=time, error=error, attributes=attributes)

    def build_record(self, name: str, task: str | None = None) -> EpisodeRecord:
        """Return the episode; `name` identifies the conversation."""
        chat = parse_chat(self.messages, is_decision=lambda message: _CALL_KEY in message)
        lineage = Lineage()
        for index, step in enumerate(chat.steps):
            extra = step.extra or {}
            call = self.calls[extra.pop(_CALL_KEY)]
            step.cost, step.latency = call.cost, call.latency
            if call.answer is not None and (response := apply_answer(step, call.answer, lineage, index)) is not None:
                extra["response"] = response
            # All events share one clock; the engine's clock differs, often by a time zone.
            step.started_at = call.started_at or step.started_at
            if step.tokens is None and call.prompt_ids and call.action_ids:
                step.tokens = lineage.add(index, call.prompt_ids, call.action_ids)
            if not extra.get("events"):
                extra.pop("events", None)
            step.extra = extra or None
        if task is None:
            questions = (join_text(m.get("content"), "\n") for m in chat.initial_messages if m["role"] == "user")
            task = name if (question := next(questions, None)) is None else make_prompt_task_id(question)
        record = EpisodeRecord(
            task_id=task,
            rollout_index=hash_rollout_index(name),
            steps=[],
            tools=self.tools,
            started_at=min(self.times, default=None),
            ended_at=max(self.times, default=None),
            source_version=self.version,
            spans=self._spans.records,
            source_format=NAME,
        )
        set_chat_fields(record, chat)
        return record


class _CallMetadata(msgspec.Struct):
    function_name: str | None = None
    tool_call_id: str | None = None
    model_response: dict[str, Any] | None = None


class _V0Event(msgspec.Struct):
    id: int | str | None = None
    timestamp: str | int | float | None = None
    source: str | None = None
    message: str | None = None
    cause: int | str | None = None
    action: str | None = None
    args: dict[str, Any] | None = None
    observation: str | None = None
    content: str | None = None
    extras: dict[str, Any] | None = None
    tool_call_metadata: _CallMetadata | None = None
    llm_metrics: dict[str, Any] | None = None


class _AgentFrame(msgspec.Struct):
    talk: AgentConversation
    agent: str | None = None
    parent: int | None = None
    """Index of the delegating agent's frame."""
    step: int | None = None


class V0Conversation:
    """The events of a V0 conversation so far."""

    def __init__(self, name: str) -> None:
        self.task: str | None = None
        """The task, if it has a name."""
        self._name = name
        self._frames = [_AgentFrame(AgentConversation(name))]
        self._active = [0]
        self._calls: dict[Any, tuple[str | None, str | None]] = {}
        self._metrics: dict[str, Any] = {}
        self._state: tuple[str, str | None] | None = None
        self._is_finished = False

    def add(self, raw: dict[str, Any]) -> None:
        """Add an event. Raises msgspec.ValidationError: fields of wrong types."""
        event = msgspec.convert(raw, _V0Event)
        chat = self._frames[self._active[-1]].talk
        if (time := parse_time(event.timestamp)) is not None:
            self._frames[0].talk.times.append(time)
        self._metrics = event.llm_metrics or self._metrics
        if event.action is not None:
            self._add_action(event, raw, chat)
        else:
            self._add_observation(event, raw, chat)

    def build_records(self, file: Input) -> list[EpisodeRecord]:
        """Return the main agent's episode, and those of the agents that it delegated to."""
        records = [frame.talk.build_record(self._name, self.task) for frame in self._frames]
        main = records[0]
        for frame, record in zip(self._frames, records, strict=True):
            record.task_id, record.rollout_index, record.agent_id = main.task_id, main.rollout_index, frame.agent
            if frame.parent is not None:
                record.relation, record.parent_step_index = "subagent", frame.step
                record.parent_episode_id = make_episode_text_id(records[frame.parent], file)
                record.root_episode_id = make_episode_text_id(main, file)
        self._set_end(main)
        if self._metrics:
            usage = as_object(self._metrics.get("accumulated_token_usage"))
            for name in ("prompt_tokens", "completion_tokens"):
                if (count := parse_token_count(usage.get(name))) is not None:
                    setattr(main, name, count)
            main.cost = parse_number(self._metrics.get("accumulated_cost"))
            main.extra = (main.extra or {}) | {"llm_metrics": self._metrics}
        if idle := [record.initial_messages for record in records[1:] if not record.steps]:
            main.extra = (main.extra or {}) | {"delegates_without_a_decision": idle}
        return [main, *(record for record in records[1:] if record.steps)]

    def _set_end(self, record: EpisodeRecord) -> None:
        state, reason = self._state or (None, None)
        record.stop_reason = "finish" if self._is_finished else state
        if self._is_finished or state == "finished":
            record.terminated = True
        elif state == "error":
            is_limit = any(words in (reason or "").lower() for words in _V0_LIMITS)
            record.status, record.error = ("truncated" if is_limit else "failed"), reason
            record.terminated = False if is_limit else None
        elif state in ("stopped", "paused", "rejected"):
            record.status = "aborted"

    def _add_action(self, event: _V0Event, raw: dict[str, Any], chat: AgentConversation) -> None:
        args = event.args or {}
        assert event.action is not None
        if event.action == "system":
            chat.tools = args["tools"] if isinstance(args.get("tools"), list) else chat.tools
            version = args.get("openhands_version")
            chat.version = version if isinstance(version, str) else chat.version
            fields = omit_fields(args, "content", "tools", "openhands_version") or {}
            chat.add_observation(fields | {"role": "system", "content": _text_or_empty(args.get("content"))})
        elif event.action == "condensation" and isinstance(summary := args.get("summary"), str):
            chat.add_observation({"role": "user", "content": summary, "event": omit_fields(raw, "llm_metrics")})
        elif event.action in _TOOL_ACTIONS:
            chat.add_span("event", event.action, omit_fields(raw, "llm_metrics") or {})
        elif event.source == "agent":
            self._add_decision(event, raw, chat)
        else:
            is_message = event.action == "message"
            content = _text_or_empty(args.get("content") if is_message else event.message)
            fields = omit_fields(raw, *(["action"] if is_message else []), "message", "args", "llm_metrics") or {}
            extra_args = omit_fields(args, "content") if is_message else args
            fields |= {"role": "user", "content": content} | ({"args": extra_args} if extra_args else {})
            chat.add_observation(fields)

    def _add_decision(self, event: _V0Event, raw: dict[str, Any], chat: AgentConversation) -> None:
        metadata, args = event.tool_call_metadata or _CallMetadata(), event.args or {}
        answer = metadata.model_response
        answer_id = (answer or {}).get("id")
        # Early events have no ids, or one id for all.
        key = answer_id if isinstance(answer_id, str) else f"event {len(chat.messages)}"
        self._calls[event.id] = metadata.tool_call_id, metadata.function_name
        choices = (answer or {}).get("choices")
        choice = as_object(choices[0]) if isinstance(choices, list) and choices else {}
        answer_message = choice["message"] if isinstance(choice.get("message"), dict) else None
        message: dict[str, Any] = {}
        if answer_message is not None:
            message = {"content": answer_message.get("content"), "tool_calls": answer_message.get("tool_calls") or None}
        elif event.action == "message":
            message = {"content": _text_or_empty(args.get("content"))}
        else:
            text = _text_or_empty(args.get("thought")) or _text_or_empty(args.get("final_thought"))
            arguments = {key: arg for key, arg in args.items() if key != "thought"}
            call = make_tool_call(metadata.function_name or event.action or "", arguments, metadata.tool_call_id)
            message = {"content": text, "tool_calls": [call]}
        if key in chat.calls and answer_message is not None:
            message = {}
        repeated_keys = [name for name in ("content", "thought") if args.get(name) == message.get("content")]
        fields = omit_fields(raw, "source", "tool_call_metadata", "llm_metrics", "args") or {}
        has_arguments = answer_message is None and event.action != "message"
        if not has_arguments and (extra_args := omit_fields(args, *repeated_keys)):
            fields["args"] = extra_args
        chat.extend_decision(key, message, fields, answer)
        if event.action == "finish" and len(self._active) == 1:
            self._is_finished = True
        if event.action == "delegate":
            agent = f"{_text_or_empty(args.get('agent')) or 'delegate'}:{event.id}"
            child = _AgentFrame(AgentConversation(self._name), agent, self._active[-1], len(chat.calls) - 1)
            self._active.append(len(self._frames))
            self._frames.append(child)

    def _add_observation(self, event: _V0Event, raw: dict[str, Any], chat: AgentConversation) -> None:
        if event.observation == "delegate" and len(self._active) > 1:
            self._active.pop()
            chat = self._frames[self._active[-1]].talk
        extras = event.extras or {}
        if event.observation == "agent_state_changed":
            self._state = str(extras.get("agent_state")), _text_or_empty(extras.get("reason")) or None
        if event.observation is None or event.observation in _HIDDEN_OBSERVATIONS:
            name = event.observation or "event"
            chat.add_span("event", name, omit_fields(raw, "llm_metrics", "tool_call_metadata") or {})
            return
        metadata = event.tool_call_metadata or _CallMetadata()
        call = self._calls.get(event.cause, (None, None))
        call_id, function = metadata.tool_call_id or call[0], metadata.function_name or call[1]
        fields = omit_fields(raw, "content", "tool_call_metadata", "llm_metrics") or {}
        message = fields | {"role": "tool" if call_id else "user", "content": event.content or ""}
        message |= {"tool_call_id": call_id} if call_id else {}
        message |= {"name": function} if call_id and function else {}
        chat.add_observation(message | ({"is_error": True} if event.observation == "error" else {}))


def nest_arguments(event: Any) -> Any:
    """Return an event of the resolver's output in the common form, with arguments in `args` or `extras`.

    The resolver does not name the source. The agent acts, except for messages that wait for no answer: those are a
    person's.
    """
    if not isinstance(event, dict) or {"args", "extras", "source", "kind"} & event.keys():
        return event
    fields = {key: event[key] for key in ("id", "timestamp", "action", "observation", "cause") if key in event}
    if "action" in event:
        is_users = event["action"] == "message" and event.get("wait_for_response") is not True
        args = omit_fields(event, "action", "id", "timestamp")
        return fields | {"source": "user" if is_users else "agent", "args": args or {}}
    if "observation" in event:
        extras = omit_fields(event, "observation", "content", "id", "timestamp", "cause")
        return fields | {"source": "environment", "content": event.get("content"), "extras": extras or {}}
    return event


def _text_or_empty(value: Any) -> str:
    return value if isinstance(value, str) else ""


class _V1Call(msgspec.Struct):
    id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    function: dict[str, Any] | None = None

    def convert(self) -> dict[str, Any]:
        """Return it in the form of chat APIs, which the first versions use."""
        function = self.function or {}
        arguments = self.arguments if self.arguments is not None else function.get("arguments")
        return make_tool_call(self.name or str(function.get("name", "")), arguments, self.id)


class _V1Message(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None
    tool_calls: list[_V1Call] | None = None
    reasoning_content: str | None = None


class _V1Event(msgspec.Struct):
    kind: str
    id: str | int | None = None
    timestamp: str | int | float | None = None
    source: str | None = None
    llm_response_id: str | None = None
    llm_message: _V1Message | None = None
    extended_content: list[Any] | None = None
    thought: str | list[Any] | None = None
    reasoning_content: str | None = None
    thinking_blocks: list[Any] | None = None
    action: dict[str, Any] | None = None
    tool_call: _V1Call | None = None
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


class V1Conversation:
    """The events of a V1 conversation so far."""

    def __init__(self, name: str) -> None:
        self.task: str | None = None
        """The task, if it has a name."""
        self._name = name
        self._chat = AgentConversation(name)
        self._state: dict[str, Any] = {}
        self._fault: tuple[str, str] | None = None
        self._is_finished = False
        self._running: dict[str, dict[str, Any]] = {}
        self._handlers: dict[str, Callable[[_V1Event, dict[str, Any]], None]] = {
            **dict.fromkeys(("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"), self._add_observation),
            **dict.fromkeys(("Condensation", "CondensationSummaryEvent"), self._add_summary),
            "SystemPromptEvent": self._add_prompt,
            "MessageEvent": self._add_message,
            "ActionEvent": self._add_action,
            "TokenEvent": self._add_tokens,
            "LLMCompletionLogEvent": self._add_log,
            "ACPToolCallEvent": self._add_remote_call,
            "ConversationStateUpdateEvent": self._update_state,
        }

    def add(self, raw: dict[str, Any]) -> None:
        """Add an event. Raises msgspec.ValidationError: fields of wrong types."""
        event = msgspec.convert(raw, _V1Event)
        kind = event.kind.rpartition(".")[2]
        if (time := parse_time(event.timestamp)) is not None:
            self._chat.times.append(time)
        if kind == "StreamingDeltaEvent":  # it repeats a part of another event
            return
        if kind == "ConversationErrorEvent":
            code, detail = str(raw.get("code")), str(raw.get("detail"))
            self._fault = code, detail
            self._chat.add_span("error", kind, raw, error=f"{code}: {detail}")
        elif (handle := self._handlers.get(kind)) is not None:
            handle(event, raw)
        else:
            self._chat.add_span("event", kind, raw)

    def build_records(self, state: Any = None) -> list[EpisodeRecord]:
        """Return the conversation's episode; `state` is base_state.json."""
        self._state |= as_object(state)
        usage_by_model = as_object(as_object(self._state.get("stats")).get("usage_to_metrics"))
        usages = [usage for usage in usage_by_model.values() if isinstance(usage, dict)]
        for usage in usages:
            for latency in list_objects(usage.get("response_latencies")):
                call = self._chat.calls.get(str(latency.get("response_id")))
                if call is not None and call.latency is None:
                    call.latency = parse_number(latency.get("latency"))
            for call_usage in list_objects(usage.get("token_usages")):
                call = self._chat.calls.get(str(call_usage.get("response_id")))
                if call is not None and call.answer is None:
                    call.answer = {"model": call_usage.get("model"), "usage": call_usage}
        record = self._chat.build_record(self._name, self.task)
        for name in ("prompt_tokens", "completion_tokens"):
            sums = [as_object(usage.get("accumulated_token_usage")).get(name) for usage in usages]
            if counts := [count for count in sums if type(count) is int and 0 <= count < 1 << 62]:
                setattr(record, name, sum(counts))
        costs = [cost for usage in usages if (cost := parse_number(usage.get("accumulated_cost"))) is not None]
        record.cost = sum(costs) if costs else record.cost
        llm = as_object(as_object(self._state.get("agent")).get("llm"))
        names = [llm.get("model"), *(usage.get("model_name") for usage in usages)]
        record.policy = next((name for name in names if isinstance(name, str) and name), record.policy)
        sampling = {key: llm[key] for key in _SAMPLING_KEYS if llm.get(key) is not None}
        record.sampling = record.sampling or sampling or None
        if self._state:
            record.extra = {"state": remove_keys(self._state)}
        self._set_end(record)
        return [record]

    def _set_end(self, record: EpisodeRecord) -> None:
        status = self._state.get("execution_status") or self._state.get("agent_status")
        record.stop_reason = status if isinstance(status, str) else None
        if self._fault is not None:
            code, detail = self._fault
            record.stop_reason, record.error = code, f"{code}: {detail}"
            is_limit = code in _V1_LIMITS
            record.status, record.terminated = ("truncated", False) if is_limit else ("failed", None)
        elif self._is_finished or status == "finished":
            record.terminated = True
        elif status in ("error", "stuck"):
            record.status = "failed"
        elif status in ("running", "paused", "deleting"):
            record.status = "aborted"

    def _add_prompt(self, event: _V1Event, raw: dict[str, Any]) -> None:
        self._chat.tools = event.tools or self._chat.tools
        texts = [part for part in (event.system_prompt, event.dynamic_context) if part is not None]
        fields = omit_fields(raw, *_COMMON_KEYS, "system_prompt", "dynamic_context", "tools") or {}
        self._chat.add_observation(fields | {"role": "system", "content": _join_content(texts)})

    def _add_message(self, event: _V1Event, raw: dict[str, Any]) -> None:
        llm_message = event.llm_message or _V1Message("user")
        raw_message = as_object(raw.get("llm_message"))
        mapped_keys = ("role", "content", "tool_calls", "reasoning_content", "thinking_blocks")
        message_fields = omit_fields(raw_message, *mapped_keys) or {}
        fields = omit_fields(raw, "source", "kind", "llm_message", "llm_response_id", "extended_content") or {}
        fields = {key: field for key, field in fields.items() if field not in ([], {})}
        fields |= {key: field for key, field in message_fields.items() if field not in ([], False)}
        if event.source == "agent":
            blocks = raw_message["thinking_blocks"] if isinstance(raw_message.get("thinking_blocks"), list) else []
            message: Message = {"content": _join_content(llm_message.content), "thinking_blocks": blocks or None}
            message["reasoning_content"] = _join_reasoning(llm_message.reasoning_content, blocks)
            if llm_message.tool_calls:
                message["tool_calls"] = [call.convert() for call in llm_message.tool_calls]
            self._chat.extend_decision(event.llm_response_id or f"event {event.id}", message, fields)
            return
        contents = llm_message.content if isinstance(llm_message.content, list) else [llm_message.content or ""]
        content = _join_content([*contents, *(event.extended_content or ())])
        self._chat.add_observation(fields | {"role": llm_message.role, "content": content})

    def _add_action(self, event: _V1Event, raw: dict[str, Any]) -> None:
        call = (event.tool_call or _V1Call(event.tool_call_id, event.tool_name, event.action)).convert()
        name, raw_arguments = call["function"]["name"], call["function"]["arguments"]
        message: Message = {"content": _join_content(event.thought), "tool_calls": [call]}
        message["reasoning_content"] = _join_reasoning(event.reasoning_content, event.thinking_blocks)
        message["thinking_blocks"] = event.thinking_blocks or None
        mapped_keys = ("tool_call", "tool_name", "tool_call_id", "llm_response_id", "thought", "reasoning_content")
        fields = omit_fields(raw, "source", "kind", "thinking_blocks", "action", *mapped_keys) or {}
        if fields.get("security_risk") == "UNKNOWN":
            del fields["security_risk"]
        arguments: dict[str, Any] = {}
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            arguments = as_object(_DECODE(raw_arguments) if isinstance(raw_arguments, str) else raw_arguments)
        action = omit_fields(event.action or {}) or {}
        if new_fields := {k: arg for k, arg in action.items() if k not in arguments or arguments[k] != arg}:
            fields["action"] = new_fields
        self._is_finished = name in _FINISH_TOOLS
        self._chat.extend_decision(event.llm_response_id or f"event {event.id}", message, fields)

    def _add_observation(self, event: _V1Event, raw: dict[str, Any]) -> None:
        inner = event.observation or {}
        mapped_keys = ("observation", "tool_call_id", "tool_name", "error", "rejection_reason", "extended_content")
        fields = omit_fields(raw, "kind", "source", *mapped_keys) or {}
        fields["kind"] = inner.get("kind") or event.kind
        content = inner.get("content", event.error if event.error is not None else event.rejection_reason)
        # The first versions have the content under other names.
        text_key = next((key for key in ("output", "message", "text") if isinstance(inner.get(key), str)), None)
        if content is None:
            content = "" if text_key is None else inner[text_key]
        repeated_keys = [text_key] if text_key and content == inner[text_key] else []
        if unmapped_fields := omit_fields(inner, "content", "is_error", "kind", *repeated_keys):
            fields["observation"] = unmapped_fields
        if event.extended_content:
            content = [*(content if isinstance(content, list) else [content]), *event.extended_content]
        message = fields | {"role": "tool", "tool_call_id": event.tool_call_id, "content": _join_content(content)}
        message |= {"name": event.tool_name} if event.tool_name else {}
        is_error = True if event.error is not None else inner.get("is_error", inner.get("error"))
        self._chat.add_observation(message | ({"is_error": is_error} if isinstance(is_error, bool) else {}))

    def _add_summary(self, event: _V1Event, raw: dict[str, Any]) -> None:
        if event.summary is None:
            self._chat.add_span("event", event.kind, raw)
        else:
            fields = omit_fields(raw, "source", "summary") or {}
            self._chat.add_observation(fields | {"role": "user", "content": event.summary})

    def _add_tokens(self, event: _V1Event, raw: dict[str, Any]) -> None:
        call = next(reversed(self._chat.calls.values()), None)
        if call is None or call.prompt_ids is not None or not event.prompt_token_ids or not event.response_token_ids:
            self._chat.add_span("event", event.kind, raw)
        else:
            call.prompt_ids, call.action_ids = event.prompt_token_ids, event.response_token_ids

    def _add_log(self, event: _V1Event, raw: dict[str, Any]) -> None:
        log: dict[str, Any] = {}
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            log = as_object(_DECODE(event.log_data or "null"))
        answer = as_object(log.get("response"))
        call = self._chat.calls.get(str(answer.get("id")))
        if call is None:
            fields = {key: field for key, field in raw.items() if key != "log_data"}
            self._chat.add_span("prompt", event.kind, fields | (omit_fields(log, "messages", "tools", "input") or {}))
            return
        call.answer = answer
        call.cost, call.latency = parse_number(log.get("cost")), parse_number(log.get("latency_sec"))

    def _add_remote_call(self, event: _V1Event, raw: dict[str, Any]) -> None:
        """Add a call of an agent that runs elsewhere: a decision when it begins, a result when it ends."""
        call_id = event.tool_call_id or str(event.id)
        if call_id not in self._running:
            name = raw.get("tool_kind") or raw.get("title") or "tool"
            call = make_tool_call(str(name), raw.get("raw_input"), call_id)
            mapped_keys = ("source", "kind", "raw_input", "raw_output", "content", "tool_call_id")
            fields = omit_fields(raw, *mapped_keys) or {}
            self._chat.extend_decision(f"call {call_id}", {"content": "", "tool_calls": [call]}, fields)
            self._running[call_id] = raw
        if raw.get("status") in ("completed", "failed"):
            output, content = raw.get("raw_output"), raw.get("content")
            text = "" if output is None else to_text(output)
            message: Message = {"role": "tool", "tool_call_id": call_id, "content": text}
            message |= {"parts": content} if content else {}
            self._chat.add_observation(message | ({"is_error": True} if raw.get("is_error") is True else {}))

    def _update_state(self, event: _V1Event, raw: dict[str, Any]) -> None:
        """Change the state. Its sums grow with each event: the last ones count."""
        if event.key == "full_state" and isinstance(event.value, dict):
            self._state |= event.value
        elif event.key in ("stats", "execution_status", "agent_status"):
            self._state[event.key] = event.value
        else:
            self._chat.add_span("event", event.kind, raw)


def _join_content(content: Any) -> Any:
    """Return parts as a content: as text if they are only one text part."""
    contents = content if isinstance(content, list) else [content]
    texts = [text for part in contents if isinstance(text := part.get("text") if isinstance(part, dict) else part, str)]
    if len(contents) <= 1 and len(texts) == len(contents):
        return "".join(texts)
    if all(part is None for part in contents):
        return ""
    return join_text([content]) if isinstance(content, dict) else content


def _join_reasoning(text: str | None, blocks: Any) -> str | None:
    """Return the reasoning, or without a text that of the blocks."""
    texts = [block.get("thinking") for block in list_objects(blocks)]
    return text or "".join(block_text for block_text in texts if isinstance(block_text, str)) or None
