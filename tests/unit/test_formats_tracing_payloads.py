"""Prompts and answers in the shapes of APIs and frameworks, each as messages."""

import json
from typing import Any

import pytest

from lake.formats.chat.messages import check_message
from lake.formats.tracing.payloads import (
    parse_answers,
    parse_instructions,
    parse_prompt,
    parse_result,
    split_choices,
    to_messages,
)

USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Paris"}'}}
PARSED = CALL | {"function": {"name": "get", "arguments": {"city": "Paris"}}}
RESULT = {"role": "tool", "content": "22C", "tool_call_id": "c1"}


def parse_messages(value: Any) -> list[Any]:
    """The messages of a prompt, which are all well-formed."""
    messages = parse_prompt(value).messages
    for message in messages:
        check_message(message, "m")
    return messages


# ---------------------------------------------------------------- one message


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param({"role": "assistant", "content": None, "tool_calls": [CALL]}, [CALL], id="openai"),
        pytest.param(
            {
                "role": "assistant",
                "parts": [{"type": "tool_call", "id": "c1", "name": "get", "arguments": {"city": "Paris"}}],
            },
            [PARSED],
            id="genai",
        ),
        pytest.param(
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "get", "input": {"city": "Paris"}}],
            },
            [PARSED],
            id="anthropic",
        ),
        pytest.param(
            {
                "role": "assistant",
                "content": [{"toolUse": {"toolUseId": "c1", "name": "get", "input": {"city": "Paris"}}}],
            },
            [PARSED],
            id="bedrock",
        ),
        pytest.param(
            {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "get", "args": {"city": "Paris"}}}]},
            [PARSED],
            id="gemini",
        ),
        pytest.param(
            {"role": "model", "parts": [{"function_call": {"id": "c1", "name": "get", "args": {"city": "Paris"}}}]},
            [PARSED],
            id="gemini-python",
        ),
        pytest.param(
            {"role": "ai", "content": [{"toolCallId": "c1", "toolName": "get", "args": '{"city": "Paris"}'}]},
            [CALL],
            id="vercel-result",
        ),
        pytest.param({"role": "tool", "content": json.dumps([CALL])}, [CALL], id="koog"),
        pytest.param(
            {
                "role": "assistant",
                "content": [{"type": "tool-call", "toolCallId": "c1", "toolName": "get", "input": {"city": "Paris"}}],
            },
            [PARSED],
            id="vercel",
        ),
        pytest.param(
            {"type": "ai", "content": "", "tool_calls": [{"name": "get", "args": {"city": "Paris"}, "id": "c1"}]},
            [PARSED],
            id="langchain",
        ),
        pytest.param(
            {"role": "assistant", "content": "", "additional_kwargs": {"tool_calls": [CALL], "refusal": None}},
            [CALL],
            id="langchain-raw",
        ),
        pytest.param(
            {
                "lc": 1,
                "id": ["langchain", "schema", "messages", "AIMessage"],
                "kwargs": {"content": "", "tool_calls": [CALL]},
            },
            [CALL],
            id="langchain-serialised",
        ),
        pytest.param(
            {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"city": "Paris"}'},
            [CALL],
            id="responses",
        ),
    ],
)
def test_a_call_of_a_tool_is_the_same_in_every_shape(message: dict[str, Any], expected: Any) -> None:
    (only_message,) = to_messages(message, "assistant")
    assert (only_message["role"], only_message["tool_calls"]) == ("assistant", expected)
    assert not only_message["content"]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"role": "tool", "tool_call_id": "c1", "content": "22C"}, id="openai"),
        pytest.param(
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "22C"}]}, id="genai"
        ),
        pytest.param(
            {"role": "user", "parts": [{"type": "tool_call_response", "id": "c1", "result": "22C"}]}, id="genai2"
        ),
        pytest.param(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "22C"}]},
            id="anthropic",
        ),
        pytest.param(
            {"role": "user", "content": [{"toolResult": {"toolUseId": "c1", "content": [{"text": "22C"}]}}]},
            id="bedrock",
        ),
        pytest.param(
            {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "c1", "output": "22C"}]}, id="vercel"
        ),
        pytest.param(
            {"role": "user", "parts": [{"function_response": {"id": "c1", "response": "22C"}}]}, id="gemini-python"
        ),
        pytest.param({"type": "tool", "content": "22C", "tool_call_id": "c1"}, id="langchain"),
        pytest.param({"type": "tool", "data": {"content": "22C", "tool_call_id": "c1"}}, id="langchain-data"),
        pytest.param({"type": "function_call_output", "call_id": "c1", "output": "22C"}, id="responses"),
    ],
)
def test_a_result_of_a_tool_is_the_same_in_every_shape(message: dict[str, Any]) -> None:
    assert to_messages(message, "user") == [RESULT]


def test_results_beside_words_of_a_user_are_messages_of_their_own_in_order() -> None:
    pieces = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "22C", "is_error": False},
        {"type": "tool_result", "tool_use_id": "c2", "content": "no such city", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    assert to_messages({"role": "user", "content": pieces}, "user") == [
        RESULT | {"is_error": False},
        {"role": "tool", "content": "no such city", "tool_call_id": "c2", "is_error": True},
        {"role": "user", "content": "Go on."},
    ]


def test_a_result_of_an_unknown_shape_is_its_json_and_a_text_that_is_not_there_is_none() -> None:
    part = {"type": "tool_result", "tool_use_id": "1", "run": {"status": "done"}}
    (message,) = to_messages({"role": "user", "content": [part]}, "user")
    assert message == {"role": "tool", "content": '{"run":{"status":"done"}}', "tool_call_id": "1"}
    assert to_messages({"role": "user", "parts": [{"type": "text"}]}, "user") == [{"role": "user", "content": None}]


def test_a_result_that_is_no_text_is_its_json() -> None:
    (message,) = to_messages({"role": "tool", "tool_call_id": "c1", "content": {"degrees": [22]}}, "user")
    assert message["content"] == '{"degrees":[22]}'


@pytest.mark.parametrize(
    "part",
    [
        {"type": "reasoning", "content": "Hm."},
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "s"}}},
        {"text": "Hm.", "thought": True},
    ],
)
def test_reasoning_is_kept_apart_from_what_is_said(part: dict[str, Any]) -> None:
    (message,) = to_messages({"role": "assistant", "content": [part, {"type": "text", "text": "Yes."}]}, "assistant")
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert message.get("signatures", ["s"]) == ["s"]


def test_parts_that_are_no_text_stay_and_so_do_several_texts() -> None:
    image = {"type": "image_url", "image_url": {"url": "x.png"}}
    (message,) = to_messages({"role": "user", "content": [{"type": "text", "text": "Look."}, image]}, "user")
    assert message["content"] == [{"type": "text", "text": "Look."}, image]
    (message,) = to_messages({"role": "assistant", "parts": [{"type": "text", "content": t} for t in "ab"]}, "user")
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_what_a_message_says_besides_stays_with_it() -> None:
    message = {
        "type": "ai",
        "content": "Hi",
        "id": "run-1",
        "response_metadata": {"a": 1},
        "name": None,
        "example": False,
    }
    assert to_messages(message, "user") == [
        {"role": "assistant", "content": "Hi", "id": "run-1", "response_metadata": {"a": 1}}
    ]


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    "value",
    [
        "Weather?",
        [USER],
        json.dumps([USER]),
        json.dumps(json.dumps([USER])),
        {"messages": [USER], "model": "m"},
        {"messages": [[{"lc": 1, "id": ["x", "HumanMessage"], "kwargs": {"content": "Weather?"}}]]},
        {"contents": [{"role": "user", "parts": [{"text": "Weather?"}]}]},
        {"input": "Weather?", "model": "m"},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]},
        {"prompt": "Weather?"},
        {"model": "m", "contents": "Weather?"},
        {"args": ["Weather?"]},
        ["Weather?"],
    ],
)
def test_a_prompt_is_the_same_in_every_shape(value: Any) -> None:
    (message,) = parse_messages(value)
    assert (message["role"], message["content"]) == ("user", "Weather?")


@pytest.mark.parametrize(
    "value",
    [
        {"system": "Be kind.", "messages": [USER]},
        {"system": [{"type": "text", "text": "Be kind."}], "messages": [USER]},
        {"instructions": "Be kind.", "input": [USER]},
        {"systemInstruction": {"parts": [{"text": "Be kind."}]}, "contents": [USER]},
        {"config": {"system_instruction": "Be kind."}, "contents": [USER]},
    ],
)
def test_instructions_beside_the_messages_come_first(value: Any) -> None:
    assert parse_messages(value) == [{"role": "system", "content": "Be kind."}, USER]


def test_instructions_may_be_json_text_of_parts() -> None:
    assert parse_instructions('[{"type": "text", "content": "Be kind."}]') == {"role": "system", "content": "Be kind."}
    assert parse_instructions("[Be kind]") == {"role": "system", "content": "[Be kind]"}


def test_tools_and_settings_of_a_request_are_no_messages() -> None:
    payload = parse_prompt(
        {"messages": [USER], "tools": [{"name": "get"}], "model": "m", "stream": False, "stop": None}
    )
    assert (payload.tools, payload.rest) == ([{"name": "get"}], {"model": "m", "stream": False})


def test_tools_that_stand_among_the_messages_are_tools() -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": {}}}
    payload = parse_prompt([USER, {"role": "tool", "content": tool}])
    assert (payload.messages, payload.tools) == ([USER], [tool])


@pytest.mark.parametrize("words", ['{"a": 1}', "[1, 2]", '"quoted"', "[Be kind]", "{not json"])
def test_text_that_looks_like_json_stays_as_it_is_written(words: str) -> None:
    assert parse_messages(words) == [{"role": "user", "content": words}]
    assert parse_answers(words).messages == [{"role": "assistant", "content": words}]


def test_an_object_whose_type_is_no_text_is_no_message() -> None:
    """A schema, say."""
    value = [{"type": ["string", "null"], "content": 1}]
    assert parse_messages(value) == [{"role": "user", "content": '[{"type":["string","null"],"content":1}]'}]


def test_items_of_one_answer_are_one_message_of_a_prompt() -> None:
    items = [
        USER,
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "encrypted_content": "x",
        },
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "22C"},
    ]
    user, own_message, tool = parse_messages(items)
    assert (user, tool) == (USER, RESULT)
    assert own_message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
        "reasoning_content": "Hm.",
        "signatures": ["x"],
    }


def test_messages_of_two_agents_side_by_side_stay_two() -> None:
    answers = [{"role": "assistant", "name": name, "content": name} for name in ("a", "b")]
    assert parse_messages([USER, *answers]) == [USER, *answers]


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    "value",
    [
        "Sunny.",
        {"role": "assistant", "content": "Sunny."},
        [{"role": "assistant", "parts": [{"type": "text", "content": "Sunny."}]}],
        {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Sunny."}}]},
        {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}]}]},
        {"content": [{"type": "text", "text": "Sunny."}], "role": "assistant", "type": "message"},
        {"candidates": [{"content": {"role": "model", "parts": [{"text": "Sunny."}]}}]},
        {"generations": [[{"text": "Sunny.", "message": {"id": ["AIMessage"], "kwargs": {"content": "Sunny."}}}]]},
        {"output": {"message": {"role": "assistant", "content": [{"text": "Sunny."}]}}, "usage": {}},
        [{"type": "text", "text": "Sunny."}],
        {"messages": [USER, {"role": "assistant", "content": "Sunny."}]},
    ],
)
def test_an_answer_is_the_same_in_every_shape(value: Any) -> None:
    (message,) = parse_answers(value).messages
    assert (message["role"], message["content"]) == ("assistant", "Sunny.")


def test_an_object_that_the_model_was_asked_for_is_its_text() -> None:
    for value in ({"quality": "good", "feedback": "f"}, {"text": "t", "language": "en"}, {"role": "boss", "name": "n"}):
        (message,) = parse_answers(value).messages
        assert json.loads(message["content"]) == value


def test_choices_are_alternatives_and_say_why_they_finished() -> None:
    value = {"id": "r", "choices": [{"message": {"content": t}, "finish_reason": "stop"} for t in "ab"]}
    payload = parse_answers(value)
    assert [(m["content"], m["finish_reason"]) for m in payload.messages] == [("a", "stop"), ("b", "stop")]
    assert payload.rest == {"id": "r"}


def test_calls_that_are_made_at_once_are_one_answer() -> None:
    answers = [{"role": "assistant", "content": None, "tool_calls": [CALL], "finish_reason": "tool_calls"}] * 2
    (only_message,) = parse_answers(answers).messages
    assert only_message["tool_calls"] == [CALL, CALL]
    several = {"choices": [{"message": message, "finish_reason": "tool_calls"} for message in answers]}
    assert [m["tool_calls"] for m in parse_answers(several).messages] == [[CALL], [CALL]]


def test_messages_without_a_reason_each_are_one_answer_unless_choices_were_asked_for() -> None:
    answers = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    (message,) = split_choices(answers)
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert split_choices(answers, 2) == answers
    assert split_choices([]) == []


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_nothing_is_no_message(value: Any) -> None:
    assert parse_prompt(value).messages == parse_answers(value).messages == []


def test_what_a_tool_gave_back_is_text_with_the_call_it_answers() -> None:
    message = {"type": "tool", "content": "22C", "tool_call_id": "c1", "status": "error"}
    assert parse_result({"output": message}) == ("22C", "c1", True)
    assert parse_result("22C") == ("22C", None, None)
    assert parse_result({"degrees": 22}) == ('{"degrees":22}', None, None)
    assert parse_result(None) == ("", None, None)
