"""Environments of gymnasium whose actions are words or numbers: toy text, and any with a Text or Discrete action space.

A policy is shown the environment's `ansi` rendering where it has one, else the observation itself, and answers with the
name or the number of an action. An answer that is none is told, costs a step of `max_steps`, and does not reach the
environment: otherwise a policy that never says anything valid would play for ever. The environment's own time limit is
kept as well, and so are termination and truncation apart.

Facts: https://gymnasium.farama.org/environments/toy_text/ (names and order of actions; CliffWalking and Blackjack have
no limit; CliffWalking has one start, whatever the seed).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, Field, field_validator

from lake.errors import MissingExtraError, UsageError
from lake.records import Json
from lake.settings import validated
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.environments.ansi import plain
from pipelines.collect.policies import Message

_TOY_ACTIONS = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""How the ids of toy text begin -> the names of their actions, which the package keeps in its documentation."""
_WORD = re.compile(r"[\W_]*?(-?\w.*?)[\W_]*", re.DOTALL)
"""An answer without the punctuation around it; a minus belongs to its number."""


class GymnasiumSettings(BaseModel, frozen=True, extra="allow"):
    """Settings of `--env gymnasium:ID`; any other `--env-arg` is an argument of the environment itself."""

    actions: tuple[str, ...] = ()
    """Names of the actions 0, 1, ..., as `a|b|c` or a JSON list. Left out: those of toy text, else numbers."""
    max_steps: int | None = Field(default=None, ge=1)
    """Answers after which an episode is cut off, invalid ones included. Left out: the environment's own limit, else
    100."""
    prompt: str | None = None
    """Opens the conversation, before the first observation. Left out: the id, and what may be answered."""

    @field_validator("actions", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return value.split("|") if isinstance(value, str) else value


def maker(what: str, arguments: Mapping[str, Any]) -> Callable[[], "GymnasiumText"]:
    """Makes environments of an id.

    Raises:
        MissingExtraError: gymnasium is not installed.
        UsageError: no such id, arguments that it does not take, or spaces that are no text.
    """
    gymnasium = _gymnasium()
    settings = validated(GymnasiumSettings, arguments, "--env-arg of gymnasium: ")
    given = dict(settings.model_extra or {})

    def make(**more: Any) -> Any:
        try:
            return gymnasium.make(what, disable_env_checker=True, **given, **more)
        except Exception as error:
            msg = f"--env gymnasium:{what} cannot be made: {type(error).__name__}: {error}"
            raise UsageError(f"{msg}; arguments: {given or 'none'}") from error

    with make() as probe:
        _refuse_what_is_no_text(probe, what, gymnasium.spaces)
        is_drawn = "ansi" in (probe.metadata.get("render_modes") or ())
    mode = (
        {"render_mode": "ansi"} if is_drawn and not isinstance(probe.observation_space, gymnasium.spaces.Text) else {}
    )
    return lambda: GymnasiumText(make(**mode), what, settings)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError('the package gymnasium is not installed: pip install "trajlake[gymnasium]"') from error
    return gymnasium


def _refuse_what_is_no_text(environment: Any, what: str, spaces: Any) -> None:
    if not isinstance(environment.action_space, spaces.Discrete | spaces.Text):
        msg = f"--env gymnasium:{what}: its actions are {environment.action_space}; valid: Discrete and Text"
        raise UsageError(f"{msg}. Write an environment of your own around it: trajlake template environment FILE.py")
    if len(getattr(environment.observation_space, "shape", None) or ()) > 1:
        msg = (
            f"--env gymnasium:{what}: its observations are {environment.observation_space}; valid: text, numbers, short"
        )
        raise UsageError(f"{msg} vectors and tuples of them")


class GymnasiumText:
    """One environment of gymnasium, spoken to in text."""

    split = None

    def __init__(self, environment: Any, what: str, settings: GymnasiumSettings) -> None:
        self.name = f"gymnasium:{what}"
        self.runs_inline = type(environment.unwrapped).__module__.startswith("gymnasium.envs.toy_text")
        self._environment = environment
        self._actions = Actions.of(environment.action_space, what, settings.actions)
        own_limit = environment.spec.max_episode_steps if environment.spec else None
        self._max_steps = settings.max_steps or own_limit or 100
        self._prompt = settings.prompt or f"You play {what}. {self._actions.request}"
        self._taken = 0
        self._view = ""
        self._admissible: tuple[str, ...] = ()

    def reset(self, task: Task) -> Outcome:
        """Begin with the task's seed."""
        self._taken = 0
        observation, info = self._environment.reset(seed=task.seed)
        self._look(observation, info)
        return Outcome(
            messages=[{"role": "user", "content": f"{self._prompt}\n\n{self._view}"}],
            task_id=f"{self.name}/{task.seed}",
            admissible=self._admissible,
        )

    def step(self, action: Message) -> Outcome:
        """Take an action, if the answer is one."""
        self._taken += 1
        is_late = self._taken >= self._max_steps
        chosen = self._actions.read(str(action.get("content") or ""))
        if chosen is None:
            refused = f"That is not an action. {self._actions.request}\n\n{self._view}"
            return Outcome(
                messages=[{"role": "user", "content": refused}],
                truncated=is_late,
                is_action_valid=False,
                is_error=True,
                admissible=self._admissible,
            )
        observation, reward, terminated, truncated, info = self._environment.step(chosen)
        self._look(observation, info)
        is_over = bool(terminated)
        return Outcome(
            messages=[{"role": "user", "content": self._view}],
            reward=float(reward),
            terminated=is_over,
            truncated=not is_over and (bool(truncated) or is_late),
            is_action_valid=True,
            admissible=self._admissible,
            extra={"observation": _json(observation)},
        )

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _look(self, observation: Any, info: Mapping[str, Any]) -> None:
        self._admissible = self._actions.admissible(info)
        if self._environment.render_mode == "ansi":
            self._view = plain(str(self._environment.render()))
        else:
            self._view = observation if isinstance(observation, str) else str(_json(observation))


class Actions:
    """What may be answered: a text, or one of some names, which stand for numbers."""

    def __init__(self, names: tuple[str, ...], first: int, space: Any) -> None:
        self._names = names
        self._first = first
        self._space = space

    @classmethod
    def of(cls, space: Any, what: str, names: tuple[str, ...]) -> "Actions":
        """Of an action space. Raises UsageError: names that are not as many as the actions, or not distinct."""
        if not hasattr(space, "n"):
            return cls((), 0, space)
        count, first = int(space.n), int(space.start)
        toy = next((toy for start, toy in _TOY_ACTIONS.items() if what.startswith(start)), ())
        names = names or toy or tuple(str(first + index) for index in range(count))
        if len({name.lower() for name in names}) != count:
            msg = f"--env-arg actions={'|'.join(names)}: gymnasium:{what} has {count} actions; valid: as many names"
            raise UsageError(f"{msg}, all different")
        return cls(names, first, space)

    @property
    def request(self) -> str:
        """Says what may be answered."""
        if self._names:
            return f"Answer with one action: {', '.join(self._names)}."
        return f"Answer with a text of at most {self._space.max_length} characters."

    def read(self, answer: str) -> Any | None:
        """The action that an answer says by name or number, as a whole or in its last line; None if it says none."""
        if not self._names:
            return next((text for text in (answer, answer.strip()) if self._space.contains(text)), None)
        last = (answer.strip().splitlines() or [""])[-1]
        for said in (answer, last):
            found = _WORD.fullmatch(said)
            for index, name in enumerate(self._names):
                if found and found[1].lower() in (name.lower(), str(self._first + index)):
                    return self._first + index
        return None

    def admissible(self, info: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the actions that would have an effect, by the environment's mask if it gives one."""
        mask = info.get("action_mask")
        return tuple(sorted(name for index, name in enumerate(self._names) if mask is None or mask[index]))


def _json(observation: Any) -> Json:
    """An observation as JSON: arrays and tuples as lists, NumPy's numbers as numbers."""
    if isinstance(observation, Mapping):
        return {str(key): _json(value) for key, value in observation.items()}
    if isinstance(observation, tuple | list):
        return [_json(value) for value in observation]
    given: Json = observation.tolist() if hasattr(observation, "tolist") else observation
    return given
