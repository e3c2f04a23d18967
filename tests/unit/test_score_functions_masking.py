"""Keys in what a function says: what quotes one is starred, other text stays."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.score.functions import find_keys, mask_keys

KEY = "sk-0123456789abcdef"
TEXTS = st.text(st.sampled_from("sk-0123456789abcdef. "), max_size=30)
DATA = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | TEXTS | st.just(KEY) | st.just(f"<{KEY}{KEY}>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just(KEY), inner, max_size=3),
    max_leaves=8,
)


def test_keys_are_known_by_the_names_of_their_variables() -> None:
    environment = {
        "OPENAI_API_KEY": f" {KEY}\n",
        "OPENAI_BASE_URL": "http://127.0.0.1:1234/v1",
        "hf_token": "hf_abcdefgh",
        "DB_PASSWORD": "short",
        "OTHER_KEY": "none",
        "AWS_SECRET": "",
    }
    assert find_keys(environment) == (KEY, "hf_abcdefgh")
    assert find_keys({}) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (KEY, "***"),
        (f"a {KEY}, {KEY}{KEY}.", "a ***, ******."),
        (f"{KEY[5:]} and on", "*** and on"),
        (f"it is {KEY[:12]}", "it is ***"),
        (f"{KEY[-7:]} and on", f"{KEY[-7:]} and on"),
        (f"in the midst {KEY[:12]} of it", f"in the midst {KEY[:12]} of it"),
        ("", ""),
        ("nothing", "nothing"),
    ],
)
def test_a_text_is_starred_where_it_quotes_a_key(text: str, expected: str) -> None:
    assert mask_keys(text, (KEY,)) == expected


def test_a_longer_key_goes_before_the_one_that_it_contains() -> None:
    keys = find_keys({"A_KEY": KEY, "B_KEY": KEY + "-more"})
    assert mask_keys(f"{KEY}-more {KEY}", keys) == "*** ***"


def texts(data: Any) -> list[str]:
    if isinstance(data, dict):
        return [text for pair in data.items() for each in pair for text in texts(each)]
    if isinstance(data, list):
        return [text for each in data for text in texts(each)]
    return [data] if isinstance(data, str) else []


@given(DATA)
def test_no_key_is_left_anywhere_and_the_rest_is_as_it_was(data: Any) -> None:
    masked = mask_keys(data, (KEY,))
    assert not any(KEY in text for text in texts(masked))
    assert mask_keys(data, ()) is data
    if not any(KEY[:8] in text or KEY[-8:] in text for text in texts(data)):
        assert masked == data
