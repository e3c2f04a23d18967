"""Episodes that meet: few states, contexts and actions, so that shared anchors, identical contexts and ties are common.

With them the slow pairing, from records and credit rows alone: nothing of it knows hashes, matrices or files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from lake import Lake
from lake.records import EpisodeRecord, StepRecord, TokensRecord
from testkit.lakes import add_credit
from testkit.training import SAMPLING, token_lake

CONTEXTS = ([1], [2], [1, 2])
ACTIONS = ([3], [4], [3, 4], [4, 3])


def meeting_episodes(seed: int, *, tasks: int = 2, siblings: int = 4, most_steps: int = 3) -> list[EpisodeRecord]:
    """Groups of siblings with rewards 0 or 1; some steps open a new sequence, some fork from an earlier step."""
    rng = np.random.default_rng(seed)
    episodes = []
    for task in range(tasks):
        for sibling in range(siblings):
            steps = [_step(rng, number) for number in range(int(rng.integers(1, most_steps + 1)))]
            outcome = sum(step.reward or 0.0 for step in steps)
            fields: dict[str, Any] = {"task_id": f"t{task}", "rollout_index": sibling, "seed": 1, "steps": steps}
            episodes.append(EpisodeRecord(env_return=None if rng.random() < 0.1 else outcome, **fields))
    return episodes


def _step(rng: np.random.Generator, number: int) -> StepRecord:
    action = ACTIONS[rng.integers(len(ACTIONS))]
    chance = rng.random()
    prefix: dict[str, Any] = {}
    if number and chance < 0.2:
        prefix = {"prefix_step_index": None}
    elif number > 1 and chance < 0.5:
        prefix = {"prefix_step_index": int(rng.integers(number - 1))}
    tokens = {"context_ids": CONTEXTS[rng.integers(len(CONTEXTS))], "action_ids": action, **SAMPLING, **prefix}
    return StepRecord(
        state=("gate", "hall")[int(rng.random() < 0.3)],
        action=str(action),
        reward=float(rng.random() < 0.4),
        tokens=TokensRecord(**tokens, action_logprobs=[-1.0] * len(action)),
    )


def world(folder: Path, episodes: Sequence[EpisodeRecord], *, writes: int = 1, **credit: Any) -> Lake:
    """Their lake, with credit."""
    lk = token_lake(folder, episodes, writes=writes)
    add_credit(lk, **credit)
    return lk


@dataclass(frozen=True)
class Step:
    """A step as the slow oracle sees it."""

    episode: int
    index: int
    group: int
    anchor: int | None
    value: float | None
    context: tuple[int, ...]
    action: tuple[int, ...]


def steps_of(lk: Lake, episodes: Sequence[EpisodeRecord]) -> list[Step]:
    """Every step with its return, its anchor and all tokens before its action."""
    ids = {
        (task, index): key for task, index, key in _episodes(lk).select("task_id", "rollout_index", "episode_id").rows()
    }
    columns = ("episode_id", "step_index", "group_id", "anchor_key", "return_to_go")
    credit = {row[:2]: row[2:] for row in lk.scan("advantages").select(columns).collect().rows()}
    steps = []
    for episode in episodes:
        key = ids[episode.task_id, episode.rollout_index]
        for number, step in enumerate(episode.steps):
            assert step.tokens is not None
            group, anchor, value = credit[key, number]
            context, action = tuple(context_of(episode, number)), tuple(step.tokens.action_ids)
            steps.append(Step(key, number, group, anchor, value, context, action))
    return steps


def context_of(episode: EpisodeRecord, number: int) -> list[int]:
    """All token ids before an action."""
    tokens = episode.steps[number].tokens
    assert tokens is not None
    prefix = tokens.prefix_step_index
    if prefix is msgspec.UNSET:
        prefix = number - 1 if number else None
    before = []
    if isinstance(prefix, int):
        earlier = episode.steps[prefix].tokens
        assert earlier is not None
        before = context_of(episode, prefix) + earlier.action_ids
    return before + tokens.context_ids


def _episodes(lk: Lake) -> pl.DataFrame:
    return lk.scan("episodes").collect()


Rule = Callable[[Step, Step], bool]


def slow_step_pairs(steps: Sequence[Step], rules: dict[str, Rule], limit: int | None = None) -> list[tuple[Step, Step]]:
    """Anchor by anchor: the best step with the worst that all rules allow, then the next best that is free."""
    pairs: list[tuple[Step, Step]] = []
    for members in anchors(steps):
        ordered = sorted(members, key=lambda step: (-(step.value or 0.0), step.episode, step.index))
        mine: list[tuple[Step, Step]] = []
        actions: list[Step] = []
        for position, better in enumerate(ordered):
            worse = [
                s for s in ordered[position + 1 :] if s not in actions and all(r(better, s) for r in rules.values())
            ]
            if better not in actions and worse and (limit is None or len(mine) < limit):
                mine.append((better, worse[-1]))
                actions += mine[-1]
        pairs += mine
    return pairs


def slow_counts(steps: Sequence[Step], rules: dict[str, Rule]) -> dict[str, tuple[int, int]]:
    """By rule: pairs that it and the rules before it allow, and anchors that have one."""
    counts = {}
    names = list(rules)
    for last in range(len(names)):
        totals = [
            sum(
                all(rules[name](*_ordered(member, other_member)) for name in names[: last + 1])
                for position, member in enumerate(members)
                for other_member in members[position + 1 :]
            )
            for members in anchors(steps)
        ]
        counts[names[last]] = (sum(totals), sum(number > 0 for number in totals))
    return counts


def _ordered(first: Step, second: Step) -> tuple[Step, Step]:
    assert first.value is not None
    assert second.value is not None
    return (first, second) if first.value >= second.value else (second, first)


def anchors(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps with a known return, by anchor."""
    by_anchor: dict[tuple[int, int], list[Step]] = {}
    for step in steps:
        if step.anchor is not None and step.value is not None:
            by_anchor.setdefault((step.group, step.anchor), []).append(step)
    return list(by_anchor.values())


def slow_episode_pairs(outcomes: dict[int, float], margin: float) -> list[tuple[int, int]]:
    """One group: the i-th best with the i-th worst while they are far enough apart. Ties in order of the ids."""
    ordered = sorted(outcomes, key=lambda key: (-outcomes[key], key))
    pairs = []
    for position in range(len(ordered) // 2):
        best, worst = ordered[position], ordered[-1 - position]
        if outcomes[best] > outcomes[worst] and outcomes[best] - outcomes[worst] >= margin:
            pairs.append((best, worst))
    return pairs
