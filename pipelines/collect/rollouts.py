"""Playing rollouts: many environments and one policy in lock-step, in groups from identical starts.

A rollout is written down as an `EpisodeRecord` (`episode_records.py` says how); nothing is scored or filtered.

A group is the siblings of one start seed in one collection round: what group-relative advantages are computed over.
Everything is a function of the seeds, whatever is played beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as integers

from pydantic import BaseModel, Field

from lake.records import EpisodeRecord
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.environments.games import TextGame, outcome, start_name
from pipelines.collect.episode_records import Sums, begun, decided, rollout_seed
from pipelines.collect.players import Rollout
from pipelines.collect.policies import Decision, Policy, PolicyCard, Turn


@dataclass(slots=True)
class _Rollout:
    """A rollout under way: the environment, its last answer, and the steps so far."""

    environment: TextGame
    outcome: Outcome
    record: EpisodeRecord
    sums: Sums = field(default_factory=Sums)

    def turn(self, index: int) -> Turn:
        """What the policy is shown next."""
        is_first = not self.record.steps
        return Turn(index, self.outcome.messages, is_first=is_first, admissible=self.outcome.admissible)

    def advance(self, decision: Decision, card: PolicyCard) -> None:
        """Act, and write the step down."""
        after = outcome(self.environment.step(decision.action))
        step = decided(self.outcome, decision, after, card, is_first=not self.record.steps)
        self.record.steps.append(step)
        self.sums.add(step)
        self.outcome = after

    def ended(self) -> EpisodeRecord:
        """The record, with how it ended."""
        ending = self.sums.ended(self.outcome)
        for name in ("status", "terminated", "stop_reason", "env_return", "final_observation", "completion_tokens"):
            setattr(self.record, name, getattr(ending, name))
        return self.record


def play(environments_E: Sequence[TextGame], rollouts_E: Sequence[Rollout], policy: Policy) -> list[EpisodeRecord]:
    """Play one rollout per environment to its end: records in order."""
    card = policy.card
    session = policy.start([rollout.seed for rollout in rollouts_E])
    playing_E = [_begin(env, rollout, card) for env, rollout in zip(environments_E, rollouts_E, strict=True)]
    running = list(range(len(playing_E)))
    while running:
        turns = [playing_E[index].turn(index) for index in running]
        for index, decision in zip(running, session.act(turns), strict=True):
            playing_E[index].advance(decision, card)
        running = [index for index in running if not playing_E[index].outcome.done]
    return [playing.ended() for playing in playing_E]


def _begin(environment: TextGame, rollout: Rollout, card: PolicyCard) -> _Rollout:
    answer = environment.reset(rollout.task.seed)
    first = outcome(answer, task_id=start_name(environment, answer))
    record = begun(rollout, first, card, environment=environment.name, split=environment.split)
    return _Rollout(environment, first, record)


class GroupConfig(BaseModel, frozen=True, extra="forbid"):
    """How rollouts are grouped and batched."""

    group_size: int = Field(default=8, ge=1)
    """Siblings per start."""
    parallel: int = Field(default=256, ge=1)
    """Rollouts played side by side, at least one whole group. Bounds memory; does not change what is sampled."""


def distinct_seeds(make_environment: Callable[[], TextGame], first: int, count: int) -> list[int]:
    """The first `count` seeds from `first` on whose initial worlds all differ.

    A start's world is its task, and a round holds a task once: the same world drawn by two seeds would be one group.
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
        make_environment: a fresh environment; siblings get one each.
        policy: who plays.
        seeds_P: start seeds, one group each. ValueError if two draw the same world (see `distinct_seeds`).
        config: group size and batching.
        run_seed: other seeds give other samples from the same starts.
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
                seed=rollout_seed(run_seed, collection_round, seed, index),
            )
            for seed in batch_P
            for index in range(size)
        ]
        records_E = play([make_environment() for _ in rollouts_E], rollouts_E, policy)
        for at, seed in enumerate(batch_P):
            group_G = records_E[at * size : (at + 1) * size]
            _claim(group_G[0].task_id, seed, seed_of)
            yield group_G


def _claim(task_id: str, seed: int, seed_of: dict[str, int]) -> None:
    if task_id in seed_of:
        msg = f"start seeds {seed_of[task_id]} and {seed} draw the same world; take them from distinct_seeds()"
        raise ValueError(msg)
    seed_of[task_id] = seed
