"""Tool calls in text: what is read, what is a fault, and that nothing a model writes is an exception."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake.errors import UsageError
from pipelines.collect.policies.rendering import parse_answer_text, resolve_tool_format
from testkit.examples import examples


def functions(answer) -> list[tuple[str, dict]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.tool_calls]


TWO = [("f", {}), ("g", {})]


@pytest.mark.parametrize(
    ("tool_format", "text", "rest", "calls"),
    [
        ("hermes", 'Well.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Well.", [("f", {"a": 1})]),
        (
            "hermes",
            '<tool_call>{"name":"f"}</tool_call><tool_call>{"name":"g"}</tool_call>',
            "",
            [("f", {}), ("g", {})],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": ";"}}</tool_call>', "", [("f", {"a": ";"})]),
        ("hermes", ' {"name": "f"} ', ' {"name": "f"} ', []),
        ("llama", '{"name": "f", "parameters": {"a": "x; y"}}', "", [("f", {"a": "x; y"})]),
        ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", TWO),
        ("llama", '<|python_tag|>{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
        ("llama", '{"answer": 3}', '{"answer": 3}', []),
        ("llama", '{"answer"', '{"answer"', []),
        ("llama", "go east", "go east", []),
        ("none", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ],
)
def test_calls_are_read_as_models_write_them(tool_format, text, rest, calls):
    answer = parse_answer_text(text, tool_format)
    assert (answer.text, functions(answer), answer.fault, answer.reasoning) == (rest, calls, None, None)


@pytest.mark.parametrize(
    ("tool_format", "text", "fault"),
    [
        ("hermes", '<tool_call>{"name": "f"}', "a <tool_call> is not closed by </tool_call>"),
        ("hermes", "<tool_call>f(1)</tool_call>", "a tool call is not JSON"),
        ("hermes", "<tool_call></tool_call>", "a tool call is 0 JSON values instead of one"),
        ("hermes", '<tool_call>{"name": "f"}; {"name": "g"}</tool_call>', "a tool call is 2 JSON values"),
        ("hermes", "<tool_call>[1]</tool_call>", "a tool call names no function"),
        ("hermes", '<tool_call>{"name": ""}</tool_call>', "a tool call names no function"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "the arguments of a call of 'f' are no"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "a tool call is not JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "holds half a character"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "a tool call is not JSON"),
        ("llama", '{"name": "f", "parameters": {', "a tool call is not JSON"),
        ("llama", '{"name": "f"} and more', "the text after a tool call is not a tool call"),
        ("llama", "<|python_tag|>print(1)", "a tool call is not JSON"),
    ],
)
def test_what_begins_as_a_call_and_is_none_is_a_fault_and_stays(tool_format, text, fault):
    answer = parse_answer_text(text, tool_format)
    assert (answer.text, answer.tool_calls) == (text, [])
    assert fault in answer.fault


@pytest.mark.parametrize(
    ("text", "is_thinking", "reasoning", "rest"),
    [
        ("<think>\nhm\n</think>\n\ngo", False, "hm", "go"),
        ("hm</think>go", True, "hm", "go"),
        ("hm, cut off", True, "hm, cut off", ""),
        ("<think>hm", False, "hm", ""),
        ("a <think> b", False, None, "a <think> b"),
        ("no opening</think>go", False, None, "no opening</think>go"),
        ('<think><tool_call>{"name": "f"}</tool_call></think>go', False, '<tool_call>{"name": "f"}</tool_call>', "go"),
    ],
)
def test_reasoning_is_taken_from_the_beginning_alone(text, is_thinking, reasoning, rest):
    answer = parse_answer_text(text, "hermes", is_thinking=is_thinking)
    assert (answer.reasoning, answer.text, answer.tool_calls, answer.fault) == (reasoning, rest, [], None)


PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f"',
    '"arguments": {',
    "}",
    ";",
    "<|python_tag|>",
    "<think>",
    "\ud800",
]


@settings(max_examples=examples(60))
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4))).map("".join), st.booleans())
def test_nothing_that_a_model_writes_is_an_exception(text, is_thinking):
    for tool_format in ("hermes", "llama", "none"):
        answer = parse_answer_text(text, tool_format, is_thinking=is_thinking)
        assert answer.fault is None or not answer.tool_calls


def test_the_format_is_the_templates_unless_it_is_named():
    assert resolve_tool_format("auto", "... <tool_call> ...") == "hermes"
    assert resolve_tool_format("auto", "... <|python_tag|> ...") == "llama"
    assert resolve_tool_format("none", "... <tool_call> ...") == "none"
    with pytest.raises(UsageError, match="hermes, llama, or none"):
        resolve_tool_format("auto", "plain")
