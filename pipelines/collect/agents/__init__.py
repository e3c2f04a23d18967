"""Agents: functions that play a task by talking to the endpoint they are handed.

    def agent(task: Task, client: Client): ...

An agent is any function, sync or async, that talks to a model through a URL: plain client code, LangGraph, a framework
with its own loop. It is handed an address of the recording proxy that names its rollout, so each of its calls becomes a
step with the exact tokens, and nothing in it knows of the recorder. What it returns says how it went:

* a list of messages, or None: it is done; nothing rewarded it (a reward function may, later);
* a number: its reward;
* a `Result`: reward, scores, status, ground truth.

An exception is a failed rollout, with its text. `trajlake template agent FILE` makes a file to begin with; `--agent
FILE:fn` plays it.
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
    """The endpoint that an agent talks to; every call that is made there belongs to its rollout."""

    base_url: str
    """With /v1, as OPENAI_BASE_URL."""
    model: str
    """The model to ask for."""
    api_key: str = "none"
    """Any: the endpoint wants none."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Arguments that each call should have (temperature, max_tokens, seed), so that the trainer knows them."""

    def openai(self) -> "OpenAI":
        """A client of the package openai. Raises MissingExtraError."""
        client: OpenAI = _openai().OpenAI(**self._options())
        return client

    def async_openai(self) -> "AsyncOpenAI":
        """An async client of the package openai. Raises MissingExtraError."""
        client: AsyncOpenAI = _openai().AsyncOpenAI(**self._options())
        return client

    def _options(self) -> dict[str, Any]:
        """Of a client of the package openai: its own time-outs, but for the 5 s that it has to connect.

        Many agents in one event loop hold it up for longer while they make their clients, 30 ms each.
        """
        patience = _openai().Timeout(600.0, connect=120.0)
        return {"base_url": self.base_url, "api_key": self.api_key, "max_retries": 0, "timeout": patience}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How an agent's rollout went."""

    reward: float | None = None
    """`episodes.env_return`."""
    scores: dict[str, float] = field(default_factory=dict)
    """Rows of `scores`, by the name of their scorer."""
    status: str = "completed"
    """completed, truncated, aborted, failed."""
    stop_reason: str | None = None
    error: str | None = None
    """What went wrong."""
    messages: list[Message] | None = None
    """The conversation; for the agent's own use, since its calls are recorded."""
    ground_truth: Json = None


Agent = Callable[[Task, Client], Any | Awaitable[Any]]
"""What `--agent FILE:fn` names."""


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise MissingExtraError('the package openai is not installed: pip install "openai>=3.51"') from error
    return openai
