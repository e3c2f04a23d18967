"""What goes wrong, and when: everything that a question asks for is planted here, and nowhere else."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from benchmarks.debugging_cases.agent import SHORT, Conditions, rollout, with_tokens
from benchmarks.debugging_cases.shop import Task, tasks
from lake import EpisodeRecord

Arm = Literal["shop", "shop-short", "shop-judge"]
ROUNDS: dict[Arm, int] = {"shop": 20, "shop-short": 10, "shop-judge": 12}
MAX_STEPS: dict[Arm, int] = {"shop": 10, "shop-short": SHORT, "shop-judge": 10}
EVALUATION = "shop-eval"
EVALUATED = (0, 5, 10, 15, 20)
"""Policy versions of the run `shop` that play the held-out tasks."""

IDENTITY_FAILS_FROM = 7
NORDPOST_FAILS_FROM = 12
PADDING_FROM = 5
"""In the run that learns from the judge, after which success stays as it is."""
PLAIN = (10, "exchange-2")
"""Round and task of the group in which one decision makes the difference."""
SPOILED_ROUND = 15
RETRACTED, RETRIED = "address-1", "refund-1"
"""Tasks of the groups of that round that lost episodes after their credit was computed."""
STALE_UPDATE, STALE_ROUND = 9, 1
"""The update whose batch was played many versions before."""
DEAD_UPDATE = 17
"""The update whose batch is dead but for one group."""
BEGAN = datetime(2026, 3, 2, 8, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Size:
    """How large the history is."""

    per_family: int = 6
    siblings: int = 8
    groups_per_update: int = 4
    rated: int = 60
    """Episodes that people rated."""


SMALL = Size(per_family=3, siblings=4, rated=36)


def episodes(arm: Arm, size: Size, seed: int) -> list[EpisodeRecord]:
    """The episodes of a run, round by round."""
    rng = random.Random(f"{arm} {seed}")
    cases = tasks(size.per_family, seed)
    rounds = ((number, task) for number in range(ROUNDS[arm]) for task in cases)
    return [record for number, task in rounds for record in _group(arm, task, number, size.siblings, rng)]


def held_out(size: Size, seed: int) -> list[EpisodeRecord]:
    """Held-out tasks as versions of the policy of `shop` played them: it never got worse."""
    rng = random.Random(f"test {seed}")
    return [
        rollout(
            task,
            index,
            Conditions(is_right=is_right),
            rng,
            max_steps=MAX_STEPS["shop"],
            began=BEGAN + timedelta(hours=version, minutes=30),
            expected_group_size=size.siblings,
            split="test",
            policy_version=version,
            collection_round=version,
        )
        for version in EVALUATED
        for task in tasks(max(2, size.per_family // 3), seed, is_test=True)
        for index, is_right in enumerate(draw_outcomes(get_skill(version), size.siblings, rng))
    ]


def retried(size: Size, seed: int) -> list[EpisodeRecord]:
    """Second attempts at two rollouts."""
    rng = random.Random(f"again {seed}")
    (task,) = (task for task in tasks(size.per_family, seed) if task.task_id == RETRIED)
    return [_play("shop", task, SPOILED_ROUND, index, True, size.siblings, rng, attempt=1) for index in range(2)]


def _group(arm: Arm, task: Task, number: int, siblings: int, rng: random.Random) -> Iterator[EpisodeRecord]:
    skill = get_skill(min(number, PADDING_FROM) if arm == "shop-judge" else number)
    if task.is_easy:
        outcomes = [True] * siblings
    elif arm == "shop" and (number, task.task_id) == PLAIN:
        outcomes = [index % 2 == 0 for index in range(siblings)]
    else:
        outcomes = draw_outcomes(skill + 0.04 * (task.index % 3 - 1), siblings, rng)
    for index, is_right in enumerate(outcomes):
        yield _play(arm, task, number, index, is_right, siblings, rng)


def _play(
    arm: Arm, task: Task, number: int, index: int, is_right: bool, siblings: int, rng: random.Random, attempt: int = 0
) -> EpisodeRecord:
    conditions = Conditions(
        is_right=is_right,
        nordpost_answers=arm != "shop" or number < NORDPOST_FAILS_FROM,
        identity_fails=0.5 if arm == "shop" and number >= IDENTITY_FAILS_FROM else 0.0,
        padding=2 * max(0, number - PADDING_FROM + 1) if arm == "shop-judge" else 0,
        is_plain=arm == "shop" and (number, task.task_id) == PLAIN,
    )
    record = rollout(
        task,
        index,
        conditions,
        rng,
        max_steps=MAX_STEPS[arm],
        began=BEGAN + timedelta(hours=number, seconds=40 * task.index + index),
        split="train",
        policy_version=number,
        collection_round=number,
        attempt=attempt,
        expected_group_size=siblings,
    )
    # Of two rounds only: exact tokens are most of a lake's bytes.
    return with_tokens(record, rng, number) if arm == "shop" and number in (STALE_ROUND, STALE_UPDATE) else record


def get_skill(version: int) -> float:
    """Share of the rollouts that a version of the policy gets right: it rises, ever more slowly."""
    return 0.35 + 0.4 * (1 - 0.88**version)


def draw_outcomes(share: float, siblings: int, rng: random.Random) -> list[bool]:
    """Which siblings get it right: as many as the share says, at least one and not all, in any order."""
    right = min(max(int(share * siblings + rng.random()), 1), siblings - 1)
    outcomes = [index < right for index in range(siblings)]
    rng.shuffle(outcomes)
    return outcomes
