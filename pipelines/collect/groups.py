"""Groups of rollouts from one identical start: what group-relative advantages are computed over.

A group is the siblings of one start seed in one collection round. Everything is a function of the seeds: the same
round of the same run with the same policy gives the same episodes, whatever is played beside them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count as integers

from pydantic import BaseModel, ConfigDict, Field

from lake import ids
from lake.records import EpisodeRecord
from pipelines.collect.environments.protocol import Environment
from pipelines.collect.policies.protocol import Policy
from pipelines.collect.rollouts import Start, play


class GroupConfig(BaseModel):
    """How rollouts are grouped and batched."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_size: int = Field(default=8, ge=1)
    """Siblings per start."""
    parallel: int = Field(default=256, ge=1)
    """Rollouts played side by side, at least one whole group. Bounds memory; does not change what is sampled."""


def distinct_seeds(make_environment: Callable[[], Environment], first: int, count: int) -> list[int]:
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
    make_environment: Callable[[], Environment],
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
        seeds_P: start seeds, one group each; their worlds must differ (`distinct_seeds`).
        config: group size and batching.
        run_seed: seed of the run: other seeds give other samples from the same starts.
        collection_round: number of the round; part of the group's key.

    Yields:
        The siblings of one start, in order of their rollout index; groups in order of `seeds_P`.

    Raises:
        ValueError: two starts with the same world.
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
    """Note a group's task, which no other group of the round may have."""
    if task_id in seed_of:
        msg = f"start seeds {seed_of[task_id]} and {seed} draw the same world; take them from distinct_seeds()"
        raise ValueError(msg)
    seed_of[task_id] = seed
