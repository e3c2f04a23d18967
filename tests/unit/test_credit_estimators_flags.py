"""Flags as text, and the figures read from a table of advantages."""

import inspect

import numpy as np
import polars as pl

from pipelines.credit import GiGPO, summarise
from pipelines.credit.estimators.protocol import Flag, join_flags
from testkit.credit_strategies import frame


def test_flags_are_sorted_names_joined_by_commas() -> None:
    masks = {
        Flag.UNSCORED: np.array([True, False, True, False]),
        Flag.DEAD_GROUP: np.array([True, False, False, False]),
        Flag.MASKED: np.array([True, False, False, False]),
        Flag.REVISIT: np.array([False, False, False, False]),
    }
    texts = join_flags(masks)
    assert texts.name == "flags"
    assert texts.dtype == pl.String
    assert texts.to_list() == ["dead_group,masked,unscored", "", "unscored", ""]


def test_all_flags_at_once() -> None:
    masks = {flag: np.array([True]) for flag in Flag}
    assert join_flags(masks).to_list() == [",".join(sorted(Flag))]


def test_every_flag_is_explained_and_members_are_in_order() -> None:
    source = inspect.getsource(Flag)
    assert [flag.value for flag in Flag] == sorted(Flag)
    for flag in Flag:
        following = source.split(f'{flag.name} = "{flag.value}"', 1)[1].lstrip()
        assert following.startswith('"""')


def test_summary_counts() -> None:
    def steps(group: int, scores: list[float | None], states: str) -> list[dict[str, object]]:
        return [
            {"episode_id": 10 * group + n, "group_id": group, "step_index": i, "state": state, "episode_score": score}
            for n, score in enumerate(scores)
            for i, state in enumerate(states)
        ]

    rows = [
        *steps(1, [1.0, 0.0], "ab"),  # live; a and b shared by both
        *steps(2, [1.0, 1.0, None], "a"),  # dead, one of three unscored
        *steps(3, [1.0], "aab"),  # singleton; a is revisited, not shared
        *steps(4, [None, None], "c"),  # unscored
    ]
    advantages = GiGPO(step_source="rewards").advantages(frame(rows).drop("state_hash").lazy())
    summary = summarise(advantages)
    assert summary.model_dump() == {
        "episodes": 8,
        "steps": 12,
        "undefined_steps": 3,
        "groups": 4,
        "live_groups": 1,
        "dead_groups": 1,
        "singleton_groups": 1,
        "unscored_groups": 1,
        "shared_steps": 9,
        "singleton_steps": 1,
    }
    assert summary.shared_fraction == 9 / 12


def test_summary_of_nothing() -> None:
    empty = GiGPO().advantages(frame([]).lazy())
    summary = summarise(empty)
    assert set(summary.model_dump().values()) == {0}
    assert summary.shared_fraction is None
