"""Engines: the protocol of servers that sample from a model over HTTP, and its errors.

An engine takes token ids and returns the exact token ids that it sampled. With them come log-probabilities of the
distribution it sampled from, and the versions of the weights. An engine's missing values become None and are never
guessed. `vllm.py` and `sglang.py` each hold all facts about one engine: sampling, versions, loading weights, health.
Endpoints that take only messages are not engines: `chat.py` calls them and records text.

`pool.py` presents several engines as one. It owns rate limits, retries, and engines that die and return.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, Field

from lake.errors import TrajlakeError


class Sampling(BaseModel, frozen=True, extra="forbid"):
    """How actions are sampled. Truncation (top-p, top-k, min-p) is off by default: it biases importance ratios."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature, which divides the logits; 0 takes the most likely token."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of an action, end token included."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """top-p threshold (1 = off). Biases importance ratios."""
    top_k: int = Field(default=0, ge=0)
    """top-k threshold (0 = off). Biases importance ratios."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """min-p threshold, relative to the likeliest token (0 = off). Biases importance ratios."""
    stop: tuple[str, ...] = ()
    """Stop sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of an engine."""

    prompt_ids: Sequence[int]
    """Token ids of the complete prompt."""
    sampling: Sampling
    seed: int | None = None
    """Seed of the sampling. None: the engine draws one."""
    stop_ids: Sequence[int] = ()
    """Tokens that end an answer in addition to the model's end token, such as the template's end-of-turn marker."""
    samples: int = 1
    """Number of answers to the prompt."""
    schema: dict[str, Any] | None = None
    """JSON schema for the answer, enforced by a grammar; its tokens are `constrained`."""
    adapter: str | None = None
    """LoRA adapter, by the name it was loaded under. None: the base model."""
    key: str = ""
    """Name of the rollout. Its calls go to the same engine, whose cache holds the prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled answer."""

    ids: list[int]
    """Token ids, end token included unless the answer was cut off."""
    logprobs: list[float]
    """Log-probabilities of `ids` in nats, under the sampling distribution if `logprobs_mode` is processed."""
    finish_reason: str
    """stop: the policy ended it. length: the limit cut it off. abort: the engine broke it off (pause, restart)."""
    versions: list[tuple[int | None, int, int]] = field(default_factory=list)
    """Version of the weights, first and last (inclusive) index into `ids`; None if not reported."""
    constrained: list[bool] | None = None
    """Per token: a grammar changed the distribution, so the log-probability is not the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCard:
    """An engine's description of itself."""

    engine: str
    """Name and version, stored as `tokens.engine`."""
    model: str
    """Model name for requests."""
    folder: str | None = None
    """Folder the model was loaded from, if reported."""
    max_tokens: int | None = None
    """Maximum tokens of prompt and answer together."""
    logprobs_mode: str | None = None
    """processed or raw; None if not reported."""
    dtype: str | None = None
    """Number type of the computation, if reported."""


class Engine(Protocol):
    """A server of one model."""

    url: str
    """Base URL, without /v1."""

    async def describe(self) -> EngineCard:
        """Return the engine's card. Raises EngineError."""

    async def generate(self, request: Request) -> list[Generation]:
        """Sample `request.samples` generations in one try; the pool owns retries. Raises EngineError."""

    async def logprobs(self, ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Return log-probabilities of each of `ids` but the first, given the previous ones, in nats at temperature 1.

        The trainer compares its own numbers with these after a push of weights. `adapter` is as in a request. Raises
        EngineError.
        """

    async def version(self) -> int | None:
        """Return the version of the weights, or None if it was never set. Raises EngineError."""

    async def newest_version(self) -> int | None:
        """Return the newest version it received, even if the load failed. Raises EngineError."""

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load the weights of a model folder under a version; calls in flight continue with the new weights.

        The engine pauses, loads, drops cached prefixes, takes the version and resumes, even after an error. So it
        samples no token between the weights and their version. Raises EngineError.
        """

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load or reload a LoRA adapter under a name that requests may use. Raises EngineError."""

    async def is_healthy(self) -> bool:
        """Return whether it answers."""

    async def close(self) -> None:
        """Close connections."""


class EngineError(TrajlakeError, RuntimeError):
    """An engine failed to do what was requested. The message names the engine, its answer and the next step."""


class EngineBusyError(EngineError):
    """The engine asks callers to wait (429, 503).

    Attributes:
        seconds: how long, if it says so.
    """

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class EngineGoneError(EngineError):
    """The engine cannot be reached or broke off: it died or is restarting."""


class EngineFailedError(EngineError):
    """The engine reports a failure (500, 502, 504)."""


class EngineRefusedError(EngineError):
    """The engine refuses the request and would refuse it again.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineAnswerError(EngineError):
    """The answer is impossible: mismatched counts of tokens and log-probabilities, or a different prompt."""


class ContextFullError(EngineError):
    """The prompt leaves no room for an answer."""


Answer = TypeVar("Answer")


class SharedAnswer(Generic[Answer]):
    """Asks once and shares the answer with all callers; they also share a failure.

    Rollouts start together. Without this, each of two thousand would ask the engine for its card.

    Args:
        ask: called again after a failure and after `forget`.
    """

    def __init__(self, ask: Callable[[], Awaitable[Answer]]) -> None:
        self._ask = ask
        self._answer: asyncio.Future[Answer] | None = None

    async def __call__(self) -> Answer:
        """Return the answer. Raises the error of `ask`."""
        answer = self._answer
        if answer is None or (answer.done() and (answer.cancelled() or answer.exception() is not None)):
            answer = self._answer = asyncio.ensure_future(self._ask())
        return await asyncio.shield(answer)  # a cancelled caller must not cancel the others

    def forget(self) -> None:
        """Ask again at the next call."""
        self._answer = None
