"""Agents: functions that play a task by calling a model at the URL they receive.

    def agent(task: Task, client: Client): ...

An agent is any function, sync or async, that calls a model through a URL: plain client code, LangGraph, or a framework
with its own loop. The URL points to the recording proxy and names the rollout. So each call becomes a step with its
exact tokens, and the agent needs no recorder. Its return value ends the episode:

* a list of messages, or None: done without a reward (a reward function may add one later);
* a number: the reward;
* a `Result`: reward, scores, status, ground truth.

An exception makes a failed rollout and is stored as its error. `trajlake template agent FILE` writes an example;
`--agent FILE:fn` plays it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lake.errors import MissingExtraError
from lake.records import Json
from pipelines.collect.environments import Task
from pipelines.collect.policies import Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The endpoint of one rollout; every call to it is recorded in that rollout."""

    base_url: str
    """Base URL with /v1, as in OPENAI_BASE_URL."""
    model: str
    """Model name for requests."""
    api_key: str = "none"
    """Any value: the endpoint needs no key."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Arguments for each call (temperature, max_tokens, seed), so that the trainer knows them."""

    def openai(self) -> "OpenAI":
        """Return a client of the openai package. Raises MissingExtraError."""
        client: OpenAI = _openai().OpenAI(**self._options())
        return client

    def async_openai(self) -> "AsyncOpenAI":
        """Return an async client of the openai package. Raises MissingExtraError."""
        client: AsyncOpenAI = _openai().AsyncOpenAI(**self._options())
        return client

    def _options(self) -> dict[str, Any]:
        """Build the options of an openai client, with a longer connect timeout than its default of 5 s.

        Creating a client takes 30 ms. Many agents in one event loop can block it for longer than 5 s.
        """
        patience = _openai().Timeout(600.0, connect=120.0)
        return {"base_url": self.base_url, "api_key": self.api_key, "max_retries": 0, "timeout": patience}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How an agent's rollout ended."""

    reward: float | None = None
    """Stored as `episodes.env_return`."""
    scores: dict[str, float] = field(default_factory=dict)
    """Rows of `scores`, keyed by scorer name."""
    status: str = "completed"
    """One of completed, truncated, aborted, failed."""
    stop_reason: str | None = None
    error: str | None = None
    """Error message."""
    messages: list[Message] | None = None
    """The conversation. It is not stored, since the calls are recorded."""
    ground_truth: Json = None


Agent = Callable[[Task, Client], Any | Awaitable[Any]]
"""The type of the function that `--agent FILE:fn` names."""


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise MissingExtraError('the package openai is not installed: pip install "openai>=3.51"') from error
    return openai
