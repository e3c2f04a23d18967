"""Laws of ranks: however many there are, the same tokens once, whole atoms, equally many rounds, balanced."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.plans import EPISODES, Episodes, episode_of, plan_of
from trainer.data.plan import OptimizerStep, Plan, spread

BUDGETS = st.integers(1, 120)
RANKS = st.integers(1, 5)
UNITS = st.sampled_from(["token", "turn", "sequence", "episode"])


def bins_of(plan: Plan, step: OptimizerStep, ranks: int) -> list[list[int]]:
    """All micro-batches of all ranks that hold something."""
    return [items for bins in plan.pack_micro_batches(step, ranks) for items in bins if items]


@given(EPISODES, BUDGETS, RANKS, UNITS)
def test_every_sequence_of_a_step_is_on_one_rank_once(episodes: Episodes, budget: int, ranks: int, unit: str) -> None:
    plan = plan_of(episodes, token_budget=budget, options={"unit": unit}, episodes_per_step=3)
    consumed = []
    for step in plan.steps:
        sequences = [q for items in bins_of(plan, step, ranks) for q in items]
        starts_E = plan.sequence_starts_E
        assert sorted(sequences) == sorted(q for e in step.episodes_E for q in range(starts_E[e], starts_E[e + 1]))
        consumed += sequences
    assert sorted(consumed) == list(range(plan.sequences)), "over an epoch every sequence once"


@given(EPISODES, BUDGETS, RANKS, UNITS)
def test_the_steps_do_not_depend_on_budget_ranks_or_unit(
    episodes: Episodes, budget: int, ranks: int, unit: str
) -> None:
    first, second = plan_of(episodes), plan_of(episodes, token_budget=budget, options={"unit": unit})
    for step in second.steps:
        second.pack_micro_batches(step, ranks)
    assert [step.episodes_E.tolist() for step in first.steps] == [step.episodes_E.tolist() for step in second.steps]
    assert first.plan_hash == second.plan_hash
    for name in ("loss_tokens", "tokens", "squared_lengths"):
        assert [getattr(step, name) for step in first.steps] == [getattr(step, name) for step in second.steps]


@given(EPISODES, BUDGETS, RANKS)
def test_every_rank_has_equally_many_micro_batches_and_the_empty_ones_last(
    episodes: Episodes, budget: int, ranks: int
) -> None:
    plan = plan_of(episodes, token_budget=budget)
    for step in plan.steps:
        dealt = plan.pack_micro_batches(step, ranks)
        assert len(dealt) == ranks
        assert len({len(bins) for bins in dealt}) == 1
        for bins in dealt:
            assert sorted(bins, key=lambda items: not items) == bins
        full = bins_of(plan, step, ranks)
        if len(full) < ranks * len(dealt[0]):
            assert all(len(items) == 1 for items in full), "empty ones only where nothing is left to split"
        assert len(dealt[0]) == -(-len(bins_of(plan, step, 1)) // ranks), "no more rounds than needed"


@given(EPISODES, BUDGETS, RANKS)
def test_an_episode_that_is_the_unit_stays_together_and_in_order(episodes: Episodes, budget: int, ranks: int) -> None:
    plan = plan_of(episodes, token_budget=budget, options={"unit": "episode"})
    for step in plan.steps:
        for items in bins_of(plan, step, ranks):
            tokens = sum(int(plan.tokens_Q[q]) for q in items)
            owners = [episode_of(plan, q) for q in items]
            assert tokens <= budget or len(set(owners)) == 1
            for owner in set(owners):
                mine = [q for q, of in zip(items, owners, strict=True) if of == owner]
                assert mine == list(range(mine[0], mine[0] + len(episodes[owner])))
            assert len(set(owners)) == 1 + sum(a != b for a, b in pairwise(owners)), "side by side"


@given(EPISODES, BUDGETS, RANKS)
def test_loads_differ_by_no_more_than_the_costliest_micro_batch(episodes: Episodes, budget: int, ranks: int) -> None:
    plan = plan_of(episodes, token_budget=budget, episodes_per_step=12)
    for step in plan.steps:
        dealt = plan.pack_micro_batches(step, ranks)
        costs = [[sum(int(plan.tokens_Q[q]) ** 2 for q in items) for items in bins] for bins in dealt]
        loads = [sum(of_rank) for of_rank in costs]
        assert max(loads) - min(loads) <= max(cost for of_rank in costs for cost in of_rank)
        assert sum(loads) == step.squared_lengths
        assert all(of_rank == sorted(of_rank, reverse=True) for of_rank in costs), "the costliest first"


@given(EPISODES, BUDGETS, RANKS)
def test_it_is_the_same_every_time(episodes: Episodes, budget: int, ranks: int) -> None:
    first, second = (plan_of(episodes, token_budget=budget) for _ in range(2))
    for a, b in zip(first.steps, second.steps, strict=True):
        assert first.pack_micro_batches(a, ranks) == second.pack_micro_batches(b, ranks)


@pytest.mark.parametrize(
    ("lengths", "budget", "ranks", "expected"),
    [
        ([5, 4, 3], 9, 2, [[[0]], [[1, 2]]]),
        ([5, 4, 3], 100, 2, [[[0]], [[1, 2]]]),
        ([5], 100, 3, [[[0]], [[]], [[]]]),
        ([9, 5, 4, 1], 1, 2, [[[0], [3]], [[1], [2]]]),
        ([6, 6, 4, 4, 4], 12, 2, [[[0, 1]], [[2, 3, 4]]]),
        ([], 10, 2, [[], []]),
    ],
    ids=["even", "one bin is split", "nothing to split", "snake", "no room to be even", "none"],
)
def test_known_spreads(lengths: list[int], budget: int, ranks: int, expected: list[list[list[int]]]) -> None:
    assert spread(lengths, [length**2 for length in lengths], budget, ranks) == expected


def test_one_long_sequence_among_short_ones_leaves_the_others_to_the_other_rank() -> None:
    """Costs are squared lengths: 100 tokens at once cost more than four times 40."""
    episodes: Episodes = {0: [[(99, True)]]} | {n: [[(39, True)]] for n in range(1, 5)}
    plan = plan_of(episodes, token_budget=200, minibatches=1)
    (step,) = plan.steps
    assert [[sorted(items) for items in bins] for bins in plan.pack_micro_batches(step, 2)] == [[[0]], [[1, 2, 3, 4]]]
    (alone,) = plan.pack_micro_batches(step)
    assert len(alone) == 2, "one rank: as few as fit"
