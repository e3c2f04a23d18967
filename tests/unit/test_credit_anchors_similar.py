"""Greedy clustering by difflib, against the loop without shortcuts, and its known quirks."""

from difflib import SequenceMatcher

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.credit.anchors.similar import find_representatives
from testkit.anchor_keys import naive_clusters
from testkit.examples import examples

WORDS = ["abcdefghij", "abcdefghijk", "abcdefghijkl", "abcdefghijklm", "abcdefghijklmn"]


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(st.text("ab .", max_size=8), max_size=12), st.sampled_from([0.01, 0.3, 0.6, 0.8, 0.9, 1.0]))
def test_equals_the_definition(texts: list[str], threshold: float) -> None:
    representatives = find_representatives(texts, threshold)
    assert [representatives[text] for text in texts] == naive_clusters(texts, threshold)


@settings(deadline=None, max_examples=examples(20))
@given(st.lists(st.tuples(st.text("ab. ", min_size=1, max_size=3), st.integers(150, 260)), max_size=5))
def test_equals_the_definition_where_autojunk_is_at_work(pieces: list[tuple[str, int]]) -> None:
    texts = [(word * length)[:length] + f" {word}" for word, length in pieces] * 2
    representatives = find_representatives(texts, 0.9)
    assert [representatives[text] for text in texts] == naive_clusters(texts, 0.9)


def test_the_visiting_order_decides() -> None:
    forward = find_representatives(WORDS, 0.9)
    assert forward == {**dict.fromkeys(WORDS[:3], WORDS[0]), **dict.fromkeys(WORDS[3:], WORDS[3])}
    assert set(find_representatives([WORDS[2], *WORDS], 0.9).values()) == {WORDS[2]}


def test_autojunk_splits_long_texts_that_differ_in_punctuation() -> None:
    texts = ["the cat sat on the mat. " * 12, "the cat sat on the mat! " * 12]
    assert len(texts[0]) == 288
    assert SequenceMatcher(None, texts[1], texts[0]).ratio() < 0.1
    assert SequenceMatcher(None, texts[1], texts[0], autojunk=False).ratio() > 0.9
    assert find_representatives(texts, 0.9) == {text: text for text in texts}


def test_letters_alone_do_not_make_texts_similar() -> None:
    """`tide` and `diet`: quick_ratio is 1, the ratio is not."""
    assert SequenceMatcher(None, "diet", "tide").quick_ratio() == 1.0
    assert find_representatives(["tide", "diet"], 0.9) == {"tide": "tide", "diet": "diet"}


@pytest.mark.parametrize("texts", [[], [""], ["", "", "a"]])
def test_empty_texts(texts: list[str]) -> None:
    assert find_representatives(texts, 0.5) == {text: text for text in texts}
