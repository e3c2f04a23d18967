"""The events of one attempt of agent-lightning: its model requests as decisions, its rewards, and what else happened.

See `lake.formats.agent_lightning.reader`.
"""

from typing import Any

import msgspec

from lake.formats.base.fields import Scores, number
from lake.formats.base.rows import rest
from lake.formats.base.secrets import without_secrets
from lake.formats.chat.calls import Calls
from lake.formats.chat.chat_completions import Completion, completion
from lake.formats.chat.messages import checked, decision
from lake.formats.chat.tokens import Lineage
from lake.records import EpisodeRecord, Index, sampling_of

_NO_SETTING = ("messages", "prompt", "model", "tools", "stream", "return_token_ids", "logprobs", "stream_options")
_KEPT = ("http_status", "retry_count", "adjusted_params", "routed_experts")


class Event(msgspec.Struct):
    """An event of an attempt."""

    event_type: str
    data: dict[str, Any] = {}
    attempt_id: str | int | None = None
    timestamp: float | None = None


class _Request(msgspec.Struct):
    """The data of a model request."""

    request: dict[str, Any] | None = None
    response: Any = None
    server: dict[str, Any] | None = None
    model: str | None = None
    model_version: int | None = None
    status: str | None = None
    prompt_token_ids: list[Index] | None = None
    response_token_ids: list[Index] | None = None
    response_log_probs: list[float] | None = None

    @property
    def version(self) -> int | None:
        """Of the weights that answered."""
        version = (self.server or {}).get("version", self.model_version)
        return version if isinstance(version, int) and not isinstance(version, bool) else None


class Attempt:
    """The events of one attempt, with their places."""

    def __init__(self, events: list[tuple[int, Event]]) -> None:
        self.calls, self.lineage, self.scores = Calls(), Lineage(), Scores()
        self.others: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.sampling: dict[str, Any] | None = None
        self.tools: list[Any] | None = None
        self.reward: float | None = None
        for index, event in events:
            if event.event_type == "model_request":
                self._request(event, f"events[{index}].data")
            elif event.event_type == "reward":
                self._reward(event)
            else:
                self.others.append({"event_type": event.event_type, "timestamp": event.timestamp, "data": event.data})

    def record(self, **fields: Any) -> EpisodeRecord:
        """The record; `fields` is what the events do not say."""
        steps = self.calls.steps
        versions = {step.policy_version for step in steps}
        return EpisodeRecord(
            policy=next((step.model for step in steps if step.model), None),
            policy_version=versions.pop() if len(versions) == 1 else None,
            env_return=self.reward,
            scores=self.scores.records,
            tools=self.tools,
            sampling=self.sampling,
            initial_messages=self.calls.initial_messages,
            steps=steps,
            extra={"events": [without_secrets(event) for event in self.others], "failed_requests": self.failed},
            **fields,
        )

    def _reward(self, event: Event) -> None:
        reason = event.data.get("reason")
        value = number(event.data.get("value"))
        self.scores.add(
            "reward",
            event.data.get("value"),
            reason=event.data.get("message") if reason is None else reason,
            metrics=rest(event.data, "value", "reason", *(("message",) if reason is None else ())),
        )
        self.reward = self.reward if value is None else value

    def _request(self, event: Event, place: str) -> None:
        data = msgspec.convert(event.data, _Request)
        answer = _answer(data, place)
        has_failed = data.status == "error" or (number(event.data.get("http_status")) or 0) >= 400
        if has_failed or (answer.message is None and not answer.action_ids):
            self.failed.append(without_secrets({"timestamp": event.timestamp, **event.data}))
            return
        request = data.request or {}
        prompt = request.get("messages", request.get("prompt"))
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        message = answer.message or {"role": "assistant", "content": ""}
        if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
            messages = [_filled(said) if isinstance(said, dict) else said for said in prompt]
            step = self.calls.add(messages, message, place=f"{place}.request.messages")
        else:
            # Only its tokens are told.
            step = decision(checked(message, f"{place}.response"), [], is_first=not self.calls.steps)
            step.state = None
            self.calls.steps.append(step)
            self.calls.follows.append(None)
        index = len(self.calls.steps) - 1
        settings = without_secrets(rest(request, *_NO_SETTING)) or None
        step.model = answer.model or (data.server or {}).get("model") or data.model or request.get("model")
        step.policy_version = data.version
        step.finish_reason, step.prompt_tokens = answer.finish_reason, answer.prompt_tokens
        step.completion_tokens = answer.completion_tokens
        latency = number(event.data.get("latency_ms"))
        step.latency = None if latency is None else latency / 1000
        if answer.prompt_ids and answer.action_ids:
            step.tokens = self.lineage.add(
                index,
                answer.prompt_ids,
                answer.action_ids,
                answer.logprobs,
                policy_version=data.version,
                **sampling_of(request),
            )
        tools = request.get("tools")
        if index == 0:
            self.sampling, self.tools = settings, tools if isinstance(tools, list) else None
        extra = {
            **(step.extra or {}),
            **answer.extra,
            **{name: event.data[name] for name in _KEPT if event.data.get(name)},
            "timestamp": event.timestamp,
            "server": rest(data.server or {}, "model", "version"),
            "tools": tools if tools != self.tools else None,
        }
        kept = {key: item for key, item in without_secrets(extra).items() if item not in (None, {}, [])}
        # Of a call without settings, too: else those of the episode would hold for it.
        step.extra = (kept if settings == self.sampling else kept | {"sampling": settings or {}}) or None


def _filled(message: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in message.items() if item is not None}


def _answer(data: _Request, place: str) -> Completion:
    if data.response_token_ids is not None and data.response is None:
        logprobs = data.response_log_probs
        return Completion(
            prompt_ids=data.prompt_token_ids or [],
            action_ids=data.response_token_ids,
            logprobs=logprobs if logprobs and len(logprobs) == len(data.response_token_ids) else None,
        )
    return completion(data.response, f"{place}.response") if data.response is not None else Completion()
