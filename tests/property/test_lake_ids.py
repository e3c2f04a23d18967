"""Ids: laws of the hashes and of their 13 characters, and the values that stored lakes depend on."""

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lake import ids

IDS = st.integers(min_value=0, max_value=2**63 - 1)
TEXTS = st.text()
PARTS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS)
ALIKE = st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, "", "0", "1", "null", "true", "a", "b", "a,b", '"'])
KEYS = st.one_of(st.lists(PARTS, max_size=5), st.lists(ALIKE, max_size=2))


def typed(key: list[object]) -> list[tuple[str, str]]:
    """A key with the types of its parts: 1, True and 1.0 are equal in Python, but are different keys."""
    return [(type(part).__name__, repr(part)) for part in key]


@given(IDS)
def test_an_id_comes_back_from_its_text(value: int) -> None:
    text = ids.to_text(value)
    assert len(text) == 13
    assert ids.is_text(text)
    assert ids.from_text(text) == value


@given(IDS)
def test_text_may_be_upper_case_and_padded(value: int) -> None:
    assert ids.from_text(f" {ids.to_text(value).upper()}\n") == value


@given(IDS, IDS)
def test_text_sorts_as_the_number_does(first: int, right: int) -> None:
    assert (ids.to_text(first) < ids.to_text(right)) == (first < right)


@given(st.text(alphabet=string.ascii_letters + string.digits + " -_\u0131", max_size=16))
@example("7" + "z" * 12)
@example("8" + "0" * 12)
def test_what_is_not_an_id_is_refused_by_name(text: str) -> None:
    """13 characters hold 65 bits: an id is of those whose first one is below 8."""
    stripped = text.strip()
    if len(stripped) == 13 and set(stripped.lower()) <= set(ids.ALPHABET) and stripped[0] < "8":
        assert 0 <= ids.from_text(text) <= ids.MASK
        return
    with pytest.raises(ValueError, match="13 characters") as caught:
        ids.from_text(text)
    assert repr(text) in str(caught.value)


@given(st.binary())
def test_a_hash_fits_63_bits_and_repeats(data: bytes) -> None:
    assert 0 <= ids.bytes_hash(data) < 2**63
    assert ids.bytes_hash(data) == ids.bytes_hash(bytes(bytearray(data)))


@given(TEXTS)
def test_a_text_hashes_as_its_utf8_bytes(text: str) -> None:
    assert ids.text_hash(text) == ids.bytes_hash(text.encode("utf-8"))


@given(st.text(alphabet=st.characters(categories=["Cs"]), min_size=1))
def test_lone_surrogates_hash_and_differ_from_their_replacement(text: str) -> None:
    assert ids.text_hash(text) != ids.text_hash(text.encode("utf-8", "replace").decode("utf-8"))


@given(KEYS, KEYS)
def test_keys_are_equal_exactly_when_their_parts_are_equal_and_of_one_type(first: list, right: list) -> None:
    assert (ids.key_hash(*first) == ids.key_hash(*right)) == (typed(first) == typed(right))


@pytest.mark.parametrize(
    ("first", "right"),
    [
        ((1,), ("1",)),
        ((1,), (True,)),
        ((1,), (1.0,)),
        ((0,), (False,)),
        ((None,), ("null",)),
        ((None,), ("",)),
        ((None,), ()),
        (("a", "b"), ("a,b",)),
        (("a", "b"), ("ab",)),
        (("a", None), (None, "a")),
        (('a","b',), ("a", "b")),
        (("\u00e9",), ("e\u0301",)),
        (("\u00e9",), ("\\u00e9",)),
    ],
)
def test_keys_that_look_alike_are_kept_apart(first: tuple, right: tuple) -> None:
    assert ids.key_hash(*first) != ids.key_hash(*right)


def test_stored_lakes_depend_on_these_values() -> None:
    """Do not fix this test: other values make every id in every stored lake wrong."""
    assert ids.bytes_hash(b"") == 0x34B2797457A0A6E4  # `b2sum -l 64 /dev/null`, read little-endian
    assert ids.text_hash("You are in the kitchen.") == 7928575499704953429
    assert ids.text_hash("\u00e9\U0001f600") == 8546373899247377511
    assert ids.key_hash() == 5144645853590685041
    assert ids.key_hash("episode", "jsonl", "run", None, "task-1", 0, 0, None) == 317730671426321418
    assert ids.key_hash("\u00e9", True, 0.1, -(2**40)) == 5757621248187448958
    assert ids.to_text(0) == "0000000000000"
    assert ids.to_text(2**63 - 1) == "7zzzzzzzzzzzz"
    assert ids.to_text(1234567890123456789) == "128ggyhyyk08n"


def test_fresh_ids_are_in_range_and_do_not_repeat() -> None:
    drawn = [ids.fresh_id() for _ in range(1000)]
    assert all(0 <= value < 2**63 for value in drawn)
    assert len(set(drawn)) == 1000
    assert max(drawn) > 2**60, "the high bits are used"
