"""Events of OpenHands V0 (and OpenDevin): actions and observations.

.. code-block:: text

    id, timestamp, source (agent, user, environment), message (for a person), cause (the action that it answers)
    action, args                    run, read, edit, browse, message, finish, delegate, ...; system is the prompt
    observation, content, extras    what came back; error, agent_state_changed, null, ...
    tool_call_metadata              {function_name, tool_call_id, model_response (the whole answer), ...}
    llm_metrics                     sums so far

A decision is the actions that share an answer (`model_response.id`); an action of the agent without one is a decision
of its own, if it is one: the prompt, changes of state, condensed memory and the like are the tool's doing. What follows
a `delegate` action, up to its observation, is the sub-agent's.
"""

from typing import Any

import msgspec

from lake.formats.base.fields import moment, number
from lake.formats.base.rows import episode_text_id, rest
from lake.formats.base.source import Input
from lake.formats.chat.messages import tool_call
from lake.formats.openhands.talk import Talk
from lake.records import EpisodeRecord

_OF_THE_TOOL = frozenset(
    (
        "change_agent_state",
        "condensation",
        "condensation_request",
        "loop_recovery",
        "null",
        "pause",
        "recall",
        "resume",
        "start",
        "stop",
        "system",
        "task_tracking_reset",
    )
)
"""Actions that no model decided on, whoever their source is."""
_UNSEEN = frozenset(("agent_state_changed", "null", "recall", "user_rejected_state", "server_ready"))
"""Observations that no model gets to read as they are."""
_LIMITS = ("maximum iteration", "max iteration", "maximum budget", "max budget")


class _Metadata(msgspec.Struct):
    function_name: str | None = None
    tool_call_id: str | None = None
    model_response: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    """An event; ids are numbers, and text in some exports."""

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
    tool_call_metadata: _Metadata | None = None
    llm_metrics: dict[str, Any] | None = None


class _Frame(msgspec.Struct):
    """An agent that is at work: the main one, or one that it delegated to."""

    talk: Talk
    agent: str | None = None
    parent: int | None = None
    """Place of the delegating agent's frame."""
    step: int | None = None


class Events:
    """Events so far."""

    def __init__(self, name: str) -> None:
        self.task: str | None = None
        """The task, where it has a name."""
        self._name = name
        self._frames = [_Frame(Talk(name))]
        self._active = [0]
        self._calls: dict[Any, tuple[str | None, str | None]] = {}
        self._metrics: dict[str, Any] = {}
        self._state: tuple[str, str | None] | None = None
        self._ended = False

    def add(self, given: dict[str, Any]) -> None:
        """One more event. Raises msgspec.ValidationError: fields of wrong types."""
        event = msgspec.convert(given, _Event)
        talk = self._frames[self._active[-1]].talk
        if (time := moment(event.timestamp)) is not None:
            self._frames[0].talk.times.append(time)
        self._metrics = event.llm_metrics or self._metrics
        if event.action is not None:
            self._act(event, given, talk)
        else:
            self._observe(event, given, talk)

    def records(self, file: Input) -> list[EpisodeRecord]:
        """The main agent's episode, and those of the agents that it delegated to."""
        made = [frame.talk.record(self._name, self.task) for frame in self._frames]
        main = made[0]
        for frame, record in zip(self._frames, made, strict=True):
            record.task_id, record.rollout_index, record.agent_id = main.task_id, main.rollout_index, frame.agent
            if frame.parent is not None:
                record.relation, record.parent_step_index = "subagent", frame.step
                record.parent_episode_id = episode_text_id(made[frame.parent], file)
                record.root_episode_id = episode_text_id(main, file)
        _end(main, self._state, ended=self._ended)
        self._bill(main)
        if idle := [record for record in made[1:] if not record.steps]:
            main.extra = (main.extra or {}) | {"delegates_without_a_decision": [r.initial_messages for r in idle]}
        return [main, *(record for record in made[1:] if record.steps)]

    def _bill(self, record: EpisodeRecord) -> None:
        if not self._metrics:
            return
        usage = self._metrics.get("accumulated_token_usage")
        for name in ("prompt_tokens", "completion_tokens"):
            count = usage.get(name) if isinstance(usage, dict) else None
            if type(count) is int and 0 <= count < 1 << 63:
                setattr(record, name, count)
        record.cost = number(self._metrics.get("accumulated_cost"))
        record.extra = (record.extra or {}) | {"llm_metrics": self._metrics}

    def _act(self, event: _Event, given: dict[str, Any], talk: Talk) -> None:
        args = event.args or {}
        assert event.action is not None
        if event.action == "system":
            talk.tools = args["tools"] if isinstance(args.get("tools"), list) else talk.tools
            version = args.get("openhands_version")
            talk.version = version if isinstance(version, str) else talk.version
            more = rest(args, "content", "tools", "openhands_version") or {}
            talk.observe(more | {"role": "system", "content": _text(args.get("content"))})
        elif event.action == "condensation" and isinstance(args.get("summary"), str):
            talk.observe({"role": "user", "content": args["summary"], "event": rest(given, "llm_metrics")})
        elif event.action in _OF_THE_TOOL:
            talk.note("event", event.action, rest(given, "llm_metrics") or {})
        elif event.source == "agent":
            self._decide(event, given, talk)
        else:
            said = args.get("content") if event.action == "message" else event.message
            kept = rest(given, "action" if event.action == "message" else "", "message", "args", "llm_metrics") or {}
            left = rest(args, "content") if event.action == "message" else args
            talk.observe(kept | {"role": "user", "content": _text(said)} | ({"args": left} if left else {}))

    def _decide(self, event: _Event, given: dict[str, Any], talk: Talk) -> None:
        metadata, args = event.tool_call_metadata or _Metadata(), event.args or {}
        answer = metadata.model_response
        answer_id = answer.get("id") if answer else None
        # Early events have no ids, or all of them the same.
        key = answer_id if isinstance(answer_id, str) else f"event {len(talk.messages)}"
        self._calls[event.id] = metadata.tool_call_id, metadata.function_name
        said = _message_of(answer)
        message: dict[str, Any] = {}
        if said is not None:
            message = {"content": said.get("content"), "tool_calls": said.get("tool_calls") or None}
        elif event.action == "message":
            message = {"content": _text(args.get("content"))}
        else:
            words = _text(args.get("thought")) or _text(args.get("final_thought"))
            named = {k: v for k, v in args.items() if k != "thought"}
            call = tool_call(metadata.function_name or event.action or "", named, metadata.tool_call_id)
            message = {"content": words, "tool_calls": [call]}
        if key in talk.calls and said is not None:
            message = {}
        repeated = [name for name in ("content", "thought") if args.get(name) == message.get("content")]
        kept = rest(given, "source", "tool_call_metadata", "llm_metrics", "args") or {}
        is_known = said is None and event.action != "message"
        if not is_known and (more := rest(args, *repeated)):
            kept["args"] = more
        talk.decide(key, message, kept, answer)
        if event.action == "finish" and len(self._active) == 1:
            self._ended = True
        if event.action == "delegate":
            agent = _text(args.get("agent")) or "delegate"
            child = _Frame(Talk(self._name), f"{agent}:{event.id}", self._active[-1], len(talk.calls) - 1)
            self._frames.append(child)
            self._active.append(len(self._frames) - 1)

    def _observe(self, event: _Event, given: dict[str, Any], talk: Talk) -> None:
        if event.observation == "delegate" and len(self._active) > 1:
            self._active.pop()
            talk = self._frames[self._active[-1]].talk
        extras = event.extras or {}
        if event.observation == "agent_state_changed":
            self._state = str(extras.get("agent_state")), _text(extras.get("reason")) or None
        if event.observation is None or event.observation in _UNSEEN:
            name = event.observation or "event"
            talk.note("event", name, rest(given, "llm_metrics", "tool_call_metadata") or {})
            return
        metadata = event.tool_call_metadata or _Metadata()
        called = self._calls.get(event.cause, (None, None))
        call_id, function = metadata.tool_call_id or called[0], metadata.function_name or called[1]
        kept = rest(given, "content", "tool_call_metadata", "llm_metrics") or {}
        message = kept | {"role": "tool" if call_id else "user", "content": event.content or ""}
        message |= {"tool_call_id": call_id} if call_id else {}
        message |= {"name": function} if call_id and function else {}
        talk.observe(message | ({"is_error": True} if event.observation == "error" else {}))


def spread(event: Any) -> Any:
    """An event whose arguments stand beside `action` or `observation`, as outputs of the resolver have them, as others.

    Nobody says there who acts: the agent does, but for messages that wait for no answer, which are the person's.
    """
    if not isinstance(event, dict) or {"args", "extras", "source", "kind"} & event.keys():
        return event
    if "action" in event:
        is_users = event["action"] == "message" and event.get("wait_for_response") is not True
        args = rest(event, "action", "id", "timestamp")
        return _common(event) | {"source": "user" if is_users else "agent", "args": args or {}}
    if "observation" in event:
        extras = rest(event, "observation", "content", "id", "timestamp", "cause")
        return _common(event) | {"source": "environment", "content": event.get("content"), "extras": extras or {}}
    return event


def _common(event: dict[str, Any]) -> dict[str, Any]:
    """What every event may have."""
    return {key: event[key] for key in ("id", "timestamp", "action", "observation", "cause") if key in event}


def _end(record: EpisodeRecord, state: tuple[str, str | None] | None, *, ended: bool) -> None:
    said, reason = state or (None, None)
    record.stop_reason = "finish" if ended else said
    if ended or said == "finished":
        record.terminated = True
    elif said == "error":
        is_limit = any(words in (reason or "").lower() for words in _LIMITS)
        record.status, record.error = ("truncated" if is_limit else "failed"), reason
        record.terminated = False if is_limit else None
    elif said in ("stopped", "paused", "rejected"):
        record.status = "aborted"


def _message_of(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    choices = answer.get("choices") if answer else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    return message if isinstance(message, dict) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
