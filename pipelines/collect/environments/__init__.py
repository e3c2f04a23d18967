"""Environments: the protocol that every environment is played by.

An environment speaks in chat messages. `reset(task)` opens an episode and gives the messages that its policy is shown
first; `step(action)` takes the assistant's message, tool calls included, and gives what the policy is shown next. That
the task is over (`terminated`: success or failure) and that a limit was reached (`truncated`) are told apart, because
credit is not the same after them. What nobody rewarded is None, not 0.

Equal tasks open in equal messages, in every process: rollouts of one task are siblings, and their rewards are compared.
The manager refuses a group whose members begin differently.

To write one, `trajlake template environment FILE` makes a file to begin with; `--env FILE:make` plays it. Methods are
coroutines; an environment whose methods are plain functions is played in a thread of its own (`threads.py`), so that
thousands of others go on while it blocks. One that answers in microseconds may say `runs_inline = True`.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from lake.records import Json
from pipelines.collect.policies import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Where an episode begins. Siblings share it."""

    seed: int = 0
    """Decides what the environment draws; stored as `episodes.seed`, and part of the group's key."""
    name: str | None = None
    """`episodes.task_id`; None: the environment names it in its first outcome."""
    messages: list[Message] = field(default_factory=list)
    """The prompt, where the task is one."""
    ground_truth: Json = None
    """What a reward function may compare with; stored with the episode, never shown to the policy."""
    data: dict[str, Json] = field(default_factory=dict)
    """Whatever else the row of a file of tasks says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an environment answers."""

    messages: list[Message]
    """What the policy is shown next, without anything it has seen or said before; after the end, what came last."""
    reward: float | None = None
    """Of the action that led here; None if nothing rewarded it, and from `reset`, where one is refused."""
    terminated: bool = False
    """The environment ended the episode: success or failure."""
    truncated: bool = False
    """A limit of the environment ended it: the horizon, a time."""
    tools: list[dict[str, Any]] | None = None
    """From `reset`: schemas of the functions that the policy may call, as in an OpenAI request."""
    task_id: str | None = None
    """From `reset`: the name of the start, where the task has none."""
    ground_truth: Json = None
    """From `reset`: where the environment knows it and the task does not."""
    is_action_valid: bool | None = None
    """Whether the last action was well-formed; None if the environment does not say."""
    is_error: bool | None = None
    """The messages say that the last action did not work."""
    admissible: tuple[str, ...] = ()
    """Actions that would have an effect now, for scripted policies; a model never sees them."""
    extra: dict[str, Json] | None = None
    """What else is worth keeping of the last action: `steps.extra`; from `reset`: `episodes.extra`."""

    @property
    def done(self) -> bool:
        """No further action is taken."""
        return self.terminated or self.truncated


class Environment(Protocol):
    """An environment. Every rollout gets an instance of its own."""

    @property
    def name(self) -> str:
        """Name and variant: `episodes.environment`."""
        ...

    @property
    def split(self) -> str | None:
        """The split that its tasks are drawn from: `episodes.split`."""
        ...

    async def reset(self, task: Task) -> Outcome:
        """Begin the task. Equal tasks begin in equal messages, in every process."""
        ...

    async def step(self, action: Message) -> Outcome:
        """Take the assistant's message; whatever is wrong with it is answered, not raised."""
        ...

    async def close(self) -> None:
        """Let go of what the episode holds: processes, connections. Called once, also after an error."""
        ...
