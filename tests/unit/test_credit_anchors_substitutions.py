"""Substitutions: what they replace, what is refused, and that no text makes them hang."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lake.ids import text_hash
from pipelines.credit.anchors import Substitutions
from pipelines.credit.anchors.definitions import Substitution, check_pattern
from testkit.anchor_keys import keys_of, steps_frame, texts
from testkit.examples import examples


def replacing(*pairs: tuple[str, str]) -> Substitutions:
    return Substitutions(substitutions=tuple(Substitution(pattern=p, replacement=r) for p, r in pairs))


def test_the_key_is_the_hash_of_the_rewritten_text() -> None:
    definition = replacing((r"moves?: \d+", "moves"), (r"\s+", " "))
    states = ["room  a  move: 3", "room a moves: 12", "room b", None, ""]
    expected = [text_hash("room a moves"), text_hash("room a moves"), text_hash("room b"), None, text_hash("")]
    assert keys_of(definition, steps_frame(texts(*states))) == expected


def test_a_text_without_a_match_keeps_its_stored_hash() -> None:
    rows = [{"state": "nothing to do", "state_hash": text_hash("nothing to do")}]
    assert keys_of(replacing(("x", "y")), steps_frame(rows)) == [text_hash("nothing to do")]


def test_each_sees_what_the_one_before_left() -> None:
    assert keys_of(replacing(("a", "b"), ("b", "c")), steps_frame(texts("ab"))) == [text_hash("cc")]
    assert keys_of(replacing(("b", "c"), ("a", "b")), steps_frame(texts("ab"))) == [text_hash("bc")]


def test_groups_can_be_referred_to_by_number_and_by_name() -> None:
    pattern = r"(?P<what>\w+)=(\w+)"
    for replacement in ("$2=$what", "${2}=${what}", "$2=$1"):
        assert keys_of(replacing((pattern, replacement)), steps_frame(texts("k=v"))) == [text_hash("v=k")]
    assert keys_of(replacing((pattern, "$$$0")), steps_frame(texts("k=v"))) == [text_hash("$k=v")]


def test_a_stored_hash_stands_for_its_text() -> None:
    """Texts are found by their stored hash, and a missing hash by the text itself."""
    rows = [
        {"state": "at 1", "state_hash": 7},
        {"state": "at 2", "state_hash": 8},
        {"state": "at 2", "state_hash": 8},
        {"state": "at 3", "state_hash": None},
        {"state": None, "state_hash": 7},
        {"state": None, "state_hash": 9},
    ]
    keys = keys_of(replacing((r"\d", "#")), steps_frame(rows))
    assert keys == [text_hash("at #")] * 5 + [None]


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("(", "unclosed group"),
        (r"a(?=b)", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        ("(a{1000}){1000}", "size limit"),
        ("[z-a]", "invalid"),
    ],
)
def test_expressions_that_cannot_be_run_are_refused_at_once(pattern: str, fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Substitution(pattern=pattern)
    assert fault in str(caught.value)
    assert "Rust's regex crate" in str(caught.value)


def test_an_empty_pattern_and_an_empty_list_are_refused() -> None:
    with pytest.raises(ValidationError, match="at least 1 character"):
        Substitution(pattern="")
    with pytest.raises(ValidationError, match="at least 1 item"):
        Substitutions(substitutions=())


@pytest.mark.parametrize("replacement", ["$1x", "$2", "${name}", "${}", "a$b"])
def test_a_reference_to_no_group_is_refused(replacement: str) -> None:
    """Rust's regex would take `$1x` for a group named 1x and put nothing there, in silence."""
    with pytest.raises(ValidationError, match="refers to group"):
        Substitution(pattern=r"(\d)", replacement=replacement)


@pytest.mark.parametrize("replacement", ["${1}x", "$1-", "$$1x", "$0", "100 $", ""])
def test_valid_references_are_taken(replacement: str) -> None:
    assert Substitution(pattern=r"(\d)", replacement=replacement).replacement == replacement


def test_groups_of_a_pattern() -> None:
    assert set(check_pattern("a|b")) == {"0"}
    assert set(check_pattern(r"(a)(?:b)(?P<n>c)\(d\)")) == {"0", "1", "2", "n"}


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "(a*)*b", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_hostile_expressions_come_back(pattern: str) -> None:
    """Each takes a backtracking engine longer than the age of the universe on this text."""
    long = "a" * 20_000 + "!"
    assert keys_of(replacing((pattern, "x")), steps_frame(texts(long))) is not None


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.none() | st.text("ab1 ", max_size=6), min_size=1, max_size=8))
def test_equals_pythons_re_where_both_know_the_syntax(states: list[str | None]) -> None:
    definition = replacing((r"[0-9]+", "#"), (r"a(b|$)", "<$1>"), (r"^ ", ""))

    def slowly(text: str) -> str:
        text = re.sub("[0-9]+", "#", text)
        text = re.sub(r"a(b|\Z)", lambda match: f"<{match[1]}>", text)
        return re.sub(r"\A ", "", text)

    expected = [None if state is None else text_hash(slowly(state)) for state in states]
    assert keys_of(definition, steps_frame(texts(*states))) == expected
