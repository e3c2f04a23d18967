"""What is read out of requests and answers of the four APIs."""

from typing import Any

import pytest

from lake.formats.base.rows import ShapeError
from lake.live.calls.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, parse_answer, parse_request

LOOSE = {"type": "function", "function": {"name": "look", "parameters": {}}}
STRICT = {"type": "function", "function": {"name": "look", "parameters": {}, "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize(
    ("fields", "is_constrained"),
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
def test_a_grammar_or_a_bias_is_told(fields: dict[str, Any], is_constrained: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hello."}], "temperature": 1.0} | fields
    assert parse_request("chat/completions", body).is_constrained == is_constrained


USER = {"role": "user", "content": "Hello."}
CALLED = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}],
}


def test_messages_of_anthropic_are_chats() -> None:
    request = parse_request(
        MESSAGES,
        {
            "model": "claude",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "You open doors."}],
            "messages": [
                {"role": "user", "content": '[{"id": "1", "function": {"name": "f", "arguments": {}}}]'},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "door"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "shut", "is_error": True},
                        {"type": "text", "text": "Go on."},
                    ],
                },
            ],
            "tools": [{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
        },
    )
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool", "user"]
    assert request.messages[0]["content"] == "You open doors."
    assert request.messages[1]["content"].startswith("[{"), "what a user says in JSON is no call"
    assert {key: request.messages[2][key] for key in CALLED} == CALLED
    assert request.messages[2]["reasoning_content"] == "Hm."
    assert request.messages[3] == {"role": "tool", "content": "shut", "tool_call_id": "c1", "is_error": True}
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.settings == {"max_tokens": 9}


def test_items_of_responses_are_chats() -> None:
    arguments = '{"at": "door"}'
    request = parse_request(
        RESPONSES,
        {
            "instructions": "You open doors.",
            "input": [
                USER,
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments},
                {"type": "function_call_output", "call_id": "c1", "output": "shut"},
            ],
        },
    )
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool"]
    assert request.messages[2]["content"] == "I look."
    assert request.messages[2]["reasoning_content"] == "Hm."
    assert request.messages[2]["tool_calls"][0]["function"] == {"name": "look", "arguments": arguments}


@pytest.mark.parametrize(
    ("api", "body", "previous"),
    [
        (RESPONSES, {"previous_response_id": "r1"}, "r1"),
        (RESPONSES, {"conversation": "conv"}, "conv"),
        (RESPONSES, {"conversation": {"id": "conv"}}, "conv"),
        (RESPONSES, {"previous_response_id": None}, None),
        (CHAT, {"previous_response_id": "r1"}, None),
    ],
)
def test_a_request_names_what_it_goes_on_from(api: str, body: dict[str, Any], previous: str | None) -> None:
    assert parse_request(api, {"messages": [USER], "input": "Hello."} | body).previous == previous


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], None, 7])
def test_several_prompts_in_one_call_are_no_prompt(prompt: Any) -> None:
    with pytest.raises(ShapeError, match="valid: one text, or"):
        parse_request(COMPLETIONS, {"prompt": prompt})


@pytest.mark.parametrize(("prompt", "text"), [("a", "a"), (["a"], "a"), ([1, 2], None), ([[1, 2]], None), ("", "")])
def test_a_prompt_is_a_text_or_tokens(prompt: Any, text: str | None) -> None:
    request = parse_request(COMPLETIONS, {"prompt": prompt, "echo": True})
    assert request.text == text
    assert request.messages == ([] if text is None else [{"role": "user", "content": text}])
    assert request.is_echoed == (text is not None)


def test_tokens_are_counted_where_no_usage_is_told() -> None:
    choices = [{"index": index, "message": USER, "token_ids": [1] * (index + 1)} for index in range(2)]
    completion = parse_answer(CHAT, {"choices": choices, "prompt_token_ids": [5, 6, 7]})
    assert (completion.prompt_tokens, completion.completion_tokens) == (3, 3)
    parsed = parse_answer(CHAT, {"choices": choices, "usage": {"prompt_tokens": 9, "completion_tokens": 8}})
    assert (parsed.prompt_tokens, parsed.completion_tokens) == (9, 8)
    unknown = parse_answer(CHAT, {"choices": [{"index": 0, "message": USER}]})
    assert (unknown.prompt_tokens, unknown.completion_tokens) == (None, None)


@pytest.mark.parametrize("status", ["failed", "cancelled", "in_progress"])
def test_an_answer_of_the_responses_api_that_did_not_end_is_none(status: str) -> None:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "half"}]}
    with pytest.raises(ShapeError, match=f"is {status}: "):
        parse_answer(RESPONSES, {"status": status, "output": [message]})
