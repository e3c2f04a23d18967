"""Any OpenAI-compatible endpoint for chats as a policy: messages in; text, tool calls and reasoning out.

Endpoints do not tell tokens that can be relied on, so none are recorded, and losses that need ratios refuse what such a
policy played. For an engine of one's own, which does tell them, there are `vllm.py` and `sglang.py`.

Sent is what every endpoint knows (model, messages, temperature, max_tokens, seed, tools) and what is not at its neutral
value; `ChatOptions.without` leaves out fields that one refuses, `more` adds some.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel, Field

from lake.errors import UsageError
from lake.formats.base.rows import WRONG, ShapeError, rest
from lake.formats.chat.chat_completions import Completion
from lake.formats.chat.messages import checked
from lake.live.calls.shapes import CHAT, answered
from pipelines.collect.engines import (
    ContextFullError,
    EngineAnswerError,
    EngineGoneError,
    EngineRefusedError,
    Sampling,
)
from pipelines.collect.engines.http import Http, shown
from pipelines.collect.engines.sharing import Shared
from pipelines.collect.policies import Decision, Message, PolicyCard

_PATH = "/v1/chat/completions"
_TOO_LONG = ("context_length_exceeded", "maximum context length", "context length", "prompt is too long")
_OF_THE_CALL = ("id", "created", "service_tier", "system_fingerprint")
"""What differs between equal answers, so that a rollout that is played again is the same."""
_SEEDS = 1 << 31
"""Seeds of turns are below it, as every endpoint takes them."""


class ChatEndpoint:
    """One endpoint, for `Shared`.

    Args:
        url: base URL, with or without /v1 at the end.
        timeout: seconds that an answer may take.
        key: sent as a bearer token; `http.key_of` reads it from the environment.
    """

    def __init__(self, url: str, *, timeout: float = 600.0, key: str | None = None) -> None:
        self._http = Http(url, timeout=timeout, key=key)
        self.url = self._http.base

    async def complete(self, body: dict[str, Any]) -> Completion:
        """What it answers to a request. One try.

        Raises:
            EngineError: see `Http.post`.
            ContextFullError: the messages are longer than the model takes.
            EngineAnswerError: what it answers is no chat completion, or says nothing.
        """
        try:
            said = await self._http.post(_PATH, body)
        except EngineRefusedError as error:
            if any(sign in str(error) for sign in _TOO_LONG):
                raise ContextFullError(str(error)) from error
            raise
        try:
            found = answered(CHAT, said)
            if found.message is None:
                raise ShapeError("it has no message")
            checked(found.message, "the answer")
        except WRONG as error:
            raise EngineAnswerError(f"{self.url}{_PATH} answers no chat completion ({error}): {shown(said)}") from error
        return found

    async def is_healthy(self) -> bool:
        """Whether it answers at all: what endpoints say at /v1/models differs."""
        try:
            return await self._http.status("/v1/models") < 500
        except EngineGoneError:
            return False

    async def close(self) -> None:
        """Let go of connections."""
        await self._http.close()


class ChatOptions(BaseModel, frozen=True, extra="forbid"):
    """What is asked of an endpoint."""

    model: str
    """The name that it knows the model by."""
    sampling: Sampling = Field(default_factory=Sampling)
    """How it samples."""
    output_schema: dict[str, Any] | None = None
    """JSON schema that every answer is held to."""
    without: frozenset[str] = frozenset()
    """Fields that it refuses: seed, temperature, ..."""
    more: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request, as max_completion_tokens instead of max_tokens."""

    def request(self, messages: Sequence[Message], seed: int, tools: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        """The body of a request."""
        given = self.sampling
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "seed": seed}
        body |= {"temperature": given.temperature, "max_tokens": given.max_tokens}
        neutral = Sampling()
        body |= {
            name: value
            for name in ("top_p", "top_k", "min_p")
            if (value := getattr(given, name)) != getattr(neutral, name)
        }
        if given.stop:
            body["stop"] = list(given.stop)
        if tools:
            body["tools"] = list(tools)
        if self.output_schema is not None:
            form = {"name": "answer", "schema": self.output_schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return {name: value for name, value in body.items() if name not in self.without} | self.more


class ChatPolicy:
    """Endpoints of one model as a policy that converses; see `Speaker`.

    Args:
        endpoints: where it is asked; closed with the policy.
        options: what is asked.
        name: stored as the policy of its episodes; the model's name unless given.
    """

    def __init__(self, endpoints: Shared[ChatEndpoint], options: ChatOptions, *, name: str | None = None) -> None:
        if "messages" in options.without or {"messages", "stream", "n"} & options.more.keys():
            raise UsageError("the fields messages, stream and n of a chat are not for options to set")
        self.endpoints, self.options = endpoints, options
        self._name = name or options.model
        self.counts: dict[str, int] = {"prompt_tokens": 0, "completion_tokens": 0}

    @property
    def card(self) -> PolicyCard:
        """Name and sampling; which weights answer, and with which tokenizer, nobody tells."""
        return PolicyCard(name=self._name, sampling=self.options.sampling.model_dump(mode="json"))

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> "ChatConversation":
        """See `Speaker.open`."""
        return ChatConversation(self, seed, key, tools)

    async def close(self) -> None:
        """Let go of connections."""
        await self.endpoints.close()


@dataclass(slots=True)
class ChatConversation:
    """One rollout's messages; see `Conversation`."""

    policy: ChatPolicy
    seed: int
    key: str
    tools: Sequence[dict[str, Any]] | None
    _said: list[Message] = field(default_factory=list)
    _turns: int = 0

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        """See `Conversation.decide`; `admissible` is not looked at."""
        said = [*self._said, *messages]
        body = self.policy.options.request(said, (self.seed + self._turns) % _SEEDS, self.tools)
        found = await self.policy.endpoints.call(
            lambda endpoint: endpoint.complete(body),
            key=self.key,
            prompt_tokens=sum(len(str(message.get("content") or "")) for message in said) // 4,
            sampled=lambda answer: answer.completion_tokens or 0,
        )
        for name in self.policy.counts:
            self.policy.counts[name] += getattr(found, name) or 0
        decision = _decision(found)
        self._went_on(messages, decision)
        return decision

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        """See `Conversation.resume`."""
        for messages, decision in turns:
            self._went_on(messages, decision)

    def close(self) -> None:
        """See `Conversation.close`."""

    def _went_on(self, messages: Sequence[Message], decision: Decision) -> None:
        self._said += [*messages, decision.message]
        self._turns += 1


def _decision(found: Completion) -> Decision:
    message = found.message or {}
    content = message.get("content")
    more = rest(message, "role", "content", "reasoning_content", "tool_calls")
    return Decision(
        action=content
        if isinstance(content, str)
        else ""
        if content is None
        else msgspec.json.encode(content).decode(),
        finish_reason=found.finish_reason,
        reasoning=message.get("reasoning_content") or None,
        tool_calls=message.get("tool_calls") or None,
        model=found.model,
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
        extra=(rest(found.extra, *_OF_THE_CALL) or {}) | ({"message": more} if more else {}) or None,
    )
