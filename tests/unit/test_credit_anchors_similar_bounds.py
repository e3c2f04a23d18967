"""The bounds that similarity prunes by: never below difflib's ratio, and tight enough to be worth their time."""

import random
from difflib import SequenceMatcher
from string import ascii_lowercase

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.credit.anchors.similar import (
    CharacterIndex,
    Profiles,
    Runs,
    compute_needed_matches,
    count_letters,
    count_pairs,
    encode_text,
    find_representatives,
    reaches,
)
from testkit.anchor_keys import naive_clusters
from testkit.examples import examples

THRESHOLDS = st.sampled_from([0.01, 0.3, 0.5, 2 / 3, 0.8, 0.9, 0.95, 1.0])
WORDS = ["the", "room", "hall", "You see", "nothing.", "0", "17", "\U0001f5dd", "\u00fc", "chest", "locked", "open"]


@st.composite
def edited_pairs(draw: st.DrawFn) -> tuple[str, str]:
    """A text of any length, and what a few edits make of it: autojunk sets in at 200 characters."""
    words = draw(st.lists(st.sampled_from(WORDS), max_size=60))
    text = " ".join(words * draw(st.integers(1, 3)))
    other_letters = list(text)
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(0, len(other_letters) - 1)))
        other_letters[at : at + draw(st.integers(0, 3))] = list(draw(st.text("ab .", max_size=3)))
    return text, "".join(other_letters)


def possible(text: str, first: str, threshold: float) -> bool:
    """Whether the bounds let a text through to the exact comparison with a cluster's first member."""
    profiles = Profiles()
    first_T, text_T = encode_text(first), encode_text(text)
    profiles.append(len(first), count_letters(first_T), count_pairs(first_T))
    candidates = profiles.find_candidates(len(text), count_letters(text_T), count_pairs(text_T), threshold)
    return list(candidates) == [0]


@settings(deadline=None, max_examples=examples(100))
@given(edited_pairs(), THRESHOLDS)
@example(("", ""), 1.0)
@example(("", "a"), 0.01)
@example(("a" * 300, "a" * 299 + "b"), 0.95)
def test_no_bound_excludes_what_difflib_accepts(pair: tuple[str, str], threshold: float) -> None:
    for text, first in (pair, pair[::-1]):
        if SequenceMatcher(None, text, first).ratio() >= threshold:
            assert possible(text, first, threshold)


@settings(deadline=None, max_examples=examples(100))
@given(edited_pairs(), THRESHOLDS)
def test_the_shortened_recursion_decides_as_difflib_does(pair: tuple[str, str], threshold: float) -> None:
    text, first = pair
    matcher = SequenceMatcher(None, text, first)
    needed = compute_needed_matches(len(text) + len(first), threshold)
    assert reaches(text, first, CharacterIndex.of(encode_text(first)), needed, encode_text(text)) == (
        matcher.ratio() >= threshold
    )


@settings(deadline=None, max_examples=examples(100))
@given(edited_pairs())
@example(("", "a" * 200))
@example(("a", "ab" * 100))
def test_the_index_is_difflibs(pair: tuple[str, str]) -> None:
    for text in pair:
        index = CharacterIndex.of(encode_text(text))
        positions = {
            chr(code): index.places[start : start + count].tolist()
            for code, start, count in zip(index.codes_R, index.starts_R, index.counts_R, strict=True)
        }
        assert positions == vars(SequenceMatcher(None, "", text))["b2j"]


@settings(deadline=None, max_examples=examples(50))
@given(st.text("ab ", max_size=20), st.text("ab ", max_size=20))
def test_runs_are_all_maximal_runs(text: str, first: str) -> None:
    def equal(i: int, j: int) -> bool:
        return 0 <= i < len(text) and 0 <= j < len(first) and text[i] == first[j]

    expected = []
    for i in range(len(text)):
        for j in range(len(first)):
            if equal(i, j) and not equal(i - 1, j - 1):
                size = next(n for n in range(1, 50) if not equal(i + n, j + n))
                expected.append((i, j, size))
    runs = Runs.of(encode_text(text), CharacterIndex.of(encode_text(first)))
    assert sorted(zip(*(column.tolist() for column in runs), strict=True)) == sorted(expected)


@settings(deadline=None, max_examples=examples(50))
@given(edited_pairs(), st.integers(-2, 2))
def test_the_recursion_is_exact_to_the_character(pair: tuple[str, str], off: int) -> None:
    text, first = pair
    matcher = SequenceMatcher(None, text, first)
    matched = sum(block.size for block in matcher.get_matching_blocks())
    assert reaches(text, first, CharacterIndex.of(encode_text(first)), matched + off, encode_text(text)) == (off <= 0)


@pytest.mark.parametrize("letters", ["xy", "\u7fff\u8000", "\U00010000\U0010ffff"], ids=["one byte", "two", "four"])
def test_places_and_characters_beyond_16_bits_are_compared_as_the_others(letters: str) -> None:
    text, first = letters + "a" * 40_000, "b" * 40_000 + letters + "c"
    for first_text, second_text in ((text, first), (first, text)):
        assert reaches(first_text, second_text, CharacterIndex.of(encode_text(second_text)), 2, encode_text(first_text))
        assert not reaches(
            first_text, second_text, CharacterIndex.of(encode_text(second_text)), 3, encode_text(first_text)
        )


@given(st.integers(0, 5000), st.floats(1e-6, 1.0))
def test_needed_matches_is_the_least_that_reaches_the_threshold(total: int, threshold: float) -> None:
    needed = compute_needed_matches(total, threshold)
    if total == 0:
        assert needed == 0, "difflib calls two empty texts equal"
        return
    assert 2.0 * needed / total >= threshold
    assert needed == 0 or 2.0 * (needed - 1) / total < threshold


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a" * 100, "a" * 80),
        ("abcdefghij", "klmnopqrst"),
        ("the same letters " * 20, "sretteltemeahs  " * 20),
    ],
    ids=["length", "letters", "pairs"],
)
def test_each_bound_excludes_something(text: str, first: str) -> None:
    assert not possible(text, first, 0.9)


def test_pairs_exclude_what_letters_do_not() -> None:
    rng = random.Random(0)
    text = "".join(rng.choices(ascii_lowercase, k=600))
    first = "".join(rng.sample(text, 600))
    assert SequenceMatcher(None, text, first).quick_ratio() == 1.0
    assert not possible(text, first, 0.9)


def test_counts_are_counts() -> None:
    text = "abab\U0001f5dd"
    assert encode_text(text).tolist() == [97, 98, 97, 98, 0x1F5DD]
    letters, pairs = count_letters(encode_text(text)), count_pairs(encode_text(text))
    assert letters.sum() == 5
    assert letters[97] == letters[98] == 2
    assert pairs.sum() == 4
    assert np.count_nonzero(pairs) == 3
    for empty in ("", "a"):
        assert count_pairs(encode_text(empty)).sum() == 0
    assert count_letters(encode_text("")).sum() == 0
    assert encode_text("\ud800").tolist() == [0xD800]


def test_profiles_grow() -> None:
    profiles = Profiles()
    texts = [f"{n:03d}" * 5 for n in range(40)]
    for text in texts:
        text_T = encode_text(text)
        profiles.append(len(text), count_letters(text_T), count_pairs(text_T))
    for n, text in enumerate(texts):
        text_T = encode_text(text)
        assert n in profiles.find_candidates(len(text), count_letters(text_T), count_pairs(text_T), 1.0)
        assert list(profiles.find_candidates(len(text), count_letters(text_T), count_pairs(text_T), 0.001)) == list(
            range(40)
        )


@settings(deadline=None, max_examples=examples(13))
@given(st.randoms(use_true_random=False), st.sampled_from([0.6, 0.9, 0.95]))
def test_partitions_of_pages_are_the_definitions(rng: random.Random, threshold: float) -> None:
    """Texts like search results: a few pages of 150 to 700 characters, each seen with small edits."""
    pages = [" ".join(rng.choices(WORDS, k=rng.randint(30, 110))) for _ in range(4)]
    texts_read = []
    for _ in range(24):
        page = list(rng.choice(pages))
        for _ in range(rng.randint(0, 12)):
            page[rng.randrange(len(page))] = rng.choice("0123abc .")
        texts_read.append("".join(page))
    representatives = find_representatives(texts_read, threshold)
    assert [representatives[text] for text in texts_read] == naive_clusters(texts_read, threshold)
