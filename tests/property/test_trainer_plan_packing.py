"""Laws of packing: everything once, budget kept, never worse than first fit's guarantee, the same every time."""

from hypothesis import given
from hypothesis import strategies as st

from trainer.data.plan import pack

LENGTHS = st.lists(st.integers(1, 120), max_size=60)
BUDGET = st.integers(1, 150)


@given(LENGTHS, BUDGET)
def test_every_item_is_in_exactly_one_bin(lengths: list[int], budget: int) -> None:
    packed = sorted(item for items in pack(lengths, budget) for item in items)
    assert packed == list(range(len(lengths)))


@given(LENGTHS, BUDGET)
def test_bins_keep_the_budget_and_an_oversized_item_is_alone(lengths: list[int], budget: int) -> None:
    for items in pack(lengths, budget):
        assert sum(lengths[item] for item in items) <= budget or len(items) == 1


@given(LENGTHS, BUDGET)
def test_an_item_goes_into_the_fullest_bin_that_has_room(lengths: list[int], budget: int) -> None:
    """The slow, obvious algorithm gives the same bins."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rooms = [(budget - sum(lengths[i] for i in items), number) for number, items in enumerate(bins)]
        fitting = [pair for pair in rooms if pair[0] >= lengths[item]]
        if fitting:
            bins[min(fitting)[1]].append(item)
        else:
            bins.append([item])
    assert pack(lengths, budget) == bins


@given(st.lists(st.integers(1, 100), max_size=40))
def test_it_is_within_the_known_bound_of_the_smallest_possible_number(lengths: list[int]) -> None:
    budget = 100
    least = -(-sum(lengths) // budget)
    assert len(pack(lengths, budget)) <= max(2 * least, 1)
