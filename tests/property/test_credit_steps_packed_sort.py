"""Gathering rows by a packed integer gathers what sorting by the columns gathers, or says that it cannot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.credit import steps
from pipelines.credit.steps import Segments

KEYS = st.one_of(st.integers(0, 3), st.integers(0, 2**63 - 1))
GROUPS = st.lists(st.lists(KEYS, min_size=1, max_size=8), min_size=1, max_size=6)


def slow(groups: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Per group, its (key, row) pairs by key, keys in the order of nothing in particular."""
    rows = iter(range(sum(map(len, groups))))
    return [sorted((key, next(rows)) for key in group) for group in groups]


def segments(groups: list[list[int]]) -> Segments:
    lengths = np.array([len(group) for group in groups])
    return Segments(np.cumsum(lengths) - lengths, lengths)


@given(GROUPS)
def test_every_key_of_a_group_is_one_run_in_row_order(groups: list[list[int]]) -> None:
    keys = np.array([key for group in groups for key in group], np.int64)
    actual = steps.gather(keys, segments(groups))
    assert actual is not None
    order, opens = actual
    runs = [part.tolist() for part in np.split(order, np.flatnonzero(opens)[1:])]
    expected = []
    for group in slow(groups):
        for key in {key for key, _ in group}:
            expected.append([row for other_key, row in group if other_key == key])
    assert sorted(runs) == sorted(expected)
    # Groups stay in their order, and rows of a group together.
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    assert (np.diff(group_of[order]) >= 0).all()


def test_different_keys_whose_bits_agree_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_SPREAD", np.uint64(0))
    single = segments([[7, 7]])
    assert steps.gather(np.array([7, 7]), single) is not None
    assert steps.gather(np.array([7, 8]), single) is None


def test_without_room_for_a_hash_it_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_WORD_BITS", 13)
    assert steps.gather(np.array([1, 1]), segments([[1, 1]])) is None


@given(GROUPS, st.integers(1, 5))
def test_pieces_do_not_show(groups: list[list[int]], rows: int) -> None:
    """However few groups are sorted at a time, the order is the same."""
    keys = np.array([key for group in groups for key in group], np.int64)
    undivided = steps.gather(keys, segments(groups))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "_PIECE", rows)
        pieces = steps.gather(keys, segments(groups))
    assert undivided is not None
    assert pieces is not None
    assert all((column == piece).all() for column, piece in zip(undivided, pieces, strict=True))


@given(GROUPS)
def test_distinct_values_of_each_run_are_counted(groups: list[list[int]]) -> None:
    # Values differ in their high bits, as hashes do: the lowest make room for the number of the run.
    values = np.array([key % 4 + (key >> 61 << 2) for group in groups for key in group], np.uint64) << np.uint64(59)
    expected = [len(set(part.tolist())) for part in np.split(values, segments(groups).starts_K[1:])]
    assert steps.count_distinct(values, segments(groups)).tolist() == expected
