"""Playing rollouts: many environments and one policy in lock-step, in groups from identical starts.

A rollout is written down as an `EpisodeRecord`; nothing is scored or filtered. Wall-clock times are left out on
purpose: with them, playing the same seeds again would not give the same episode, and recording it again would be a
conflict instead of a replay.

A group is the siblings of one start seed in one collection round: what group-relative advantages are computed over.
Everything is a function of the seeds, whatever is played beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as integers

from pydantic import BaseModel, Field

from lake import ids
from lake.records import EpisodeRecord, StepRecord
from pipelines.collect.environments.games import Answer, TextGame
from pipelines.collect.policies import Decision, Message, Policy, PolicyCard, Turn


@dataclass(frozen=True, slots=True)
class Start:
    """Where one rollout begins, and which rollout of its group it is."""

    seed: int
    """Seed of the environment: siblings share it."""
    rollout_index: int
    """Number among the siblings."""
    rollout_seed: int
    """Seed of the policy's randomness: every rollout has its own."""


@dataclass(slots=True)
class _Rollout:
    """A rollout under way: the environment, its last answer, and the steps so far."""

    start: Start
    environment: TextGame
    outcome: Answer
    task_id: str
    initial_messages: list[Message]
    steps: list[StepRecord] = field(default_factory=list)

    def turn(self, index: int) -> Turn:
        """What the policy is shown next."""
        is_first = not self.steps
        messages = self.initial_messages if is_first else _messages(self.outcome)
        return Turn(index, messages, is_first=is_first, admissible=self.outcome.info.admissible)

    def advance(self, decision: Decision, card: PolicyCard) -> None:
        """Act, and write the step down."""
        before, after = self.outcome, self.environment.step(decision.action)
        self.steps.append(
            StepRecord(
                state=before.observation,
                action=decision.action,
                context=_messages(before) if self.steps else [],
                reward=after.reward,
                state_role="user",
                state_is_error=not before.info.is_admissible,
                is_action_valid=after.info.is_well_formed,
                model=card.name,
                policy_version=card.version,
                finish_reason=decision.finish_reason,
                tokens=decision.tokens,
            )
        )
        self.outcome = after


def play(environments_E: Sequence[TextGame], starts_E: Sequence[Start], policy: Policy) -> list[EpisodeRecord]:
    """Play one rollout per environment to its end: records in order, without the facts of their run and group."""
    card = policy.card
    session = policy.start([start.rollout_seed for start in starts_E])
    rollouts_E = [_begin(env, start) for env, start in zip(environments_E, starts_E, strict=True)]
    running = list(range(len(rollouts_E)))
    while running:
        turns = [rollouts_E[index].turn(index) for index in running]
        for index, decision in zip(running, session.act(turns), strict=True):
            rollouts_E[index].advance(decision, card)
        running = [index for index in running if not rollouts_E[index].outcome.done]
    return [_record(rollout, card) for rollout in rollouts_E]


def _begin(environment: TextGame, start: Start) -> _Rollout:
    outcome = environment.reset(start.seed)
    task_id = f"{environment.name}/{ids.to_text(outcome.info.initial_world_hash)}"
    return _Rollout(start, environment, outcome, task_id, _messages(outcome))


def _messages(outcome: Answer) -> list[Message]:
    return [{"role": "user", "content": outcome.observation}]


def _record(rollout: _Rollout, card: PolicyCard) -> EpisodeRecord:
    terminated = rollout.outcome.info.terminated
    tokens_S = [step.tokens for step in rollout.steps]
    return EpisodeRecord(
        task_id=rollout.task_id,
        steps=rollout.steps,
        rollout_index=rollout.start.rollout_index,
        environment=rollout.environment.name,
        split=rollout.environment.split,
        policy=card.name,
        policy_version=card.version,
        status="completed" if terminated else "truncated",
        terminated=terminated,
        stop_reason="environment" if terminated else "horizon",
        env_return=sum(step.reward or 0.0 for step in rollout.steps),
        seed=rollout.start.seed,
        completion_tokens=sum(len(t.action_ids) for t in tokens_S if t) if any(tokens_S) else None,
        initial_messages=rollout.initial_messages,
        final_observation=_messages(rollout.outcome),
        sampling=card.sampling,
        tokenizer=card.tokenizer,
        chat_template=card.chat_template,
        source_format="recorder",
    )


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
        starts_E = [
            Start(seed, index, ids.key_hash("rollout", run_seed, collection_round, seed, index))
            for seed in batch_P
            for index in range(size)
        ]
        records_E = play([make_environment() for _ in starts_E], starts_E, policy)
        for record in records_E:
            record.collection_round = collection_round
            record.expected_group_size = size
        for at, seed in enumerate(batch_P):
            group_G = records_E[at * size : (at + 1) * size]
            _claim(group_G[0].task_id, seed, seed_of)
            yield group_G


def _claim(task_id: str, seed: int, seed_of: dict[str, int]) -> None:
    if task_id in seed_of:
        msg = f"start seeds {seed_of[task_id]} and {seed} draw the same world; take them from distinct_seeds()"
        raise ValueError(msg)
    seed_of[task_id] = seed
