"""Laws of the plan: independent of the order of its input, every episode once an epoch, another order each epoch."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import plans
from testkit.training import config
from trainer.data.plan import Plan, compute_order_keys
from trainer.data.selection import TrainingSelection

EPISODES = st.dictionaries(
    st.integers(0, 2**63 - 1), st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=25
)


def selection_of(episodes: dict[int, list[int]]) -> TrainingSelection:
    """Episodes given by the lengths of their actions, each after one token of context."""
    return plans.selection_of({e: [[(length, True) for length in lengths]] for e, lengths in episodes.items()})


def episodes_of(plan: Plan) -> list[list[int]]:
    return [plan.episode_ids_E[step.episodes_E].tolist() for step in plan.steps]


@given(EPISODES, st.integers(1, 10), st.integers(1, 3))
def test_an_epoch_holds_every_episode_once_in_steps_of_equal_size(
    episodes: dict[int, list[int]], per_step: int, epochs: int
) -> None:
    plan = Plan(selection_of(episodes), config(episodes_per_step=per_step, epochs=epochs))
    for epoch in range(epochs):
        steps = [step for step in plan.steps if step.epoch == epoch]
        sizes = [len(step.episodes_E) for step in steps]
        assert max(sizes) <= per_step
        assert max(sizes) - min(sizes) <= 1
        episodes_planned = [e for step in steps for e in plan.episode_ids_E[step.episodes_E].tolist()]
        assert sorted(episodes_planned) == sorted(episodes)
    assert [step.index for step in plan.steps] == list(range(len(plan.steps)))


@given(EPISODES, st.integers(0, 2**32))
def test_the_order_is_that_of_the_hashes_whatever_else_is_planned(episodes: dict[int, list[int]], seed: int) -> None:
    """Leaving an episode out leaves the others in their order."""
    order = [e for step in episodes_of(Plan(selection_of(episodes), config(seed=seed))) for e in step]
    fewer = {episode: lengths for episode, lengths in episodes.items() if episode != order[0]}
    if fewer:
        assert [e for step in episodes_of(Plan(selection_of(fewer), config(seed=seed))) for e in step] == order[1:]


@given(EPISODES, st.integers(1, 400), st.integers(1, 400))
def test_the_token_budget_changes_micro_batches_only(episodes: dict[int, list[int]], first: int, second: int) -> None:
    plans = [Plan(selection_of(episodes), config(token_budget=budget)) for budget in (first, second)]
    assert plans[0].plan_hash == plans[1].plan_hash
    assert episodes_of(plans[0]) == episodes_of(plans[1])
    assert [s.loss_tokens for s in plans[0].steps] == [s.loss_tokens for s in plans[1].steps]
    for plan in plans:
        for step in plan.steps:
            packed = sorted(q for rank in plan.pack_micro_batches(step) for batch in rank for q in batch)
            assert packed == sorted(step.episodes_E.tolist())


@given(EPISODES)
def test_what_a_step_consumed_adds_up(episodes: dict[int, list[int]]) -> None:
    plan = Plan(selection_of(episodes), config(episodes_per_step=3))
    for step in plan.steps:
        rows = plan.list_consumed(step)
        assert rows["episode_id"].to_list() == plan.episode_ids_E[step.episodes_E].tolist()
        assert rows["action_tokens"].sum() == step.loss_tokens
        assert rows["last_step"].to_list() == [len(episodes[e]) - 1 for e in rows["episode_id"]]
        assert set(rows["optimizer_step"]) == {step.index}


def test_a_plan_is_what_it_always_was() -> None:
    """Runs are resumed and repeated by this number; another one for the same data and seed needs a new version."""
    episodes: plans.Episodes = {
        7: [[(3, True)]],
        2**62: [[(1, False), (4, True)], [(2, True)]],
        5: [[(6, True), (1, False), (2, True)]],
        11: [[(9, True)]],
    }
    assert plans.plan_of(episodes).plan_hash == 97327106796412883
    plan = plans.plan_of(episodes, epochs=2, episodes_per_step=2, seed=3)
    assert plan.plan_hash == 3502300475707060175
    assert [step.episodes_E.tolist() for step in plan.steps] == [[2, 1], [0, 3], [2, 1], [3, 0]]
    figures = [(s.loss_tokens, s.tokens, s.squared_lengths, s.units) for s in plan.steps[:2]]
    assert figures == [(12, 14, 116, 12), (14, 22, 202, 14)]


def test_minibatches_fix_the_number_of_steps() -> None:
    episodes = {episode: [2] for episode in range(10)}
    plan = Plan(selection_of(episodes), config(minibatches=4, epochs=2))
    assert [len(step.episodes_E) for step in plan.steps] == [3, 3, 2, 2] * 2
    assert len(Plan(selection_of(episodes), config(minibatches=40)).steps) == 10


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"epochs": 2}, {"episodes_per_step": 2}], ids=lambda change: next(iter(change))
)
def test_what_decides_the_order_changes_the_hash(change: dict[str, int]) -> None:
    episodes = {episode: [3, 1] for episode in range(9)}
    assert Plan(selection_of(episodes), config()).plan_hash != Plan(selection_of(episodes), config(**change)).plan_hash


def test_another_advantage_changes_the_hash() -> None:
    selection = selection_of({1: [2], 2: [3]})
    before = Plan(selection, config()).plan_hash
    changed = pl.when(pl.col("episode_id") == 2).then(0.25).otherwise(pl.col("advantage"))
    object.__setattr__(selection, "members", selection.members.with_columns(advantage=changed))
    assert Plan(selection, config()).plan_hash != before


def test_epochs_and_seeds_order_differently() -> None:
    episodes_E = np.arange(1000)
    orders = [np.argsort(compute_order_keys(episodes_E, seed, epoch)).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def splitmix(value: int) -> int:
    """SplitMix64 as published, on Python integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(0, 1000))
def test_keys_are_the_same_on_every_machine(episode: int, seed: int, epoch: int) -> None:
    assert splitmix(0) == 0xE220A8397B1DCDAF, "the published first output of seed 0"
    expected = splitmix(episode ^ splitmix((splitmix(seed) + epoch) % 2**64))
    assert compute_order_keys(np.array([episode]), seed, epoch).tolist() == [expected]


def test_keys_of_different_episodes_differ() -> None:
    keys = compute_order_keys(np.arange(100_000), 0, 0)
    assert len(np.unique(keys)) == 100_000
    share = (keys < np.uint64(2**62)).mean()
    assert share == pytest.approx(0.25, abs=0.01)
