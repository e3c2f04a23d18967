"""Any OpenAI-compatible chat endpoint as a policy: messages in; text, tool calls and reasoning out.

Endpoints do not report reliable token ids, so none are recorded, and losses that need importance ratios refuse such
episodes. For your own engine, which reports them, use `vllm.py` or `sglang.py`.

A request holds the fields that every endpoint knows (model, messages, temperature, max_tokens, seed, tools) and the
sampling options that differ from their neutral value. `ChatOptions.without` leaves out fields that an endpoint refuses;
`extra_fields` adds some.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel, Field

from lake.errors import UsageError
from lake.formats.base.rows import SHAPE_ERRORS, ShapeError, omit_fields
from lake.formats.chat.completions import Completion
from lake.formats.chat.messages import check_message
from lake.live.calls.apis import CHAT, parse_answer
from pipelines.collect.engines import ContextFullError, EngineAnswerError, EngineGoneError, EngineRefusedError, Sampling
from pipelines.collect.engines.http import EngineClient, excerpt
from pipelines.collect.engines.pool import ServerPool
from pipelines.collect.policies import Decision, Message, PolicyCard

_PATH = "/v1/chat/completions"
_TOO_LONG = ("context_length_exceeded", "maximum context length", "context length", "prompt is too long")
_OF_THE_CALL = ("id", "created", "service_tier", "system_fingerprint")
"""Fields that differ between equal answers. They are dropped so that a replayed rollout is equal."""
_SEEDS = 1 << 31
"""Upper bound of a turn's seed that every endpoint accepts."""


class ChatEndpoint:
    """One endpoint, for `ServerPool`.

    Args:
        url: base URL, with or without /v1 at the end.
        timeout: timeout of an answer in seconds.
        key: bearer token; `http.read_key` reads it from the environment.
    """

    def __init__(self, url: str, *, timeout: float = 600.0, key: str | None = None) -> None:
        self._http = EngineClient(url, timeout=timeout, key=key)
        self.url = self._http.base

    async def complete(self, body: dict[str, Any]) -> Completion:
        """Send one request and return the completion, in one try.

        Raises:
            EngineError: see `EngineClient.post`.
            ContextFullError: the messages are longer than the model's context.
            EngineAnswerError: the answer is not a chat completion, or is empty.
        """
        try:
            answer = await self._http.post(_PATH, body)
        except EngineRefusedError as error:
            if any(sign in str(error) for sign in _TOO_LONG):
                raise ContextFullError(str(error)) from error
            raise
        try:
            completion = parse_answer(CHAT, answer)
            if completion.message is None:
                raise ShapeError("it has no message")
            check_message(completion.message, "the answer")
        except SHAPE_ERRORS as error:
            raise EngineAnswerError(
                f"{self.url}{_PATH} answers no chat completion ({error}): {excerpt(answer)}"
            ) from error
        return completion

    async def is_healthy(self) -> bool:
        """Return whether it answers at all; the contents of /v1/models differ between endpoints."""
        try:
            return await self._http.status("/v1/models") < 500
        except EngineGoneError:
            return False

    async def close(self) -> None:
        """Close connections."""
        await self._http.close()


class ChatOptions(BaseModel, frozen=True, extra="forbid"):
    """Options of the requests to an endpoint."""

    model: str
    """Model name at the endpoint."""
    sampling: Sampling = Field(default_factory=Sampling)
    """How it samples."""
    output_schema: dict[str, Any] | None = None
    """JSON schema for every answer."""
    without: frozenset[str] = frozenset()
    """Fields that the endpoint refuses: seed, temperature, ..."""
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    """Extra fields of every request, such as max_completion_tokens instead of max_tokens."""

    def request(self, messages: Sequence[Message], seed: int, tools: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        """Build the body of a request."""
        sampling = self.sampling
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "seed": seed}
        body |= {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
        neutral = Sampling()
        body |= {
            name: value
            for name in ("top_p", "top_k", "min_p")
            if (value := getattr(sampling, name)) != getattr(neutral, name)
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if tools:
            body["tools"] = list(tools)
        if self.output_schema is not None:
            form = {"name": "answer", "schema": self.output_schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return {name: value for name, value in body.items() if name not in self.without} | self.extra_fields


class ChatPolicy:
    """Endpoints of one model as a policy client; see `PolicyClient`.

    Args:
        endpoints: the pool to call; closed with the policy.
        options: options of the requests.
        name: name of the policy in its episodes. Default: the model's name.
    """

    def __init__(self, endpoints: ServerPool[ChatEndpoint], options: ChatOptions, *, name: str | None = None) -> None:
        if "messages" in options.without or {"messages", "stream", "n"} & options.extra_fields.keys():
            raise UsageError("the fields messages, stream and n of a chat are not for options to set")
        self.endpoints, self.options = endpoints, options
        self._name = name or options.model
        self.counts: dict[str, int] = {"prompt_tokens": 0, "completion_tokens": 0}

    @property
    def card(self) -> PolicyCard:
        """Name and sampling; an endpoint reports neither its weights nor its tokenizer."""
        return PolicyCard(name=self._name, sampling=self.options.sampling.model_dump(mode="json"))

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> "ChatConversation":
        """See `PolicyClient.open`."""
        return ChatConversation(self, seed, key, tools)

    async def close(self) -> None:
        """Close connections."""
        await self.endpoints.close()


@dataclass(slots=True)
class ChatConversation:
    """One rollout's messages; see `Conversation`."""

    policy: ChatPolicy
    seed: int
    key: str
    tools: Sequence[dict[str, Any]] | None
    _messages: list[Message] = field(default_factory=list)
    _turns: int = 0

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        """See `Conversation.decide`; `admissible` is ignored."""
        conversation = [*self._messages, *messages]
        body = self.policy.options.request(conversation, (self.seed + self._turns) % _SEEDS, self.tools)
        completion = await self.policy.endpoints.call(
            lambda endpoint: endpoint.complete(body),
            key=self.key,
            prompt_tokens=sum(len(str(message.get("content") or "")) for message in conversation) // 4,
            sampled=lambda answer: answer.completion_tokens or 0,
        )
        for name in self.policy.counts:
            self.policy.counts[name] += getattr(completion, name) or 0
        decision = _decision(completion)
        self._append_turn(messages, decision)
        return decision

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        """See `Conversation.resume`."""
        for messages, decision in turns:
            self._append_turn(messages, decision)

    def close(self) -> None:
        """See `Conversation.close`."""

    def _append_turn(self, messages: Sequence[Message], decision: Decision) -> None:
        self._messages += [*messages, decision.message]
        self._turns += 1


def _decision(completion: Completion) -> Decision:
    message = completion.message or {}
    content = message.get("content")
    other_fields = omit_fields(message, "role", "content", "reasoning_content", "tool_calls")
    return Decision(
        action=content
        if isinstance(content, str)
        else ""
        if content is None
        else msgspec.json.encode(content).decode(),
        finish_reason=completion.finish_reason,
        reasoning=message.get("reasoning_content") or None,
        tool_calls=message.get("tool_calls") or None,
        model=completion.model,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        extra=(omit_fields(completion.extra, *_OF_THE_CALL) or {}) | ({"message": other_fields} if other_fields else {})
        or None,
    )
