"""GenAI conventions: what spans are, and where their messages stand; and those of the Vercel AI SDK."""

import json
from typing import Any

import pytest

from lake.formats.otlp import conventions as otlp_genai
from lake.formats.otlp import conventions as otlp_vercel
from lake.formats.otlp.conventions import build_evaluations
from lake.formats.tracing.episodes import ModelCall, Span, Tool
from lake.formats.tracing.payloads import pop_indexed

USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Paris"}'}}
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m-1"}


def event(name: str, **attributes: Any) -> dict[str, Any]:
    return {"name": name, "time": None, "attributes": attributes}


def filled(attributes: dict[str, Any], *events: dict[str, Any], name: str = "n", error: str | None = None) -> Span:
    """A span with all facts of its attributes."""
    span = Span(id="a", name=name, attributes=dict(attributes), error=error)
    events_left = list(events)
    assert otlp_genai.fill_genai_span(span, events_left)
    assert all(e["name"].startswith("other") for e in events_left), "what became messages is taken out"
    return span


def call(attributes: dict[str, Any], *events: dict[str, Any]) -> ModelCall:
    model_call = filled(CHAT | attributes, *events).call
    assert model_call is not None
    return model_call


# ---------------------------------------------------------------- what a span is


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        ({"gen_ai.operation.name": "chat"}, "llm"),
        ({"gen_ai.operation.name": "generate_content"}, "llm"),
        ({"gen_ai.operation.name": "text_completion"}, "llm"),
        ({"gen_ai.operation.name": "my_call", "gen_ai.output.messages": "[]"}, "llm"),
        ({"llm.request.type": "chat"}, "llm"),
        ({"gen_ai.system": "x", "gen_ai.prompt.0.content": "hi"}, "llm"),
        ({"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "e"}, "embeddings"),
        ({"llm.request.type": "embedding"}, "embedding"),
        ({"llm.request.type": "rerank"}, "rerank"),
        ({"gen_ai.operation.name": "invoke_agent"}, "agent"),
        ({"gen_ai.operation.name": "invoke_workflow"}, "invoke_workflow"),
        ({"traceloop.span.kind": "agent"}, "agent"),
        ({"traceloop.span.kind": "workflow"}, "workflow"),
        ({"agent_name": "joker", "model_name": "m"}, "agent"),
        ({"gen_ai.agent.name": "joker"}, "agent"),
        ({"gen_ai.operation.name": "execute_tool"}, "tool"),
        ({"traceloop.span.kind": "tool"}, "tool"),
        ({"gen_ai.system": "gcp.vertex.agent", "gcp.vertex.agent.llm_request": "{}"}, "llm"),
        ({"mlflow.spanType": '"CHAT_MODEL"'}, "llm"),
        ({"mlflow.spanType": '"CHAIN"'}, "chain"),
        ({"gen_ai.tool.name": "get", "gen_ai.agent.name": "joker"}, "tool"),
        ({"http.method": "GET"}, None),
        ({"gen_ai.system": "x", "gen_ai.request.model": "m"}, None),
    ],
)
def test_attributes_say_what_a_span_is(attributes: dict[str, Any], kind: str | None) -> None:
    assert otlp_genai.get_genai_kind(attributes) == kind


def test_an_agent_has_a_name_and_does_not_repeat_the_messages_of_its_calls() -> None:
    span = filled(
        {"gen_ai.operation.name": "invoke_agent", "pydantic_ai.all_messages": "[]", "x": 1}, name="invoke_agent joker"
    )
    assert (span.agent, span.attributes) == ("joker", {"gen_ai.operation.name": "invoke_agent", "x": 1})
    assert filled({"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "critic"}).agent == "critic"


# ---------------------------------------------------------------- where messages stand

PARTS = {
    "gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": "Weather?"}]}],
    "gen_ai.output.messages": [
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "Hm."},
                {"type": "text", "content": "Let me look."},
                {"type": "tool_call", "id": "c1", "name": "get", "arguments": '{"city": "Paris"}'},
            ],
            "finish_reason": "tool_call",
        }
    ],
    "gen_ai.system_instructions": [{"type": "text", "content": "Be kind."}],
}
NUMBERED = {
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Be kind.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "Weather?",
    "gen_ai.completion.0.role": "thinking",
    "gen_ai.completion.0.content": "Hm.",
    "gen_ai.completion.1.role": "assistant",
    "gen_ai.completion.1.content": "Let me look.",
    "gen_ai.completion.1.finish_reason": "tool_call",
    "gen_ai.completion.1.tool_calls.0.id": "c1",
    "gen_ai.completion.1.tool_calls.0.name": "get",
    "gen_ai.completion.1.tool_calls.0.arguments": '{"city": "Paris"}',
}
GIVEN = [{"role": "system", "content": "Be kind."}, USER]
ANSWER = {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
PLACES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "json text": ({key: json.dumps(value) for key, value in PARTS.items()}, []),
    "structured": (PARTS, []),
    "on an event": ({}, [event("gen_ai.client.inference.operation.details", **PARTS)]),
    "numbered": (NUMBERED, []),
    "json text of chat messages": ({"gen_ai.prompt": json.dumps(GIVEN), "gen_ai.completion": json.dumps([ANSWER])}, []),
    "content events": (
        {},
        [
            event("gen_ai.content.prompt", **{"gen_ai.prompt": json.dumps(GIVEN)}),
            event("gen_ai.content.completion", **{"gen_ai.completion": json.dumps([ANSWER])}),
        ],
    ),
    "an event whose content is all of it": (
        {},
        [
            event("gen_ai.system.message", **{"gen_ai.event.content": "Be kind."}),
            event("gen_ai.user.message", **{"gen_ai.event.content": json.dumps(USER)}),
            event(
                "gen_ai.choice",
                **{"gen_ai.event.content": json.dumps({"message": ANSWER, "finish_reason": "tool_call"})},
            ),
        ],
    ),
    "numbered in 2023": (
        {
            key.replace("gen_ai.prompt", "llm.prompts").replace("gen_ai.completion", "llm.completions"): value
            for key, value in NUMBERED.items()
        },
        [],
    ),
    "a request and a response of ADK": (
        {
            "gcp.vertex.agent.llm_request": json.dumps(
                {
                    "config": {"system_instruction": "Be kind."},
                    "contents": [{"role": "user", "parts": [{"text": "Weather?"}]}],
                }
            ),
            "gcp.vertex.agent.llm_response": json.dumps(
                {"content": ANSWER, "partial": False, "finish_reason": "tool_call"}
            ),
        },
        [],
    ),
    "inputs and outputs of MLflow": (
        {
            "mlflow.spanInputs": json.dumps({"messages": GIVEN}),
            "mlflow.spanOutputs": json.dumps({"choices": [{"message": ANSWER, "finish_reason": "tool_call"}]}),
        },
        [],
    ),
    "an event a message": (
        {},
        [
            event("gen_ai.system.message", content="Be kind.", **{"gen_ai.system": "openai"}),
            event("gen_ai.user.message", content="Weather?"),
            event("gen_ai.choice", index=0, finish_reason="tool_call", message=ANSWER),
        ],
    ),
    "events as an attribute": (
        {
            "events": json.dumps(
                [
                    {"event.name": "gen_ai.system.message", "content": "Be kind.", "role": "system"},
                    {"event.name": "gen_ai.user.message", "content": "Weather?", "gen_ai.message.index": 0},
                    {"event.name": "gen_ai.choice", "index": 0, "message": ANSWER, "finish_reason": "tool_call"},
                ]
            )
        },
        [],
    ),
    "request and response": (
        {
            "request_data": json.dumps({"messages": GIVEN, "model": "m-1"}),
            "response_data": json.dumps({"message": ANSWER, "usage": {"total_tokens": 3}}),
        },
        [],
    ),
}


@pytest.mark.parametrize("attribute", PLACES)
def test_messages_are_found_wherever_they_stand(attribute: str) -> None:
    attributes, events = PLACES[attribute]
    model_call = call(attributes, event("other"), *events)
    assert model_call.prompt == GIVEN
    (answer,) = model_call.answers
    assert {key: answer[key] for key in ANSWER} == ANSWER
    text = json.dumps([filled(CHAT | attributes, *events).attributes])
    assert "Weather?" not in text
    assert "Be kind" not in text


def test_events_of_blocks_are_messages_of_blocks() -> None:
    blocks = json.dumps([{"toolResult": {"toolUseId": "c1", "status": "success", "content": [{"text": "22C"}]}}])
    model_call = call(
        {},
        event("gen_ai.user.message", content=json.dumps([{"text": "Weather?"}])),
        event(
            "gen_ai.assistant.message",
            content=json.dumps([{"toolUse": {"toolUseId": "c1", "name": "get", "input": {}}}]),
        ),
        event("gen_ai.tool.message", content=blocks, role="tool", id="c1"),
        event("gen_ai.choice", message=json.dumps([{"text": "Sunny."}]), finish_reason="end_turn"),
    )
    assert model_call.prompt is not None
    assert [message["role"] for message in model_call.prompt] == ["user", "assistant", "tool"]
    assert (model_call.prompt[0]["content"], model_call.prompt[2]["content"]) == ("Weather?", "22C")
    assert (model_call.answers[0]["content"], model_call.answers[0]["finish_reason"]) == ("Sunny.", "end_turn")


def test_text_of_a_user_that_looks_like_json_stays_text() -> None:
    model_call = call(
        {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": '[{"a": 1}]', "gen_ai.completion.0.content": "x"}
    )
    assert model_call.prompt == [{"role": "user", "content": '[{"a": 1}]'}]


def test_numbers_above_nine_are_in_order() -> None:
    model_call = call({f"gen_ai.prompt.{n}.content": str(n) for n in range(12)} | {"gen_ai.completion.0.content": "x"})
    assert model_call.prompt is not None
    assert [message["content"] for message in model_call.prompt] == [str(n) for n in range(12)]


def test_instructions_that_the_messages_have_too_are_not_said_twice() -> None:
    prompt = [{"role": "system", "parts": [{"type": "text", "content": "Be kind."}]}, USER]
    model_call = call({"gen_ai.system_instructions": "Be kind.", "gen_ai.input.messages": prompt})
    assert model_call.prompt == GIVEN


# ---------------------------------------------------------------- settings and outcome


def test_settings_counts_and_names_have_their_places() -> None:
    model_call = call(
        {
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.max_tokens": 9,
            "gen_ai.response.model": "m-1-2026",
            "gen_ai.response.id": "r",
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.provider.name": "p",
            "gen_ai.usage.input_tokens": "11",
            "gen_ai.usage.output_tokens": 7,
            "gen_ai.usage.cache_read.input_tokens": 3,
            "operation.cost": "0.25",
        }
        | PARTS
    )
    assert (model_call.model, model_call.finish_reason, model_call.sampling) == (
        "m-1-2026",
        "stop",
        {"temperature": 0.5, "max_tokens": 9},
    )
    assert (model_call.prompt_tokens, model_call.completion_tokens, model_call.cost) == (11, 7, 0.25)
    assert model_call.extra == {
        "response_id": "r",
        "provider": "p",
        "request_model": "m-1",
        "usage": {"cache_read.input_tokens": 3},
    }


def test_several_choices_are_several_answers() -> None:
    answers = [{"role": "assistant", "parts": [{"type": "text", "content": t}]} for t in "ab"]
    model_call = call({"gen_ai.output.messages": answers, "gen_ai.request.choice.count": 2})
    assert [message["content"] for message in model_call.answers] == ["a", "b"]
    assert len(call({"gen_ai.output.messages": answers}).answers) == 1


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({"gen_ai.tool.definitions": '[{"name": "get"}]'}, ["get"]),
        ({"gen_ai.tool.definitions": [{"name": "get"}]}, ["get"]),
        ({"llm.request.functions.0.name": "get", "llm.request.functions.0.parameters": '{"type": "object"}'}, ["get"]),
        (
            {"model_request_parameters": {"function_tools": [{"name": "a"}], "output_tools": [{"name": "b"}]}},
            ["a", "b"],
        ),
    ],
)
def test_tools_that_were_offered_are_found(attributes: dict[str, Any], names: list[str]) -> None:
    model_call = call(attributes | PARTS)
    assert [tool["name"] for tool in model_call.tools] == names
    assert model_call.tools[0].get("parameters", {}) in ({}, {"type": "object"})


# ---------------------------------------------------------------- tools and judgements


@pytest.mark.parametrize(
    "attributes",
    [
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "get",
            "gen_ai.tool.call.id": "c1",
            "gen_ai.tool.call.arguments": '{"city":"Paris"}',
            "gen_ai.tool.call.result": "22C",
        },
        {
            "gen_ai.tool.name": "get",
            "gen_ai.tool.call.id": "c1",
            "tool_arguments": '{"city":"Paris"}',
            "tool_response": "22C",
        },
        {
            "traceloop.span.kind": "tool",
            "traceloop.entity.name": "get",
            "traceloop.entity.input": '{"city":"Paris"}',
            "traceloop.entity.output": json.dumps(
                {"output": {"id": ["ToolMessage"], "kwargs": {"content": "22C", "type": "tool", "tool_call_id": "c1"}}}
            ),
        },
    ],
)
def test_a_tool_is_the_same_under_every_convention(attributes: dict[str, Any]) -> None:
    assert filled(attributes).tool == Tool(name="get", call_id="c1", arguments='{"city":"Paris"}', result="22C")


def test_a_tool_that_failed_gave_back_its_error() -> None:
    tool = filled({"gen_ai.tool.name": "get"}, error="no such city").tool
    assert tool == Tool(name="get", result="no such city", is_error=True)


def test_evaluation_events_are_scores() -> None:
    attributes = {
        "gen_ai.evaluation.name": "Relevance",
        "gen_ai.evaluation.score.value": 0.75,
        "gen_ai.evaluation.score.label": "good",
        "gen_ai.evaluation.explanation": "mostly",
        "gen_ai.response.id": "r",
    }
    (score,) = build_evaluations([event("gen_ai.evaluation.result", **attributes), event("gen_ai.evaluation.result")])
    assert (score.scorer, score.value, score.reason) == ("Relevance", 0.75, "mostly")
    assert score.metrics == {"score.label": "good", "gen_ai.response.id": "r"}
    (failed,) = build_evaluations(
        [event("gen_ai.evaluation.result", **{"gen_ai.evaluation.name": "x", "error.type": "timeout"})]
    )
    assert (failed.value, failed.error) == (None, "timeout")


def test_numbered_attributes_and_nested_ones_are_the_same() -> None:
    flat = {"p.0.a.b": 1, "p.0.c.0.d": 2, "p.1.a": {"x.y": 3}, "q": 4}
    nested = {"p": [{"a": {"b": 1}, "c": [{"d": 2}]}, {"a": {"x": {"y": 3}}}], "q": 4}
    assert (
        pop_indexed(flat, "p") == pop_indexed(nested, "p") == [{"a": {"b": 1}, "c": [{"d": 2}]}, {"a": {"x": {"y": 3}}}]
    )
    assert flat == nested == {"q": 4}


# ---------------------------------------------------------------- the Vercel AI SDK


def test_a_call_of_the_vercel_sdk_is_the_step_inside_and_not_the_whole() -> None:
    span = Span(
        id="a",
        attributes={
            "ai.operationId": "ai.generateText.doGenerate",
            "ai.prompt.messages": json.dumps([{"role": "user", "content": [{"type": "text", "text": "Weather?"}]}]),
            "ai.prompt.tools": ['{"name": "get"}'],
            "ai.response.text": "Let me look.",
            "ai.response.toolCalls": json.dumps([{"toolCallId": "c1", "toolName": "get", "input": {"city": "Paris"}}]),
            "ai.response.finishReason": "tool-calls",
            "ai.model.id": "m-1",
            "ai.usage.promptTokens": 11,
            "ai.usage.completionTokens": 7,
            "gen_ai.request.temperature": 0.5,
        },
    )
    assert otlp_vercel.fill_vercel_span(span, [])
    model_call = span.call
    assert model_call is not None
    assert model_call.prompt == [USER]
    assert model_call.answers[0]["content"] == "Let me look."
    assert model_call.answers[0]["tool_calls"] == [CALL | {"function": {"name": "get", "arguments": {"city": "Paris"}}}]
    assert (model_call.tools, model_call.model, model_call.finish_reason) == ([{"name": "get"}], "m-1", "tool-calls")
    assert (model_call.prompt_tokens, model_call.completion_tokens, model_call.sampling) == (
        11,
        7,
        {"temperature": 0.5},
    )
    outer = Span(id="b", attributes={"ai.operationId": "ai.generateText", "ai.prompt": "{}"})
    assert otlp_vercel.fill_vercel_span(outer, [])
    assert (outer.kind, outer.call) == ("ai.generateText", None)


def test_a_tool_of_the_vercel_sdk_is_a_tool() -> None:
    attributes = {
        "ai.operationId": "ai.toolCall",
        "ai.toolCall.name": "get",
        "ai.toolCall.id": "c1",
        "ai.toolCall.result": '"22C"',
    }
    span = Span(id="a", attributes=attributes)
    assert otlp_vercel.fill_vercel_span(span, [])
    assert span.tool == Tool(name="get", call_id="c1", result='"22C"')
    assert not otlp_vercel.fill_vercel_span(Span(id="c", attributes=dict(CHAT)), [])


def test_what_is_said_under_an_old_and_a_new_name_is_kept_once() -> None:
    span = filled({"gen_ai.operation.name": "execute_task", "gen_ai.task.input": "x", "traceloop.entity.input": "x"})
    assert span.attributes == {"gen_ai.operation.name": "execute_task", "gen_ai.task.input": "x"}
