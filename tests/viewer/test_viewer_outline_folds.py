"""Repeats of a transcript: folds are repeats, the longest, from the left, and nothing outside them repeats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viewer.transcript.outline import LONGEST_PERIOD, MIN_REPEATS, Fold, find_folds

texts = st.text("ab", max_size=24) | st.text("abc", max_size=24)


def repeats_at(text: str, first: int) -> list[tuple[int, int]]:
    """(period, times) of every repeat that begins at a position: the slow way, by comparing texts."""
    folds = []
    for period in range(1, LONGEST_PERIOD + 1):
        part = text[first : first + period]
        times = 1
        while len(part) == period and text[first:].startswith(part * (times + 1)):
            times += 1
        if times >= MIN_REPEATS:
            folds.append((period, times))
    return folds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("abc", []),
        ("aab", []),
        ("aaab", [Fold(0, 1, 3)]),
        ("xabababab", [Fold(1, 2, 4)]),
        ("abcabcabcabc", [Fold(0, 3, 4)]),
        ("aaaaaabb", [Fold(0, 1, 6)]),
        ("aaabbb", [Fold(0, 1, 3), Fold(3, 1, 3)]),
        ("aaabaaabaaab", [Fold(0, 4, 3)]),
        ("abcdeabcdeabcde", []),
    ],
)
def test_repeats(text: str, expected: list[Fold]) -> None:
    assert find_folds(text) == expected


@given(texts)
def test_a_fold_is_a_part_that_stands_again_and_again(text: str) -> None:
    end = 0
    for fold in find_folds(text):
        assert fold.first >= end, "folds do not overlap"
        assert fold.times >= MIN_REPEATS
        end = fold.end
        part = text[fold.first : fold.first + fold.period]
        assert text[fold.first : fold.end] == part * fold.times
        assert end <= len(text)


@given(texts)
def test_each_fold_covers_most_and_what_is_outside_repeats_nothing(text: str) -> None:
    fold_by_first = {fold.first: fold for fold in find_folds(text)}
    position = 0
    while position < len(text):
        possible = repeats_at(text, position)
        if position not in fold_by_first:
            assert possible == []
            position += 1
            continue
        fold = fold_by_first[position]
        most = max(period * times for period, times in possible)
        shortest = min(period for period, times in possible if period * times == most)
        assert (fold.period, fold.times) == (shortest, most // shortest)
        position = fold.end
