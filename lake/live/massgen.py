"""MassGen's agents and orchestrators, recorded while they run: mixins for classes of its own.

    class Agent(RecordedAgent, ConfigurableAgent): ...
    class Team(RecordedOrchestrator, Orchestrator): ...

    agents = {name: Agent(config, backend, recorder=recorder) for name, (config, backend) in wanted.items()}
    team = Team(agents, recorder=recorder)

Each call of `chat` is a trace as MassGen's RL branch writes them, and a trace is an episode: what its spans mean is
said by `lake.formats.massgen.traces`, which reads files of them too. No reward is computed here; the scorers
`tool_success`, `answer_quality`, `voting`, `coordination` and `restart` read what is recorded. The spans of a trace are
in memory until it ends: of a process that dies, traces that go on are not recorded.

Source: chat_agent.py, orchestrator.py and coordination_tracker.py of the massgen package, 0.1.97.
"""

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from lake.formats.base.secrets import redacted
from lake.formats.chat.messages import INSTRUCTIONS
from lake.live.contexts import beside_the_loop
from lake.live.massgen_traces import Trace, TraceCollector
from lake.live.off import OFF
from lake.live.sink import guarded, told

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

_PARAMETERS = ("messages", "tools", "reset_chat", "clear_history")
"""Of `ChatAgent.chat`, in their order."""
_LONGEST_SUMMARY = 200
_RUN_BY_THE_BACKEND = frozenset(("mcp_status", "custom_tool_status"))
"""Chunks of tools that MassGen runs itself, whose calls and results are told as text."""
_TOLD = re.compile(r"(Arguments|Results) for Calling (\S+): (.*)\Z", re.DOTALL)
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
"""Events of the coordination that are recorded, by their name in a trace."""


class _Recorded:
    """A class of MassGen whose `chat` is recorded; without a recorder, or with one that is off, nothing changes.

    Args:
        recorder: of `lake.recorder`; closing it is left to its owner.
        args: of the class that it is mixed into.
        kwargs: the same.
    """

    trace: Trace | None = None
    """That of the last call of `chat`."""
    _watcher: "ClassVar[type[_Watcher]]"

    def __init__(self, *args: Any, recorder: "Recorder | None" = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._collector = None if recorder is None or recorder is OFF else TraceCollector(recorder)

    def chat(self, *args: Any, **kwargs: Any) -> Any:
        """The stream of the class that it is mixed into, recorded as it passes."""
        stream = cast("Any", super()).chat(*args, **kwargs)
        if (collector := self._collector) is None or not hasattr(stream, "athrow"):
            return stream
        call = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
        return _watched(stream, lambda: collector.attempt(lambda: self._watcher(self, collector, call)))


class _Watcher:
    """Turns what passes of one call of `chat` into spans of its trace. Nothing here raises into the agent."""

    def __init__(self, owner: Any, collector: TraceCollector, call: Mapping[str, Any]) -> None:
        self._owner, self._sink = owner, collector._sink
        self._error: str | None = None
        self._tokens = self._counted()
        self._trace = owner.trace = self._begin(collector, call)

    @guarded()
    def see(self, chunk: Any) -> None:
        """A chunk passed."""
        kind = getattr(chunk, "type", None)
        name = str(getattr(kind, "value", kind))
        if name == "error" and self._is_own(chunk):
            self._error = redacted(
                _text(getattr(chunk, "error", None)) or _text(getattr(chunk, "content", None)) or name
            )
        self._see(name, chunk)

    @guarded()
    def end(self, error: BaseException | None, *, is_over: bool) -> None:
        """The stream is over, was broken off by an error, or is waited for no more."""
        self._close()
        said = self._error if error is None else told(error)
        is_failed = isinstance(error, Exception) or (error is None and said is not None)
        self._trace.end("failed" if is_failed else "completed" if is_over else "running", said)

    @guarded()
    def _close(self) -> None:
        """Add what is known at the end: tokens, and what the owner says; the trace ends without what cannot be told."""
        now = self._counted()
        for name, before in self._tokens.items():
            if (used := now[name] - before) > 0:
                self._trace.metadata[name] = used
        self._finish()

    def _begin(self, collector: TraceCollector, call: Mapping[str, Any]) -> Trace:
        raise NotImplementedError

    def _see(self, kind: str, chunk: Any) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Add what the owner knows at the end."""

    def _is_own(self, chunk: Any) -> bool:
        """Whether an error ends the owner's own work."""
        return True

    def _backends(self) -> list[Any]:
        raise NotImplementedError

    def _counted(self) -> dict[str, int]:
        """Tokens that the models have counted so far."""
        usages = [getattr(backend, "token_usage", None) for backend in self._backends()]
        names = ("input_tokens", "output_tokens")
        return {name: sum(int(getattr(usage, name, None) or 0) for usage in usages) for name in names}


class _AgentWatcher(_Watcher):
    """Of an agent: what it says, thinks and calls."""

    def _begin(self, collector: TraceCollector, call: Mapping[str, Any]) -> Trace:
        backend = getattr(self._owner, "backend", None)
        config = getattr(backend, "config", None)
        model = getattr(backend, "model", None) or (config.get("model") if isinstance(config, dict) else None)
        agent_id = str(getattr(self._owner, "agent_id", None) or "agent")
        named = getattr(backend, "get_provider_name", None)
        about = {"agent_id": agent_id, "backend": named() if callable(named) else None, "model": model}
        given = _context(getattr(self._owner, "conversation_history", None) or [], call)
        return collector.begin(agent_id, given, about | {"has_tools": bool(call.get("tools"))})

    def _backends(self) -> list[Any]:
        return [getattr(self._owner, "backend", None)]

    def _see(self, kind: str, chunk: Any) -> None:
        source = getattr(chunk, "source", None)
        if kind == "content":
            if text := _text(chunk.content):
                self._trace.add("content", content=text, source=source)
        elif kind in ("reasoning", "reasoning_summary"):
            told_as = (f"{kind}_delta", f"{kind}_text", "content")
            if text := next((text for name in told_as if (text := _text(getattr(chunk, name, None)))), ""):
                self._trace.add("reasoning", reasoning=text, source=source)
        elif kind == "tool_calls":
            for call in chunk.tool_calls or ():
                function = call.get("function") or call
                self._trace.called(
                    str(function.get("name")), function.get("arguments"), call.get("call_id") or call.get("id")
                )
        elif kind in _RUN_BY_THE_BACKEND:
            self._see_run(chunk)

    def _see_run(self, chunk: Any) -> None:
        """A tool that the backend runs: it tells the call, then the result or the error."""
        status, text = str(getattr(chunk, "status", None)), _text(chunk.content)
        call_id, source = getattr(chunk, "tool_call_id", None), _text(getattr(chunk, "source", None))
        if status.endswith("_tool_error"):
            self._trace.answered(source.partition("_")[2], text, call_id, is_error=True)
        elif found := _TOLD.match(text):
            what, name, rest = found.groups()
            if what == "Arguments":
                self._trace.called(name, rest, call_id)
            else:
                self._trace.answered(name, rest, call_id, is_error=False)


class _TeamWatcher(_Watcher):
    """Of an orchestrator: what its tracker of the coordination noted."""

    def _begin(self, collector: TraceCollector, call: Mapping[str, Any]) -> Trace:
        owner = self._owner
        self._seen = len(self._events())
        name = str(getattr(owner, "orchestrator_id", None) or "orchestrator")
        ids = [str(agent) for agent in owner.agents]
        about = {"orchestrator_id": name, "num_agents": len(ids), "agent_ids": ids, "coordination": True}
        return collector.begin(name, _context([], call), about)

    def _backends(self) -> list[Any]:
        return [getattr(agent, "backend", None) for agent in self._owner.agents.values()]

    def _is_own(self, chunk: Any) -> bool:
        # The others are of its agents, without whom it goes on.
        return getattr(chunk, "source", None) in (None, getattr(self._owner, "orchestrator_id", None))

    def _events(self) -> list[Any]:
        return list(self._owner.coordination_tracker.events)

    def _see(self, kind: str, chunk: Any) -> None:
        self._note()
        if kind == "agent_status" and (status := getattr(chunk, "status", None)):
            data = {"status": status, "source": getattr(chunk, "source", None)}
            self._add("agent_status", data, self._owner.coordination_tracker.max_round)

    def _note(self) -> None:
        """Add the events since the last time."""
        events = self._events()
        new, self._seen = events[self._seen :], len(events)
        for event in new:
            kind = str(getattr(event.event_type, "value", event.event_type))
            if action := _ACTIONS.get(kind):
                context = event.context or {}
                data = self._data(action, event.agent_id, context, event.details)
                self._add(action, data, context.get("round", 0), at=event.timestamp)

    def _data(self, action: str, agent: str | None, context: dict[str, Any], details: str) -> dict[str, Any]:
        label = context.get("label")
        if action == "vote":
            said = {"voter": agent, "voted_for": context.get("voted_for"), "reasoning": context.get("reason")}
            return said | {"voted_for_label": context.get("voted_for_label")}
        if action == "new_answer":
            answers = self._owner.coordination_tracker.answers_by_agent.get(agent, ())
            text = next((answer.content for answer in reversed(answers) if answer.label == label), "")
            return {"agent_id": agent, "answer_summary": text[:_LONGEST_SUMMARY], "label": label}
        if action == "final_answer":
            answer = self._owner.coordination_tracker.final_answers.get(agent)
            return {"agent_id": agent, "answer": getattr(answer, "content", None), "label": label}
        return {"agent_id": agent, "details": details, "affected_agents": context.get("affected_agents")}

    def _add(self, action: str, data: dict[str, Any], coordination_round: int, at: float | None = None) -> None:
        states = {
            agent: {"has_voted": bool(state.has_voted), "has_answer": bool(state.answer)}
            for agent, state in (getattr(self._owner, "agent_states", None) or {}).items()
        }
        fields: dict[str, Any] = {"action_type": action, "action_data": data, "agent_states": states}
        self._trace.add("coordination", at=at, coordination_round=coordination_round, **fields)

    def _finish(self) -> None:
        self._note()
        owner = self._owner
        if (most := getattr(owner, "max_attempts", 1)) > 1:
            tried, restarts = getattr(owner, "current_attempt", 0), bool(getattr(owner, "restart_pending", False))
            decision = {"should_restart": restarts, "reason": getattr(owner, "restart_reason", None)}
            self._add("restart_decision", decision | {"current_attempt": tried, "max_attempts": most}, tried)
        self._trace.metadata["selected_agent"] = getattr(owner, "_selected_agent", None)


class RecordedAgent(_Recorded):
    """Mixin for agents: `class Agent(RecordedAgent, ConfigurableAgent)`, made with `recorder=`.

    The context of an episode is all that the agent was given: the conversation so far, and the messages of the call.
    """

    _watcher = _AgentWatcher


class RecordedOrchestrator(_Recorded):
    """Mixin for orchestrators: `class Team(RecordedOrchestrator, Orchestrator)`, made with `recorder=`.

    Its episodes are the votes, answers, restarts and the choice of its agents; what these do in calls of their own is
    recorded by `RecordedAgent`.
    """

    _watcher = _TeamWatcher


async def _watched(stream: Any, begin: Callable[[], _Watcher | None]) -> AsyncGenerator[Any, Any]:
    """An async generator whose chunks are seen; what is sent, thrown and closed is passed on as it is."""
    watcher, error, is_over = begin(), None, False
    step: Callable[..., Any] = stream.__anext__
    args: tuple[Any, ...] = ()
    try:
        while True:
            chunk = await step(*args)
            if watcher is not None:
                watcher.see(chunk)
            try:
                sent = yield chunk
            except GeneratorExit:
                await stream.aclose()
                raise
            except BaseException as thrown:
                step, args = stream.athrow, (thrown,)
            else:
                step, args = stream.asend, (sent,)
    except StopAsyncIteration:
        is_over = True
    except GeneratorExit:
        raise
    except BaseException as raised:
        error = raised
        raise
    finally:
        if watcher is not None:
            await beside_the_loop(lambda: watcher.end(error, is_over=is_over))


def _context(history: list[Any], call: Mapping[str, Any]) -> list[Any]:
    """What the policy is going to see: the conversation as far as it is kept, and the messages of the call."""
    given = call.get("messages")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
    if call.get("reset_chat"):
        return messages
    if call.get("clear_history"):
        history = [message for message in history if message.get("role") in INSTRUCTIONS]
    return [*history, *messages]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
