"""Engines: the protocol of what serves a model over HTTP, and what they have in common.

An engine takes token ids and gives token ids: the exact ones that it sampled, with the log-probabilities of the very
distribution that it sampled from, and the versions of the weights that made them. What it cannot tell is None and never
guessed. `vllm.py` and `sglang.py` hold all that is known of one engine each: sampling, versions, loading weights,
health. Endpoints that take nothing but messages are no engines here; `chat.py` speaks to them, and what they say is
recorded as text.

Several engines are one behind `pool.py`, which also owns rate limits, retries, and engines that die and come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, Field

from lake.errors import TrajlakeError


class Sampling(BaseModel, frozen=True, extra="forbid"):
    """How actions are sampled. Truncation (top-p, top-k, min-p) is off unless asked for: it biases ratios."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 takes the likeliest token."""
    max_tokens: int = Field(default=512, ge=1)
    """Tokens after which an action is cut off, its end token included."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; 1 = off."""
    top_k: int = Field(default=0, ge=0)
    """Kept tokens; 0 = off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Minimum relative probability; 0 = off."""
    stop: tuple[str, ...] = ()
    """Texts that end an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of an engine."""

    prompt_ids: Sequence[int]
    """The whole prompt."""
    sampling: Sampling
    seed: int | None = None
    """Of the sampling; None: the engine draws one."""
    stop_ids: Sequence[int] = ()
    """Tokens that end an answer beside the model's own end token: the marker that a chat template ends turns by."""
    samples: int = 1
    """How many answers to the one prompt."""
    schema: dict[str, Any] | None = None
    """JSON schema that the answer is held to, by a grammar: its tokens are `constrained`."""
    adapter: str | None = None
    """LoRA adapter, by the name that it was loaded under; None: the model itself."""
    key: str = ""
    """Names the rollout: its calls go to the same engine, whose cache holds the prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine sampled."""

    ids: list[int]
    """Its end token included, unless it was cut off."""
    logprobs: list[float]
    """Of `ids`, in nats, under the distribution that they were sampled from where `logprobs_mode` is processed."""
    finish_reason: str
    """stop: ended by the policy. length: cut off by the limit. abort: by the engine (a pause, a restart)."""
    versions: list[tuple[int | None, int, int]] = field(default_factory=list)
    """Version of the weights, first and last (inclusive) index into `ids`; None where the engine does not say."""
    constrained: list[bool] | None = None
    """Per token: a grammar changed the choice, so its log-probability is not the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCard:
    """What an engine says of itself."""

    engine: str
    """Name and version, for `tokens.engine`."""
    model: str
    """The name that requests call the model by."""
    folder: str | None = None
    """Where the engine loaded it from, if it says so."""
    max_tokens: int | None = None
    """Longest sequence, prompt and answer."""
    logprobs_mode: str | None = None
    """processed or raw; None if it does not say."""
    dtype: str | None = None
    """Number type that it computes in, if it says so."""


class Engine(Protocol):
    """A server of one model."""

    url: str
    """Base URL, without /v1."""

    async def describe(self) -> EngineCard:
        """What it is. Raises EngineError."""
        ...

    async def generate(self, request: Request) -> list[Generation]:
        """Sample; as many generations as `request.samples`. One try: the pool owns retries. Raises EngineError."""
        ...

    async def logprobs(self, ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Log-probabilities of each of `ids` but the first, given those before it, in nats at temperature 1.

        What the trainer's own numbers are compared with after its weights were pushed. `adapter` is as in a request.
        Raises EngineError.
        """
        ...

    async def version(self) -> int | None:
        """Version of the weights that it has; None if it was never told one. Raises EngineError."""
        ...

    async def newest_version(self) -> int | None:
        """Newest version that it was given, also if it failed to load it: others must be above. Raises EngineError."""
        ...

    async def load_weights(self, folder: Path, version: int) -> None:
        """Take over the weights of a model folder, under a version; calls in flight go on with the new weights.

        No token is sampled between the weights and their version: it pauses, loads, forgets cached prefixes, takes the
        version and goes on, also after an error. Raises EngineError.
        """
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load, or load again, a LoRA adapter under a name that requests may use. Raises EngineError."""
        ...

    async def is_healthy(self) -> bool:
        """Whether it answers."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class EngineError(TrajlakeError, RuntimeError):
    """An engine did not do what it was asked for. Says which one, what it answered, and what to do."""


class EngineBusyError(EngineError):
    """It asks to be left alone for a while (429, 503).

    Attributes:
        seconds: how long, if it says so.
    """

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class EngineGoneError(EngineError):
    """It cannot be reached, or broke off: it died, or is being restarted."""


class EngineFailedError(EngineError):
    """It says that it failed (500, 502, 504)."""


class EngineRefusedError(EngineError):
    """It refuses what it was asked for, and would again.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineAnswerError(EngineError):
    """It answered what cannot be: other counts of tokens and log-probabilities, a prompt that is not ours."""


class ContextFullError(EngineError):
    """The prompt leaves no room for an answer."""
