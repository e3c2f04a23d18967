"""The last k states: windows inside an episode, the short ones at its beginning, and unknown states in them."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lake.ids import bytes_hash, text_hash
from pipelines.credit.anchors import ExactText, LastStates
from pipelines.credit.anchors.definitions import hash_history
from pipelines.credit.steps import Segments
from testkit.anchor_keys import keys_of, labelled, naive_history, partition, steps_frame
from testkit.examples import examples


def episodes(*walks: str) -> list[dict[str, object]]:
    """One episode per word, one state per letter; `?` is unknown."""
    return [
        {"episode_id": e, "step_index": n, "state": None if letter == "?" else letter}
        for e, walk in enumerate(walks)
        for n, letter in enumerate(walk)
    ]


def packed(*states: str) -> int:
    return bytes_hash(b"".join(text_hash(state).to_bytes(8, "little") for state in states))


def test_k_1_is_the_state_itself() -> None:
    frame = steps_frame(episodes("ab?", "ba"))
    assert keys_of(LastStates(k=1), frame) == keys_of(ExactText(), frame)


def test_the_key_is_the_hash_of_the_window() -> None:
    assert keys_of(LastStates(k=2), steps_frame(episodes("aba"))) == [packed("a"), packed("a", "b"), packed("b", "a")]
    assert keys_of(LastStates(k=3), steps_frame(episodes("aba")))[2] == packed("a", "b", "a")


def test_the_same_place_by_another_way_is_another_anchor() -> None:
    frame = steps_frame(episodes("ax", "bx", "ax"))
    assert partition(keys_of(LastStates(k=2), frame)) == [0, 1, 2, 3, 0, 1]


def test_windows_do_not_reach_into_the_episode_before() -> None:
    frame = steps_frame(episodes("ab", "b"))
    keys = keys_of(LastStates(k=2), frame)
    assert keys[2] == packed("b")
    assert keys[2] not in keys[:2]


def test_short_windows_can_be_unknown() -> None:
    frame = steps_frame(episodes("abc", "ab", "a"))
    assert partition(keys_of(LastStates(k=2, short="unknown"), frame)) == [None, 0, 1, None, 0, None]
    assert keys_of(LastStates(k=1, short="unknown"), frame) == keys_of(ExactText(), frame)


def test_a_window_with_an_unknown_state_is_unknown() -> None:
    frame = steps_frame(episodes("a?bcd"))
    assert partition(keys_of(LastStates(k=2), frame)) == [0, None, None, 1, 2]


def test_inactive_steps_are_no_part_of_a_window() -> None:
    rows = [row | {"is_active": row["state"] != "x"} for row in episodes("axb", "ab")]
    frame = steps_frame(rows).with_columns(is_active=pl.Series([row["is_active"] for row in rows]))
    assert partition(keys_of(LastStates(k=2), frame)) == [0, 1, 0, 1]


def test_a_key_does_not_collide_with_a_shorter_window() -> None:
    keys_N = pl.Series([0, 0, 0], dtype=pl.Int64)
    history = hash_history(keys_N, Segments(np.array([0]), np.array([3])), 3).to_list()
    assert history == [bytes_hash(bytes(8 * n)) for n in (1, 2, 3)]


@pytest.mark.parametrize("k", [0, 65])
def test_lengths_out_of_range_are_refused(k: int) -> None:
    with pytest.raises(ValidationError):
        LastStates(k=k)


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(st.text("ab?", min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(["keep", "unknown"]),
)
def test_equals_the_definition(walks: list[str], k: int, short: str) -> None:
    rows = episodes(*walks)
    expected = naive_history(rows, labelled(rows, str), k, short)
    keys = keys_of(LastStates(k=k, short=short), steps_frame(rows))
    assert partition(keys) == partition(expected)
