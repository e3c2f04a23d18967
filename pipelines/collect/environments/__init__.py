"""Environments: the protocol of everything that answers a policy's actions.

An environment speaks in chat messages. `reset(task)` starts an episode and returns the first messages for the policy.
`step(action)` takes the assistant's message, tool calls included, and returns the next messages. The end of a task
(`terminated`: success or failure) and a limit (`truncated`) are separate flags, because credit treats them differently.
A step without a reward has None, not 0.

Equal tasks start with equal messages, in every process: rollouts of one task are siblings, and their rewards are
compared. The manager refuses a group whose rollouts start differently.

`trajlake template environment FILE` writes an example; `--env FILE:make` plays it. Methods are coroutines. An
environment with plain functions runs in a separate thread (`user_code.py`), so that it blocks no other rollout. One
that answers in microseconds may set `runs_inline = True`.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from lake.records import Json
from pipelines.collect.policies import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Start of an episode, shared by siblings."""

    seed: int = 0
    """Seed of the environment's random draws; stored as `episodes.seed` and part of the group's key."""
    name: str | None = None
    """Stored as `episodes.task_id`. None: the first outcome names the task."""
    messages: list[Message] = field(default_factory=list)
    """The prompt, if the task has one."""
    ground_truth: Json = None
    """Reference for reward functions; stored with the episode, never shown to the policy."""
    data: dict[str, Json] = field(default_factory=dict)
    """Other columns of the row in a file of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An environment's answer."""

    messages: list[Message]
    """New messages for the policy, without earlier ones; at the end, the last ones."""
    reward: float | None = None
    """Reward of the last action. None: not rewarded. `reset` may not return one."""
    terminated: bool = False
    """The environment ended the episode: success or failure."""
    truncated: bool = False
    """A limit of the environment ended the episode: horizon or time."""
    tools: list[dict[str, Any]] | None = None
    """From `reset`: schemas of the functions that the policy may call, as in an OpenAI request."""
    task_id: str | None = None
    """From `reset`: name of the start, if the task has none."""
    ground_truth: Json = None
    """From `reset`: the ground truth, if the task has none."""
    is_action_valid: bool | None = None
    """Whether the last action was well-formed; None if unknown."""
    is_error: bool | None = None
    """Whether the messages report that the last action failed."""
    admissible: tuple[str, ...] = ()
    """Actions that have an effect now, for scripted policies; a model never sees them."""
    extra: dict[str, Json] | None = None
    """Further data of the last action: `steps.extra`; from `reset`: `episodes.extra`."""

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated


class Environment(Protocol):
    """An environment. Every rollout gets a separate instance."""

    @property
    def name(self) -> str:
        """Name and variant: `episodes.environment`."""

    @property
    def split(self) -> str | None:
        """Split of its tasks: `episodes.split`."""

    async def reset(self, task: Task) -> Outcome:
        """Start the task. Equal tasks start with equal messages, in every process."""

    async def step(self, action: Message) -> Outcome:
        """Take the assistant's message. Answer an invalid one; do not raise."""

    async def close(self) -> None:
        """Release processes and connections of the episode. Called once, also after an error."""
