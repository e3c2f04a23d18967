"""What is read out of a request: whether its answer is of the policy's own distribution."""

from typing import Any

import pytest

from lake.live.proxy.shapes import asked

LOOSE = {"type": "function", "function": {"name": "look", "parameters": {}}}
STRICT = {"type": "function", "function": {"name": "look", "parameters": {}, "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize(
    ("more", "is_constrained"),
    [
        ({}, False),
        ({"tools": [LOOSE], "tool_choice": "auto"}, False),
        ({"tools": [LOOSE], "tool_choice": "required"}, True),
        ({"tools": [LOOSE], "tool_choice": {"type": "function", "function": {"name": "look"}}}, True),
        ({"tools": [LOOSE, STRICT]}, True),
        ({"tools": [STRICT], "tool_choice": "none"}, False),
        ({"tools": ["no tool", {"function": "none"}, None]}, False),
        ({"tools": "none"}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": SCHEMA}, True),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, True),
        ({"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": None, "min_tokens": 0}, False),
        ({"logit_bias": {}, "bad_words": []}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"logit_bias": {"5": -100}}, True),
        ({"allowed_token_ids": [1, 2]}, True),
        ({"bad_words": ["no"]}, True),
        ({"min_tokens": 5}, True),
    ],
)
def test_a_grammar_or_a_bias_is_told(more: dict[str, Any], is_constrained: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hello."}], "temperature": 1.0} | more
    assert asked("chat/completions", body).is_constrained == is_constrained
