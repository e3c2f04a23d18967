"""MassGen's agents and orchestrators, recorded while they run: mixins for their classes.

    class Agent(RecordedAgent, ConfigurableAgent): ...
    class Team(RecordedOrchestrator, Orchestrator): ...

    agents = {name: Agent(config, backend, recorder=recorder) for name, (config, backend) in settings.items()}
    team = Team(agents, recorder=recorder)

Each call of `chat` is a trace in the form of MassGen's RL branch, and a trace is an episode by the same rules as a file
of it (`lake.formats.massgen`). No reward is computed here. The scorers `tool_success`, `answer_quality`, `voting`,
`coordination` and `restart` read the recordings. The spans of a trace stay in memory until it ends, so open traces of a
process that dies are not recorded.

Source: chat_agent.py, orchestrator.py and coordination_tracker.py of the massgen package, 0.1.97.
"""

import json
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import msgspec

from lake import ids
from lake.errors import UsageError
from lake.formats.base.rows import ShapeError, complete_record
from lake.formats.chat.messages import INSTRUCTIONS, Message, join_text
from lake.formats.massgen import TRACES_NAME, convert_trace
from lake.live.episode import check_messages, require_finite
from lake.live.frames import to_plain
from lake.live.null_recorder import OFF
from lake.live.sink import Sink, format_exception, guarded, run_off_loop
from lake.records import Reject, make_episode_id
from lake.secrets import redact

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

_T = TypeVar("_T")
MAX_SPANS = 100_000
"""Spans of a trace; more are left out and counted in its metadata."""
_LONGEST_TASK = 500
_LONGEST_SUMMARY = 200
_PARAMETERS = ("messages", "tools", "reset_chat", "clear_history")
"""Parameters of `ChatAgent.chat` in order."""
_BACKEND_CHUNKS = frozenset(("mcp_status", "custom_tool_status"))
"""Chunks of tools that MassGen runs itself; they have calls and results as text."""
_BACKEND_TEXT = re.compile(r"(Arguments|Results) for Calling (\S+): (.*)\Z", re.DOTALL)
_ACTIONS = {
    "new_answer": "new_answer",
    "vote_cast": "vote",
    "vote_ignored": "vote_ignored",
    "restart_triggered": "restart",
    "agent_error": "agent_error",
    "agent_timeout": "agent_timeout",
    "agent_cancelled": "agent_cancelled",
    "final_agent_selected": "final_agent",
    "final_answer": "final_answer",
}
"""Recorded event of the coordination -> name in a trace."""


# ------------------------------------------------------------ traces


class TraceCollector:
    """Begins traces, and records those that have ended. Thread-safe."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder

    @property
    def _sink(self) -> Sink:
        return self._recorder._sink

    @guarded()
    def attempt(self, make: Callable[[], _T]) -> _T | None:
        """Call a function and return its value; None after an error, which is counted and logged."""
        return make()

    def begin(self, agent_id: str, conversation: Sequence[Any], metadata: dict[str, Any]) -> "MassgenTrace":
        """Begin a trace.

        Args:
            agent_id: id of the agent.
            conversation: messages for the agent; the task is the text of the user's last message.
            metadata: more metadata.
        """
        metadata = to_plain(metadata) | {"num_messages": len(conversation)}
        messages: list[Message] = []
        try:
            messages = check_messages(conversation)
            metadata["messages"] = messages
        except ShapeError as error:
            self._sink.report_trouble(f"messages of a MassGen agent were not understood and are left out: {error}")
        texts = [join_text(message.get("content"), "\n") for message in messages if message["role"] == "user"]
        task = texts[-1] if texts and texts[-1].strip() else "Unknown task"
        task = task if len(task) <= _LONGEST_TASK else f"{task[:_LONGEST_TASK]}..."
        return MassgenTrace(self, agent_id, task, metadata)

    @guarded()
    def record(self, trace: "MassgenTrace") -> None:
        """Record a trace that has ended."""
        record = convert_trace(trace.value())
        problem = complete_record(record, TRACES_NAME)
        if problem is not None and record.steps:
            raw = msgspec.json.encode(trace.value()).decode()
            self._recorder.reject(
                Reject(position=0, reason="invalid", message=problem, raw=raw, source_format=TRACES_NAME)
            )
            return
        trace.id = ids.to_text(make_episode_id(record, self._recorder.run))
        self._recorder.record(record)


class MassgenTrace:
    """The spans of one call of `chat`."""

    def __init__(self, collector: TraceCollector, agent_id: str, task: str, metadata: dict[str, Any]) -> None:
        self.trace_id = str(uuid.uuid4())
        self.id: str | None = None
        """Id of the episode in the lake as text, once the trace has ended."""
        self.metadata = metadata
        """Metadata of the trace; more may be added until it ends."""
        self._collector, self._agent_id, self._task = collector, agent_id, task
        self._lock = threading.Lock()
        self._start, self._tick = time.time(), time.monotonic()
        self._end: float | None = None
        self._status = "running"
        self._spans: list[dict[str, Any]] = []

    @property
    def _sink(self) -> Sink:
        return self._collector._sink

    @guarded()
    def add(self, span_type: str, *, span_id: str | None = None, at: float | None = None, **fields: Any) -> None:
        """Add a span; `lake.formats.massgen` has the types and fields.

        Args:
            span_type: `reward` for a reward of the environment or a person; the mixins add the other types.
            span_id: id of the span; of a tool, the id of its call. Default: a random id.
            at: seconds since 1970. Default: now.
            fields: fields of the span.
        """
        if span_type == "reward":
            fields["reward"] = require_finite(fields.get("reward"))
        head = {"span_id": span_id or str(uuid.uuid4()), "span_type": span_type, "timestamp": at or self._now()}
        with self._lock:
            if self._end is not None:
                raise UsageError("the trace has ended; add later judgements with `Lake.add_scores`")
            if len(self._spans) < MAX_SPANS:
                self._spans.append(head | to_plain(fields))
            else:
                self.metadata["spans_left_out"] = self.metadata.get("spans_left_out", 0) + 1

    @guarded()
    def add_tool_call(self, name: str, arguments: Any, call_id: str | None) -> None:
        """Add a tool call once, even if a stream repeats it."""
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):  # MassGen's store has an object here
            parsed = {} if arguments in (None, "") else {"raw": arguments}
        for span in reversed(self._spans):
            if span["span_type"] != "tool":
                break
            if span["span_id"] == call_id and span["tool_name"] == name and span["arguments"] == parsed:
                return
        pending = {"result": None, "success": True, "execution_time": 0.0, "error": None}
        self.add("tool", span_id=call_id, tool_name=name, arguments=parsed, **pending)

    @guarded()
    def set_tool_result(self, name: str, text: str, call_id: str | None, *, is_error: bool) -> None:
        """Set the result of the last open call of this name and id."""
        for span in reversed(self._spans):
            is_open = span["span_type"] == "tool" and span["result"] is None and span["error"] is None
            if is_open and span["tool_name"] == name and call_id in (None, span["span_id"]):
                span["execution_time"] = self._now() - span["timestamp"]
                span.update({"success": False, "error": text} if is_error else {"result": text})
                return

    def end(self, status: str = "completed", error: str | None = None) -> None:
        """End the trace, unless it has ended: `completed`, `failed`, or `running` if the caller stopped reading."""
        with self._lock:
            if self._end is not None:
                return
            self._end, self._status = self._now(), status
        if error is not None:
            self.metadata["error"] = error
        self._collector.record(self)

    def value(self) -> dict[str, Any]:
        """Return the trace in the form of MassGen's store. The total is the sum of its reward spans."""
        rewards = [span["reward"] for span in self._spans if span["span_type"] == "reward"]
        return {
            "trace_id": self.trace_id,
            "agent_id": self._agent_id,
            "task": self._task,
            "spans": self._spans,
            "metadata": self.metadata,
            "start_time": self._start,
            "end_time": self._end,
            "duration": None if self._end is None else self._end - self._start,
            "total_reward": sum(rewards) if rewards else None,
            "status": self._status,
        }

    def _now(self) -> float:
        """Return the time. A clock that is set while the trace runs does not reorder spans."""
        return self._start + time.monotonic() - self._tick


# ------------------------------------------------------------ mixins


class _RecordedChat:
    """A class of MassGen with a recorded `chat`. Without a recorder, nothing changes.

    Args:
        args: arguments of the class that it is mixed into.
        recorder: recorder of `lake.recorder`; the caller closes it.
        kwargs: keyword arguments of that class.
    """

    trace: MassgenTrace | None = None
    """Trace of the last call of `chat`."""
    _watcher: "ClassVar[type[_Watcher]]"

    def __init__(self, *args: Any, recorder: "Recorder | None" = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._collector = None if recorder is None or recorder is OFF else TraceCollector(recorder)

    def chat(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stream of the class that it is mixed into, recorded as it passes."""
        stream = cast("Any", super()).chat(*args, **kwargs)
        if (collector := self._collector) is None or not hasattr(stream, "athrow"):
            return stream
        call = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
        return _watch(stream, lambda: collector.attempt(lambda: self._watcher(self, collector, call)))


class _Watcher:
    """Converts the stream of one call of `chat` to spans of its trace. Nothing here raises into the agent."""

    def __init__(self, owner: Any, collector: TraceCollector, call: Mapping[str, Any]) -> None:
        self._owner, self._sink = owner, collector._sink
        self._error: str | None = None
        self._tokens = self._count_tokens()
        self._trace = owner.trace = self._begin(collector, call)

    @guarded()
    def see(self, chunk: Any) -> None:
        """Record a chunk of the stream."""
        chunk_type = getattr(chunk, "type", None)
        kind = str(getattr(chunk_type, "value", chunk_type))
        if kind == "error" and self._is_own_error(chunk):
            self._error = redact(_text(getattr(chunk, "error", None)) or _text(getattr(chunk, "content", None)) or kind)
        self._see(kind, chunk)

    @guarded()
    def end(self, error: BaseException | None, *, is_over: bool) -> None:
        """End the trace: the stream ended, failed, or is no longer read."""
        self._close()
        text = self._error if error is None else format_exception(error)
        is_failed = isinstance(error, Exception) or (error is None and text is not None)
        self._trace.end("failed" if is_failed else "completed" if is_over else "running", text)

    @guarded()
    def _close(self) -> None:
        """Add token counts and the owner's metadata. The trace ends even if that fails."""
        now = self._count_tokens()
        for name, before in self._tokens.items():
            if (used := now[name] - before) > 0:
                self._trace.metadata[name] = used
        self._finish()

    def _begin(self, collector: TraceCollector, call: Mapping[str, Any]) -> MassgenTrace:
        raise NotImplementedError

    def _see(self, kind: str, chunk: Any) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Add the owner's metadata at the end."""

    def _is_own_error(self, chunk: Any) -> bool:
        """Return whether an error ends the owner's work."""
        return True

    def _backends(self) -> list[Any]:
        raise NotImplementedError

    def _count_tokens(self) -> dict[str, int]:
        """Return the tokens that the models have counted so far."""
        usages = [getattr(backend, "token_usage", None) for backend in self._backends()]
        names = ("input_tokens", "output_tokens")
        return {name: sum(int(getattr(usage, name, None) or 0) for usage in usages) for name in names}


class _AgentWatcher(_Watcher):
    """Records the text, reasoning and tool calls of an agent."""

    def _begin(self, collector: TraceCollector, call: Mapping[str, Any]) -> MassgenTrace:
        backend = getattr(self._owner, "backend", None)
        config = getattr(backend, "config", None)
        model = getattr(backend, "model", None) or (config.get("model") if isinstance(config, dict) else None)
        agent_id = str(getattr(self._owner, "agent_id", None) or "agent")
        provider = getattr(backend, "get_provider_name", None)
        metadata = {"agent_id": agent_id, "backend": provider() if callable(provider) else None, "model": model}
        conversation = _build_context(getattr(self._owner, "conversation_history", None) or [], call)
        return collector.begin(agent_id, conversation, metadata | {"has_tools": bool(call.get("tools"))})

    def _backends(self) -> list[Any]:
        return [getattr(self._owner, "backend", None)]

    def _see(self, kind: str, chunk: Any) -> None:
        source = getattr(chunk, "source", None)
        if kind == "content":
            if text := _text(chunk.content):
                self._trace.add("content", content=text, source=source)
        elif kind in ("reasoning", "reasoning_summary"):
            attributes = (f"{kind}_delta", f"{kind}_text", "content")
            if text := next((text for name in attributes if (text := _text(getattr(chunk, name, None)))), ""):
                self._trace.add("reasoning", reasoning=text, source=source)
        elif kind == "tool_calls":
            for call in chunk.tool_calls or ():
                function = call.get("function") or call
                call_id = call.get("call_id") or call.get("id")
                self._trace.add_tool_call(str(function.get("name")), function.get("arguments"), call_id)
        elif kind in _BACKEND_CHUNKS:
            # The backend reports a tool that it runs: the call, then the result or the error.
            status, text = str(getattr(chunk, "status", None)), _text(chunk.content)
            call_id = getattr(chunk, "tool_call_id", None)
            if status.endswith("_tool_error"):
                self._trace.set_tool_result(_text(source).partition("_")[2], text, call_id, is_error=True)
            elif match := _BACKEND_TEXT.match(text):
                part, name, content = match.groups()
                if part == "Arguments":
                    self._trace.add_tool_call(name, content, call_id)
                else:
                    self._trace.set_tool_result(name, content, call_id, is_error=False)


class _TeamWatcher(_Watcher):
    """Records the events in the coordination tracker of an orchestrator."""

    def _begin(self, collector: TraceCollector, call: Mapping[str, Any]) -> MassgenTrace:
        owner = self._owner
        self._recorded = len(self._events())
        name = str(getattr(owner, "orchestrator_id", None) or "orchestrator")
        agent_ids = [str(agent) for agent in owner.agents]
        metadata = {"orchestrator_id": name, "num_agents": len(agent_ids), "agent_ids": agent_ids, "coordination": True}
        return collector.begin(name, _build_context([], call), metadata)

    def _backends(self) -> list[Any]:
        return [getattr(agent, "backend", None) for agent in self._owner.agents.values()]

    def _is_own_error(self, chunk: Any) -> bool:
        # Other errors belong to its agents, and it continues without them.
        return getattr(chunk, "source", None) in (None, getattr(self._owner, "orchestrator_id", None))

    def _events(self) -> list[Any]:
        return list(self._owner.coordination_tracker.events)

    def _see(self, kind: str, chunk: Any) -> None:
        self._add_new_events()
        if kind == "agent_status" and (status := getattr(chunk, "status", None)):
            data = {"status": status, "source": getattr(chunk, "source", None)}
            self._add("agent_status", data, self._owner.coordination_tracker.max_round)

    def _add_new_events(self) -> None:
        events = self._events()
        new, self._recorded = events[self._recorded :], len(events)
        for event in new:
            kind = str(getattr(event.event_type, "value", event.event_type))
            if action := _ACTIONS.get(kind):
                context = event.context or {}
                action_data = self._build_action_data(action, event.agent_id, context, event.details)
                self._add(action, action_data, context.get("round", 0), at=event.timestamp)

    def _build_action_data(
        self, action: str, agent: str | None, context: dict[str, Any], details: str
    ) -> dict[str, Any]:
        label = context.get("label")
        if action == "vote":
            vote = {"voter": agent, "voted_for": context.get("voted_for"), "reasoning": context.get("reason")}
            return vote | {"voted_for_label": context.get("voted_for_label")}
        if action == "new_answer":
            answers = self._owner.coordination_tracker.answers_by_agent.get(agent, ())
            text = next((answer.content for answer in reversed(answers) if answer.label == label), "")
            return {"agent_id": agent, "answer_summary": text[:_LONGEST_SUMMARY], "label": label}
        if action == "final_answer":
            answer = self._owner.coordination_tracker.final_answers.get(agent)
            return {"agent_id": agent, "answer": getattr(answer, "content", None), "label": label}
        return {"agent_id": agent, "details": details, "affected_agents": context.get("affected_agents")}

    def _add(self, action: str, action_data: dict[str, Any], coordination_round: int, at: float | None = None) -> None:
        states = {
            agent: {"has_voted": bool(state.has_voted), "has_answer": bool(state.answer)}
            for agent, state in (getattr(self._owner, "agent_states", None) or {}).items()
        }
        fields: dict[str, Any] = {"action_type": action, "action_data": action_data, "agent_states": states}
        self._trace.add("coordination", at=at, coordination_round=coordination_round, **fields)

    def _finish(self) -> None:
        self._add_new_events()
        owner = self._owner
        if (most := getattr(owner, "max_attempts", 1)) > 1:
            attempt, restarts = getattr(owner, "current_attempt", 0), bool(getattr(owner, "restart_pending", False))
            decision = {"should_restart": restarts, "reason": getattr(owner, "restart_reason", None)}
            self._add("restart_decision", decision | {"current_attempt": attempt, "max_attempts": most}, attempt)
        self._trace.metadata["selected_agent"] = getattr(owner, "_selected_agent", None)


class RecordedAgent(_RecordedChat):
    """Mixin for agents: `class Agent(RecordedAgent, ConfigurableAgent)`, created with `recorder=`.

    The context of an episode is the conversation so far, and the messages of the call.
    """

    _watcher = _AgentWatcher


class RecordedOrchestrator(_RecordedChat):
    """Mixin for orchestrators: `class Team(RecordedOrchestrator, Orchestrator)`, created with `recorder=`.

    Its episodes have the votes, answers, restarts and the choice of the agents. `RecordedAgent` records the calls that
    these agents make.
    """

    _watcher = _TeamWatcher


async def _watch(stream: Any, begin: Callable[[], _Watcher | None]) -> AsyncGenerator[Any, Any]:
    """Return an async generator whose chunks are recorded. Values and exceptions of the caller reach the stream."""
    watcher, error, is_over = begin(), None, False
    step: Callable[..., Any] = stream.__anext__
    args: tuple[Any, ...] = ()
    try:
        while True:
            chunk = await step(*args)
            if watcher is not None:
                watcher.see(chunk)
            try:
                reply = yield chunk
            except GeneratorExit:
                await stream.aclose()
                raise
            except BaseException as thrown:
                step, args = stream.athrow, (thrown,)
            else:
                step, args = stream.asend, (reply,)
    except StopAsyncIteration:
        is_over = True
    except GeneratorExit:
        raise
    except BaseException as raised:
        error = raised
        raise
    finally:
        if watcher is not None:
            await run_off_loop(lambda: watcher.end(error, is_over=is_over))


def _build_context(history: list[Any], call: Mapping[str, Any]) -> list[Any]:
    """Return the messages for the policy: the part of the conversation that is kept, and the messages of the call."""
    argument = call.get("messages")
    messages = [{"role": "user", "content": argument}] if isinstance(argument, str) else list(argument or ())
    if call.get("reset_chat"):
        return messages
    if call.get("clear_history"):
        history = [message for message in history if message.get("role") in INSTRUCTIONS]
    return [*history, *messages]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
