"""Text games, and lock-step play of many games with one policy.

A text game is a small state machine that speaks text. `reset(seed)` draws a start, the same one for the same seed in
every process; `step(action)` answers an action. `Info` carries facts that a learner must not see: admissible
actions and the hash of the start. A policy sees one user message per observation. `GameEnvironment` adapts a game to
the protocol of environments.

`collect_groups` plays groups of siblings: all rollouts of one start seed in one collection round. It plays hundreds of
games in lock-step and records each as an `EpisodeRecord` (see `players.py`), without scoring or filtering. Every record
depends on the seeds only, not on the other rollouts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as integers
from typing import NamedTuple, Protocol

from pydantic import BaseModel, Field

from lake import ids
from lake.records import EpisodeRecord
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.players import Rollout, StepTotals, build_episode, build_step, derive_rollout_seed
from pipelines.collect.policies import Decision, Message, Policy, PolicyCard, Turn


@dataclass(frozen=True, slots=True)
class Info:
    """Facts for the collector and scripted policies, not shown to a model."""

    admissible: tuple[str, ...]
    """Actions that have an effect now, sorted; empty after the end."""
    is_well_formed: bool = True
    """Whether the last action was a sentence of the environment's grammar."""
    is_admissible: bool = True
    """Whether the last action had an effect. A well-formed action can have none: a locked door, a thing out of reach.
    """
    terminated: bool = False
    """Whether the game ended the episode (success or failure), as opposed to the horizon."""
    initial_world_hash: int = 0
    """Hash of the complete initial world, hidden parts included. Held-out splits are disjoint by it."""


class Answer(NamedTuple):
    """A game's answer."""

    observation: str
    """Text for the policy; the anchor state of its next decision."""
    reward: float
    """Reward of the last action; 0.0 from `reset`."""
    done: bool
    """Whether the episode has ended, by the game or the horizon."""
    info: Info


class TextGame(Protocol):
    """A text game. Every rollout gets its own instance."""

    name: str
    """Name and variant, for `episodes.environment`."""
    split: str
    """Split of its starts, stored as `episodes.split`."""

    def reset(self, seed: int) -> Answer:
        """Draw a start. Equal seeds give equal starts, in every process."""

    def step(self, action: str) -> Answer:
        """Take an action; malformed and inadmissible ones get an answer. Raises RuntimeError: no episode is running."""


class GameEnvironment:
    """Adapts a text game to an environment: one user message per observation, one action per answer."""

    def __init__(self, game: TextGame) -> None:
        self._game = game

    @property
    def name(self) -> str:
        """The game's name."""
        return self._game.name

    @property
    def split(self) -> str:
        """The game's split."""
        return self._game.split

    async def reset(self, task: Task) -> Outcome:
        """Draw the start of the task's seed; its name is the game's plus the hash of the initial world."""
        answer = self._game.reset(task.seed)
        return build_outcome(answer, task_id=task.name or name_start(self._game, answer))

    async def step(self, action: Message) -> Outcome:
        """Pass the text of an answer to the game; tool calls are ignored."""
        return build_outcome(self._game.step(str(action.get("content") or "")))

    async def close(self) -> None:
        """Do nothing: a game holds no resources."""


def name_start(game: TextGame, answer: Answer) -> str:
    """Return the name of a start: the game's name plus the hash of the initial world."""
    return f"{game.name}/{ids.to_text(answer.info.initial_world_hash)}"


def build_outcome(answer: Answer, task_id: str | None = None) -> Outcome:
    """Convert a game's answer to an outcome; `task_id` names the start after `reset`."""
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


@dataclass(slots=True)
class _LockStepRollout:
    """A running rollout: the environment, its last answer, and the totals of its steps."""

    environment: TextGame
    outcome: Outcome
    record: EpisodeRecord
    sums: StepTotals = field(default_factory=StepTotals)

    def turn(self, index: int) -> Turn:
        """Build the policy's next turn."""
        is_first = not self.record.steps
        return Turn(index, self.outcome.messages, is_first=is_first, admissible=self.outcome.admissible)

    def advance(self, decision: Decision, card: PolicyCard) -> None:
        """Take an action and record the step."""
        after = build_outcome(self.environment.step(decision.action))
        step = build_step(self.outcome, decision, after, card, is_first=not self.record.steps)
        self.record.steps.append(step)
        self.sums.add(step)
        self.outcome = after

    def build_record(self) -> EpisodeRecord:
        """Complete the record with its ending and return it."""
        ending = self.sums.ended(self.outcome)
        for name in ("status", "terminated", "stop_reason", "env_return", "final_observation", "completion_tokens"):
            setattr(self.record, name, getattr(ending, name))
        return self.record


def play(environments_E: Sequence[TextGame], rollouts_E: Sequence[Rollout], policy: Policy) -> list[EpisodeRecord]:
    """Play one rollout per environment to its end, and return the records in order."""
    card = policy.card
    session = policy.start([rollout.seed for rollout in rollouts_E])
    playing_E = [_begin(env, rollout, card) for env, rollout in zip(environments_E, rollouts_E, strict=True)]
    running = list(range(len(playing_E)))
    while running:
        turns = [playing_E[index].turn(index) for index in running]
        for index, decision in zip(running, session.act(turns), strict=True):
            playing_E[index].advance(decision, card)
        running = [index for index in running if not playing_E[index].outcome.done]
    return [playing.build_record() for playing in playing_E]


def _begin(environment: TextGame, rollout: Rollout, card: PolicyCard) -> _LockStepRollout:
    answer = environment.reset(rollout.task.seed)
    first = build_outcome(answer, task_id=name_start(environment, answer))
    record = build_episode(rollout, first, card, environment=environment.name, split=environment.split)
    return _LockStepRollout(environment, first, record)


class GroupConfig(BaseModel, frozen=True, extra="forbid"):
    """Size of groups and of batches."""

    group_size: int = Field(default=8, ge=1)
    """Siblings per start."""
    parallel: int = Field(default=256, ge=1)
    """Rollouts played together, at least one complete group. Limits memory; does not change the samples."""


def distinct_seeds(make_environment: Callable[[], TextGame], first: int, count: int) -> list[int]:
    """Return the first `count` seeds from `first` whose initial worlds all differ.

    A start's world is its task, and a round holds each task once. Two seeds with the same world would share a group.
    """
    environment = make_environment()
    seed_of: dict[int, int] = {}
    for seed in integers(first):
        if len(seed_of) == count:
            break
        seed_of.setdefault(environment.reset(seed).info.initial_world_hash, seed)
    return list(seed_of.values())


def collect_groups(
    make_environment: Callable[[], TextGame],
    policy: Policy,
    seeds_P: Sequence[int],
    *,
    config: GroupConfig,
    run_seed: int,
    collection_round: int,
) -> Iterator[list[EpisodeRecord]]:
    """Play a group per start seed.

    Args:
        make_environment: makes one environment per rollout.
        policy: the policy.
        seeds_P: start seeds, one group each. ValueError if two draw the same world (see `distinct_seeds`).
        config: group size and batching.
        run_seed: seed of the samples.
        collection_round: part of the group's key.

    Yields:
        The siblings of one start, in order of their rollout index; groups in order of `seeds_P`.
    """
    size = config.group_size
    seed_of: dict[str, int] = {}
    groups_at_once = max(1, config.parallel // size)
    for first in range(0, len(seeds_P), groups_at_once):
        batch_P = seeds_P[first : first + groups_at_once]
        rollouts_E = [
            Rollout(
                task=Task(seed=seed),
                rollout_index=index,
                collection_round=collection_round,
                expected_group_size=size,
                seed=derive_rollout_seed(run_seed, collection_round, seed, index),
            )
            for seed in batch_P
            for index in range(size)
        ]
        records_E = play([make_environment() for _ in rollouts_E], rollouts_E, policy)
        for at, seed in enumerate(batch_P):
            group_G = records_E[at * size : (at + 1) * size]
            task_id = group_G[0].task_id
            if task_id in seed_of:
                msg = f"start seeds {seed_of[task_id]} and {seed} draw the same world; take them from distinct_seeds()"
                raise ValueError(msg)
            seed_of[task_id] = seed
            yield group_G
