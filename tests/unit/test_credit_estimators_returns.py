"""Return-to-go equals the obvious loop, bit for bit; runs of rows reduce as they should."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.credit.estimators.normalise import discount_rewards
from pipelines.credit.steps import Segments


def segments(lengths: list[int]) -> Segments:
    first = np.zeros(sum(lengths), np.bool_)
    first[np.cumsum([0, *lengths[:-1]])] = True
    return Segments.opening_at(first)


def by_loop(episodes: list[list[float]], gamma: float) -> list[float]:
    out = []
    for rewards in episodes:
        following: list[float] = []
        for reward in reversed(rewards):
            following.append(reward if not following else reward + gamma * following[-1])
        out += reversed(following)
    return out


@settings(deadline=None)
@given(
    episodes=st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), min_size=1, max_size=8),
    gamma=st.floats(0.0, 1.0),
)
def test_equals_the_loop_bit_for_bit(episodes: list[list[float]], gamma: float) -> None:
    rewards = np.array([reward for episode in episodes for reward in episode])
    before = rewards.copy()
    actual = discount_rewards(rewards, segments([len(e) for e in episodes]), gamma)
    assert actual.tolist() == by_loop(episodes, gamma)
    assert rewards.tolist() == before.tolist()


@pytest.mark.parametrize("gamma", [0.5, 0.95, 0.99, 1.0])
def test_long_episodes_do_not_underflow(gamma: float) -> None:
    """Power-scaled sums give NaN here: 0.5 ** 2000 is 0 in float64."""
    generator = np.random.default_rng(0)
    episodes = [generator.normal(size=length).tolist() for length in (2000, 1, 1100, 5, 20_000)]
    actual = discount_rewards(np.concatenate(episodes), segments([len(e) for e in episodes]), gamma)
    assert actual.tolist() == by_loop(episodes, gamma)


def test_unknown_rewards_make_their_own_and_earlier_returns_unknown() -> None:
    nan = math.nan
    rewards = np.array([1.0, nan, 1.0, 1.0, 2.0, 2.0, nan])
    actual = discount_rewards(rewards, segments([4, 2, 1]), 0.5)
    np.testing.assert_array_equal(actual, [nan, nan, 1.5, 1.0, 3.0, 2.0, nan])


def test_gamma_zero_sees_no_further_than_an_unknown_reward_lets_it() -> None:
    """0 * unknown stays unknown: the rule for NULL does not depend on gamma."""
    actual = discount_rewards(np.array([1.0, math.nan, 3.0]), segments([3]), 0.0)
    np.testing.assert_array_equal(actual, [math.nan, math.nan, 3.0])


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=6))
def test_segments_reduce_each_run(runs: list[list[tuple[int, bool]]]) -> None:
    pieces = segments([len(run) for run in runs])
    values = np.array([float(value) for run in runs for value, _ in run])
    mask = np.array([flag for run in runs for _, flag in run])
    assert pieces.lengths_K.tolist() == [len(run) for run in runs]
    assert pieces.sum(values).tolist() == [sum(value for value, _ in run) for run in runs]
    assert pieces.min(values).tolist() == [min(value for value, _ in run) for run in runs]
    assert pieces.max(values).tolist() == [max(value for value, _ in run) for run in runs]
    assert pieces.count(mask).tolist() == [sum(flag for _, flag in run) for run in runs]
    assert pieces.any(mask).tolist() == [any(flag for _, flag in run) for run in runs]
    assert pieces.ids_N().tolist() == [number for number, run in enumerate(runs) for _ in run]
    assert values[pieces.last_K].tolist() == [run[-1][0] for run in runs]
    assert values[pieces.starts_K].tolist() == [run[0][0] for run in runs]
