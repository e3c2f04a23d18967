"""Stored messages and tool calls of any shape come out as text, never as an exception."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viewer import plain

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(json_values))
def test_a_stored_list_comes_back(values: list[object]) -> None:
    document = json.dumps(values)
    assert plain.parse_list(document, len(document)) == values


@given(json_values)
def test_anything_stored_can_be_drawn(value: object) -> None:
    assert isinstance(plain.get_text(value), str)
    assert isinstance(plain.get_role(value), str)
    name, arguments = plain.parse_call(value)
    assert isinstance(name, str)
    assert isinstance(arguments, str)


def test_nothing_is_an_empty_list() -> None:
    assert plain.parse_list(None, 0) == []
    assert plain.parse_messages(None, 0) == []


@pytest.mark.parametrize("document", ['[{"role": "us', "{}", "17", "not json", "[" * 100_000])
def test_what_is_no_list_is_shown_as_it_is(document: str) -> None:
    assert plain.parse_list(document, len(document)) is None
    assert plain.parse_messages(document, len(document)) == [{"role": "messages", "content": document}]


def test_a_cut_document_is_not_taken_for_a_whole_one() -> None:
    assert plain.parse_list("[1, 2]", 600) is None


def test_contents_of_every_known_shape() -> None:
    content = [{"type": "text", "text": "hello"}]
    assert plain.get_text({"role": "user", "content": "hello"}) == "hello"
    assert plain.get_text({"role": "assistant", "content": None}) == ""
    assert plain.get_text("bare") == "bare"
    assert json.loads(plain.get_text({"content": content})) == content


@pytest.mark.parametrize(
    ("stored_calls", "name", "arguments"),
    [
        ({"function": {"name": "search", "arguments": '{"q": 1}'}}, "search", '{\n  "q": 1\n}'),
        ({"name": "search", "arguments": {"q": 1}}, "search", '{\n  "q": 1\n}'),
        ({"function": {"name": "run", "arguments": "rm -rf {"}}, "run", "rm -rf {"),
        ({"function": "odd"}, "?", '{\n  "function": "odd"\n}'),
        ("odd", "?", "odd"),
        (None, "?", "null"),
    ],
)
def test_tool_calls_of_every_known_shape(stored_calls: object, name: str, arguments: str) -> None:
    assert plain.parse_call(stored_calls) == (name, arguments)


def test_arguments_nested_too_deeply_stay_text() -> None:
    deep = "[" * 100_000
    assert plain.format_json(deep) == deep
