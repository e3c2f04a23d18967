"""Text games: small state machines that speak text, the simplest kind of environment.

`reset(seed)` draws a start, the same one for the same seed in every process; `step(action)` answers an action. What a
learner must not see (which actions would be admitted, the hash of the start) travels in `Info`, beside the text. The
conversation a policy sees is one user message per observation.

Games are plain functions of their state, so a policy in this process plays hundreds of them in lock-step
(`pipelines.collect.rollouts`). `GameEnvironment` makes one an environment like any other.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lake import ids
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message


@dataclass(frozen=True, slots=True)
class Info:
    """Facts beside the observation, for the collector and for scripted policies."""

    admissible: tuple[str, ...]
    """Actions that would have an effect now, sorted; empty once the episode is over."""
    is_well_formed: bool = True
    """The last action was a sentence of the environment's grammar."""
    is_admissible: bool = True
    """The last action had an effect. A well-formed action can be inadmissible: a locked door, a thing out of reach."""
    terminated: bool = False
    """The game ended the episode (success or failure), as opposed to the horizon."""
    initial_world_hash: int = 0
    """Hash of the whole initial world, hidden parts included: what held-out splits are disjoint by."""


class Answer(NamedTuple):
    """What a game answers."""

    observation: str
    """What the policy sees; the anchor state of its next decision."""
    reward: float
    """Reward of the action that led here; 0.0 from `reset`."""
    done: bool
    """No further action is taken: the game ended the episode or the horizon is reached."""
    info: Info


class TextGame(Protocol):
    """A text game. Instances are cheap: every rollout gets its own."""

    name: str
    """Name and variant, for `episodes.environment`."""
    split: str
    """The split its starts are drawn from, for `episodes.split`."""

    def reset(self, seed: int) -> Answer:
        """Draw a start. Equal seeds give equal starts, in every process."""
        ...

    def step(self, action: str) -> Answer:
        """Take an action; malformed and inadmissible ones are answered. RuntimeError if no episode is running."""
        ...


class GameEnvironment:
    """A text game as an environment: one user message per observation, the action is the text of the answer."""

    def __init__(self, game: TextGame) -> None:
        self._game = game

    @property
    def name(self) -> str:
        """The game's."""
        return self._game.name

    @property
    def split(self) -> str:
        """The game's."""
        return self._game.split

    async def reset(self, task: Task) -> Outcome:
        """Draw the start of the task's seed; its name is the game's, and the hash of the whole initial world."""
        answer = self._game.reset(task.seed)
        return outcome(answer, task_id=task.name or start_name(self._game, answer))

    async def step(self, action: Message) -> Outcome:
        """Say the text of an answer; what tool calls it holds mean nothing to a game."""
        return outcome(self._game.step(str(action.get("content") or "")))

    async def close(self) -> None:
        """A game holds nothing."""


def start_name(game: TextGame, answer: Answer) -> str:
    """What `reset` drew: the game's name, and the hash of the whole initial world."""
    return f"{game.name}/{ids.to_text(answer.info.initial_world_hash)}"


def outcome(answer: Answer, task_id: str | None = None) -> Outcome:
    """A game's answer as that of any environment; `task_id` names the start that `reset` drew."""
    info = answer.info
    return Outcome(
        messages=[{"role": "user", "content": answer.observation}],
        reward=answer.reward if task_id is None else None,
        terminated=info.terminated,
        truncated=answer.done and not info.terminated,
        task_id=task_id,
        is_action_valid=info.is_well_formed,
        is_error=not info.is_admissible,
        admissible=info.admissible,
    )
