"""OpenInference: what spans are, where their messages stand, and what was judged."""

import json
from typing import Any

import pytest

from lake.formats.otlp import conventions as otlp_openinference
from lake.formats.tracing.episodes import ModelCall, Span, Tool

CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Paris"}'}}
GIVEN = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Weather?"}]
LLM = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m-1",
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Be kind.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.content": "Weather?",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "Let me look.",
    "llm.output_messages.0.message.tool_calls.0.tool_call.id": "c1",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "get",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"city": "Paris"}',
}


def filled(attributes: dict[str, Any], name: str = "n", error: str | None = None) -> Span:
    span = Span(id="a", name=name, attributes=dict(attributes), error=error)
    assert otlp_openinference.fill_openinference_span(span)
    return span


def call(attributes: dict[str, Any]) -> ModelCall:
    model_call = filled(attributes).call
    assert model_call is not None
    return model_call


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("LLM", "llm"),
        ("AGENT", "agent"),
        ("TOOL", "tool"),
        ("CHAIN", "chain"),
        ("EMBEDDING", "embedding"),
        ("RERANKER", "reranker"),
    ],
)
def test_the_kind_says_what_a_span_is(kind: str, expected: str) -> None:
    assert filled({"openinference.span.kind": kind}).kind == expected


def test_spans_of_others_are_left_to_others() -> None:
    assert not otlp_openinference.fill_openinference_span(Span(id="a", attributes={"gen_ai.operation.name": "chat"}))


def test_numbered_messages_are_the_prompt_and_the_answer() -> None:
    span = filled(LLM)
    assert span.call is not None
    assert span.call.prompt == GIVEN
    assert span.call.answers == [{"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}]
    assert span.attributes == {"openinference.span.kind": "LLM", "llm.model_name": "m-1"}


def test_messages_that_are_nested_are_the_same() -> None:
    prompt = [
        {"message": {"role": "system", "content": "Be kind."}},
        {"message.role": "user", "message.content": "Weather?"},
    ]
    answers = [
        {
            "message": {
                "role": "assistant",
                "content": "Let me look.",
                "tool_calls": [
                    {"tool_call": {"id": "c1", "function": {"name": "get", "arguments": '{"city": "Paris"}'}}}
                ],
            }
        }
    ]
    model_call = call({"openinference.span.kind": "LLM", "llm.input_messages": prompt, "llm.output_messages": answers})
    assert (model_call.prompt, model_call.answers) == (GIVEN, call(LLM).answers)


def test_contents_of_several_parts_and_older_calls_of_functions_are_taken() -> None:
    image = {"type": "image", "image": {"image": {"url": "x.png"}}}
    attributes = {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.contents.0.message_content.type": "text",
        "llm.input_messages.0.message.contents.0.message_content.text": "Look.",
        "llm.input_messages.0.message.contents.1.message_content.type": "image",
        "llm.input_messages.0.message.contents.1.message_content.image.image.url": "x.png",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.function_call_name": "get",
        "llm.output_messages.0.message.function_call_arguments_json": "{}",
    }
    model_call = call(attributes)
    assert model_call.prompt == [{"role": "user", "content": [{"type": "text", "text": "Look."}, image]}]
    assert model_call.answers[0]["tool_calls"] == [{"type": "function", "function": {"name": "get", "arguments": "{}"}}]


def test_items_of_one_answer_are_one_message() -> None:
    attributes = {
        "openinference.span.kind": "LLM",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "Let me look.",
        "llm.output_messages.1.message.role": "assistant",
        "llm.output_messages.1.message.tool_calls.0.tool_call.function.name": "get",
    }
    (answer,) = call(attributes).answers
    assert (answer["content"], len(answer["tool_calls"])) == ("Let me look.", 1)
    assert len(call(attributes | {"llm.invocation_parameters": '{"n": 2}'}).answers) == 2


def test_values_are_taken_where_no_messages_are_numbered() -> None:
    request = {"messages": GIVEN, "model": "m-1", "response_format": {"type": "json"}}
    response = {
        "id": "r",
        "choices": [{"message": {"role": "assistant", "content": "Sunny."}, "finish_reason": "stop"}],
    }
    span = filled(
        {"openinference.span.kind": "LLM", "input.value": json.dumps(request), "output.value": json.dumps(response)}
    )
    assert span.call is not None
    assert (span.call.prompt, span.call.answers[0]["content"]) == (GIVEN, "Sunny.")
    assert span.call.extra == {"response_id": "r"}
    assert span.attributes["input.value"] == {"response_format": {"type": "json"}}, "the prompt is not kept once more"
    assert json.loads(span.attributes["output.value"]) == response


def test_completions_of_text_are_calls_too() -> None:
    model_call = call(
        {
            "openinference.span.kind": "LLM",
            "llm.prompts.0.prompt.text": "Once upon",
            "llm.choices.0.completion.text": " a time",
        }
    )
    assert model_call.prompt == [{"role": "user", "content": "Once upon"}]
    assert model_call.answers == [{"role": "assistant", "content": " a time"}]


def test_settings_counts_and_tools_have_their_places() -> None:
    model_call = call(
        LLM
        | {
            "llm.invocation_parameters": '{"model": "m-1", "temperature": 0.5, "tools": [], "stop": null}',
            "llm.token_count.prompt": 11,
            "llm.token_count.completion": "7",
            "llm.token_count.total": 18,
            "llm.token_count.prompt_details.cache_read": 3,
            "llm.cost.total": 0.25,
            "llm.finish_reason": "stop",
            "llm.provider": "openai",
            "llm.tools.0.tool.json_schema": '{"name": "get"}',
            "llm.tools.1.tool.name": "set",
        }
    )
    assert (model_call.model, model_call.finish_reason, model_call.sampling) == ("m-1", "stop", {"temperature": 0.5})
    assert (model_call.prompt_tokens, model_call.completion_tokens, model_call.cost) == (11, 7, 0.25)
    assert model_call.extra == {"provider": "openai", "usage": {"prompt_details.cache_read": 3}}
    assert model_call.tools == [{"name": "get"}, {"name": "set"}]


def test_a_tool_has_its_name_its_input_and_its_output() -> None:
    attributes = {
        "openinference.span.kind": "TOOL",
        "tool.name": "get",
        "input.value": '{"city": "Paris"}',
        "output.value": "22C",
    }
    assert filled(attributes).tool == Tool(name="get", arguments='{"city": "Paris"}', result="22C")
    back = json.dumps({"type": "tool", "data": {"content": "22C", "tool_call_id": "c1", "status": "success"}})
    assert filled(attributes | {"output.value": back}).tool == Tool(
        name="get", call_id="c1", arguments='{"city": "Paris"}', result="22C", is_error=False
    )
    assert filled({"openinference.span.kind": "TOOL"}, name="get", error="boom").tool == Tool(
        name="get", is_named=False, result="boom", is_error=True
    )


def test_an_agent_has_a_name() -> None:
    assert filled({"openinference.span.kind": "AGENT", "agent.name": "x"}).agent == "x"
    assert filled({"openinference.span.kind": "AGENT"}, name="invoke_agent y").agent == "y"


def test_annotations_are_scores_of_the_span_the_trace_and_the_session() -> None:
    def annotation(prefix: str, name: str, score: Any) -> dict[str, Any]:
        head = f"{prefix}annotations.0.annotation."
        return {f"{head}name": name, f"{head}score": score, f"{head}label": "good", f"{head}explanation": "why"}

    attributes = (
        LLM | annotation("", "span", 0.5) | annotation("trace.", "trace", "1") | annotation("session.", "session", None)
    )
    span = filled(attributes)
    (own_score,) = span.scores
    assert (own_score.scorer, own_score.value, own_score.reason, own_score.metrics) == (
        "span",
        0.5,
        "why",
        {"label": "good"},
    )
    trace, session = otlp_openinference.pop_trace_scores(span.attributes)
    assert (trace.scorer, trace.value) == ("trace", 1)
    assert (session.value, session.metrics) == (None, {"of": "session", "label": "good"})
    assert not any("annotation" in key for key in span.attributes)
