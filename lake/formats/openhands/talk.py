"""Events of an OpenHands conversation, put together: what was said, by whom, and what else happened."""

from datetime import datetime
from typing import Any

import msgspec

from lake.formats.base.fields import moment, prompt_task, sibling_number
from lake.formats.base.rows import rest
from lake.formats.chat.answers import tell
from lake.formats.chat.messages import Message, checked, conversation, text_of
from lake.formats.chat.sessions import Spans, complete
from lake.formats.chat.tokens import Lineage
from lake.records import EpisodeRecord, StepRecord

NAME = "openhands"
_OF_CALLS = "call"
"""Key of a decision's message that stands for what is known of its call until the steps are made."""


class Call(msgspec.Struct):
    """What is known of the model call that a decision was."""

    key: str
    answer: Any = None
    prompt_ids: list[int] | None = None
    action_ids: list[int] | None = None
    cost: float | None = None
    latency: float | None = None
    started_at: datetime | None = None


class Talk:
    """The messages of one agent so far."""

    def __init__(self, name: str) -> None:
        self.messages: list[Message] = []
        self.calls: dict[str, Call] = {}
        self.times: list[datetime] = []
        self.tools: list[Any] | None = None
        self.version: str | None = None
        self._decided: dict[str, Message] = {}
        self._spans = Spans(name)

    @property
    def last(self) -> Call | None:
        """The call of the last decision."""
        return next(reversed(self.calls.values()), None)

    def decide(self, key: str, message: Message, event: dict[str, Any], answer: Any = None) -> None:
        """A part of a decision: of one call there may be several events. The first stands where the decision does.

        Raises:
            ShapeError: it is no message.
        """
        checked(message | {"role": "assistant"}, "event")
        kept = [event] if event else []
        if (found := self._decided.get(key)) is None:
            self.calls[key] = Call(key, answer, started_at=moment(event.get("timestamp")))
            self._decided[key] = message | {"role": "assistant", _OF_CALLS: key, "events": kept}
            self.messages.append(self._decided[key])
            return
        found["events"] += kept
        if text := text_of(message.get("content")):
            found["content"] = text_of(found.get("content")) + text
        for name in ("tool_calls", "thinking_blocks"):
            if message.get(name):
                found[name] = [*(found.get(name) or ()), *message[name]]
        if message.get("reasoning_content"):
            found["reasoning_content"] = (found.get("reasoning_content") or "") + message["reasoning_content"]

    def observe(self, message: Message) -> None:
        """What the agent gets to see. Raises ShapeError: it is no message."""
        self.messages.append(checked(message, "event"))

    def note(self, kind: str, name: str, event: dict[str, Any], *, error: str | None = None) -> None:
        """What happened beside the talk."""
        time = moment(event.get("timestamp"))
        place = str(event.get("id", f"{name}-{len(self._spans.records)}"))
        attributes = rest(event, "id", "timestamp")
        steps = len(self._decided)
        self._spans.add(kind, name, place, steps=steps, started_at=time, error=error, attributes=attributes)

    def record(self, name: str, task: str | None = None) -> EpisodeRecord:
        """The episode; `name` is what tells the conversation from every other."""
        chat = conversation(self.messages, is_decision=lambda message: _OF_CALLS in message)
        lineage = Lineage()
        for index, step in enumerate(chat.steps):
            _complete(step, self.calls, lineage, index)
        asked = next((m for m in chat.initial_messages if m["role"] == "user"), None)
        if task is None:
            task = prompt_task(text_of(asked.get("content"), "\n")) if asked is not None else name
        record = EpisodeRecord(
            task_id=task,
            rollout_index=sibling_number(name),
            steps=[],
            tools=self.tools,
            started_at=min(self.times, default=None),
            ended_at=max(self.times, default=None),
            source_version=self.version,
            spans=self._spans.records,
            source_format=NAME,
        )
        complete(record, chat)
        return record


def _complete(step: StepRecord, calls: dict[str, Call], lineage: Lineage, index: int) -> None:
    """Write on a decision what is known of its call."""
    extra = step.extra or {}
    call = calls[extra.pop(_OF_CALLS)]
    step.cost, step.latency = call.cost, call.latency
    if call.answer is not None and (left := tell(step, call.answer, lineage, index)) is not None:
        extra["response"] = left
    if call.started_at is not None:
        # The events' clock, which all of them have; the engine's is another, and often of another zone.
        step.started_at = call.started_at
    if step.tokens is None and call.prompt_ids and call.action_ids:
        step.tokens = lineage.add(index, call.prompt_ids, call.action_ids)
    if not extra.get("events"):
        extra.pop("events", None)
    step.extra = extra or None
