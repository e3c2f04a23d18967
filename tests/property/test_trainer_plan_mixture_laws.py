"""Laws of weighted mixtures: exact shares, whole repetitions, hashes decide, nothing else does."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.plan import apportion, compute_order_keys, draw_episodes

WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=5)
SOURCES = st.lists(st.integers(1, 12), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**31)


def episodes_of(sizes: list[int], salt: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scattered ids, ascending, and the source of each."""
    rng = np.random.default_rng(salt)
    ids_E = np.sort(rng.choice(2**62, sum(sizes), replace=False)).astype(np.int64)
    source_E = rng.permutation(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    return ids_E, source_E


@given(st.integers(0, 10**6), WEIGHTS)
def test_shares_add_up_and_are_within_one_of_their_part(total: int, weights: list[int]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    for part, weight in zip(shares, weights, strict=True):
        assert abs(part - Fraction(total * weight, sum(weights))) < 1


def test_shares_favour_the_largest_remainders() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(10, [0.1, 0.27, 0.63]) == [1, 3, 6]
    assert apportion(7, [0.1]) == [7]


@given(SOURCES, st.data(), SEEDS, st.integers(0, 5))
def test_an_epoch_draws_each_source_evenly_in_proportion_to_its_weight(
    sizes: list[int], data: st.DataObject, seed: int, epoch: int
) -> None:
    weights = [data.draw(st.integers(1, 20)) for _ in sizes]
    ids_E, source_E = episodes_of(sizes)
    drawn = draw_episodes(ids_E, source_E, weights, seed, epoch)
    assert len(drawn) == len(ids_E)
    for source, (size, count) in enumerate(zip(sizes, apportion(len(ids_E), weights), strict=True)):
        times = Counter(drawn[source_E[drawn] == source].tolist())
        assert sum(times.values()) == count
        draws = [times[e] for e in np.flatnonzero(source_E == source).tolist()]
        assert len(draws) == size
        assert set(draws) <= {count // size, -(-count // size)}, "whole repetitions, and some once more"


@given(SOURCES, SEEDS)
def test_the_order_of_the_rows_does_not_matter(sizes: list[int], seed: int) -> None:
    ids_E, source_E = episodes_of(sizes)
    weights = list(range(1, len(sizes) + 1))
    expected = ids_E[draw_episodes(ids_E, source_E, weights, seed, 0)].tolist()
    order = np.random.default_rng(seed).permutation(len(ids_E))
    assert ids_E[order][draw_episodes(ids_E[order], source_E[order], weights, seed, 0)].tolist() == expected


@given(SOURCES, SEEDS, st.integers(0, 3))
def test_weights_like_the_sizes_give_every_episode_once_in_the_usual_order(
    sizes: list[int], seed: int, epoch: int
) -> None:
    ids_E, source_E = episodes_of(sizes)
    usual = np.argsort(compute_order_keys(ids_E, seed, epoch), kind="stable")
    assert draw_episodes(ids_E, source_E, sizes, seed, epoch).tolist() == usual.tolist()


def test_epochs_draw_other_episodes_and_in_the_end_all_alike() -> None:
    ids_E, source_E = episodes_of([40, 10])
    times: Counter[int] = Counter()
    for epoch in range(200):
        times.update(draw_episodes(ids_E, source_E, [1, 4], 0, epoch).tolist())
    rare = [times[e] for e in np.flatnonzero(source_E == 0).tolist()]
    often = [times[e] for e in np.flatnonzero(source_E == 1).tolist()]
    assert set(often) == {800}, "40 of 50 draws for 10 episodes: four each, in every epoch"
    assert sum(rare) == 2000
    assert min(rare) > 25, "50 on average"


def test_what_is_drawn_from_a_large_source_does_not_come_first() -> None:
    """Drawing and ordering by one key would put the drawn tenth in front."""
    ids_E, source_E = episodes_of([1000, 100])
    drawn = draw_episodes(ids_E, source_E, [100, 1000], 3, 0)
    places = np.flatnonzero(source_E[drawn] == 0)
    assert len(places) == 100
    assert places.mean() == pytest.approx(550, abs=100)


def test_copies_of_an_episode_are_spread() -> None:
    ids_E, source_E = episodes_of([10, 990])
    drawn = draw_episodes(ids_E, source_E, [1, 1], 0, 0)
    draws_of_first = np.flatnonzero(drawn == np.flatnonzero(source_E == 0)[0])
    assert len(draws_of_first) == 50
    assert draws_of_first.std() == pytest.approx(1000 / 12**0.5, rel=0.3), "as if uniform"
