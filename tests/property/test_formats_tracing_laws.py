"""What a tracer did not record is reported with its setting, and nothing is made up for it, in every tracing format.

A conversation of some calls is written as each format writes it, with the content of any of its spans left out. The
generator knows which; the readers have to say it.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lake.formats.base.source import Input
from lake.formats.registry import choose_format
from lake.records import Reject

Message = dict[str, Any]
FUNCTION_SCOPED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Call(NamedTuple):
    """One call of the model and the tool that runs after it, and what of them is recorded."""

    has_prompt: bool
    has_answer: bool
    has_tool: bool


CALLS = st.lists(st.builds(Call, *[st.booleans()] * 3), min_size=1, max_size=4)


def tool_name(index: int) -> str:
    return f"look_{index}"


def arguments(index: int) -> str:
    return json.dumps({"at": index})


def answer(index: int) -> Message:
    function = {"name": tool_name(index), "arguments": arguments(index)}
    calls = [{"id": f"c{index}", "type": "function", "function": function}]
    return {"role": "assistant", "content": f"Look {index}.", "tool_calls": calls}


def prompt(index: int) -> list[Message]:
    """The history before a call."""
    messages: list[Message] = [{"role": "user", "content": "Where is it?"}]
    for earlier in range(index):
        messages += [answer(earlier), {"role": "tool", "tool_call_id": f"c{earlier}", "content": f"not {earlier}"}]
    return messages


# ---------------------------------------------------------------- the formats


def time_text(second: int) -> str:
    return f"2026-01-01T00:00:{second:02}.000Z"


def write_langfuse(calls: list[Call]) -> str:
    def observation(span_id: str, kind: str, second: int, span_input: Any, output: Any) -> dict[str, Any]:
        fields = {"id": span_id, "traceId": "t", "type": kind, "name": kind.lower(), "parentObservationId": "root"}
        times = {"startTime": time_text(second), "endTime": time_text(second + 1)}
        return fields | times | {"input": span_input, "output": output, "level": "DEFAULT"}

    rows = [observation("root", "SPAN", 0, None, None) | {"parentObservationId": None}]
    for index, call in enumerate(calls):
        given_prompt, given_answer = (
            prompt(index) if call.has_prompt else None,
            answer(index) if call.has_answer else None,
        )
        rows.append(observation(f"g{index}", "GENERATION", 4 * index, given_prompt, given_answer))
        span_input, output = (json.loads(arguments(index)), f"not {index}") if call.has_tool else (None, None)
        rows.append(observation(f"t{index}", "TOOL", 4 * index + 2, span_input, output))
    trace = {"id": "t", "name": "agent", "timestamp": time_text(0)}
    return json.dumps({"trace": trace, "observations": rows})


def write_openai_agents(calls: list[Call]) -> str:
    lines: list[Any] = [{"object": "trace", "id": "trace_1", "workflow_name": "search"}]

    def add(span_id: str, second: int, span_data: dict[str, Any]) -> None:
        times = {"started_at": time_text(second), "ended_at": time_text(second + 1)}
        span = {"object": "trace.span", "id": span_id, "trace_id": "trace_1", "parent_id": None, "error": None}
        lines.append(span | times | {"span_data": span_data})

    for index, call in enumerate(calls):
        content = {"input": prompt(index) if call.has_prompt else None}
        content["output"] = [answer(index)] if call.has_answer else None
        add(f"g{index}", 4 * index, {"type": "generation", "model": "m"} | content)
        content = {"input": arguments(index), "output": f"not {index}"} if call.has_tool else {}
        add(f"t{index}", 4 * index + 2, {"type": "function", "name": tool_name(index)} | content)
    return "\n".join(map(json.dumps, lines))


def write_otlp(make_call: Callable[[int, Call], Message], make_tool: Callable[[int, Call], Message]) -> Any:
    def write(calls: list[Call]) -> str:
        spans: list[Any] = []

        def add(second: int, attributes: Message) -> None:
            fields = {"traceId": f"{1:032x}", "spanId": f"{len(spans) + 1:016x}", "name": "span"}
            times = {"startTimeUnixNano": 1_800_000_000_000_000_000 + second * 10**9}
            times["endTimeUnixNano"] = times["startTimeUnixNano"] + 10**9
            pairs = [{"key": key, "value": {"stringValue": text}} for key, text in attributes.items()]
            spans.append(fields | times | {"attributes": pairs})

        for index, call in enumerate(calls):
            add(4 * index, make_call(index, call))
            add(4 * index + 2, make_tool(index, call))
        return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})

    return write


def genai_call(index: int, call: Call) -> Message:
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    # A tracer without content writes the roles, or nothing.
    empty = json.dumps([{"role": "user", "parts": [{"type": "text"}]}])
    attributes["gen_ai.input.messages"] = json.dumps(prompt(index)) if call.has_prompt else empty
    return attributes | ({"gen_ai.output.messages": json.dumps([answer(index)])} if call.has_answer else {})


def genai_tool(index: int, call: Call) -> Message:
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool_name(index)}
    content = {"gen_ai.tool.call.arguments": arguments(index), "gen_ai.tool.call.result": f"not {index}"}
    return attributes | (content if call.has_tool else {})


def openinference_call(index: int, call: Call) -> Message:
    hidden = "__REDACTED__"
    content = {"input.value": json.dumps({"messages": prompt(index)}) if call.has_prompt else hidden}
    content["output.value"] = json.dumps({"choices": [{"message": answer(index)}]}) if call.has_answer else hidden
    return {"openinference.span.kind": "LLM", "llm.model_name": "m"} | content


def openinference_tool(index: int, call: Call) -> Message:
    content = (arguments(index), f"not {index}") if call.has_tool else ("__REDACTED__", "__REDACTED__")
    return {"openinference.span.kind": "TOOL", "input.value": content[0], "output.value": content[1]}


def vercel_call(index: int, call: Call) -> Message:
    attributes = {"ai.operationId": "ai.generateText.doGenerate", "ai.model.id": "m"}
    calls = [{"toolCallId": f"c{index}", "toolName": tool_name(index), "input": arguments(index)}]
    content = {"ai.response.text": f"Look {index}.", "ai.response.toolCalls": json.dumps(calls)}
    attributes |= {"ai.prompt.messages": json.dumps(prompt(index))} if call.has_prompt else {}
    return attributes | (content if call.has_answer else {})


def vercel_tool(index: int, call: Call) -> Message:
    content = {"ai.toolCall.args": arguments(index), "ai.toolCall.result": f"not {index}"} if call.has_tool else {}
    return {"ai.operationId": "ai.toolCall", "ai.toolCall.name": tool_name(index)} | content


def write_agent_lightning(calls: list[Call]) -> str:
    lines: list[Any] = []

    def add(name: str, attributes: Message) -> None:
        ids = {"rollout_id": "r", "attempt_id": "a", "trace_id": "t", "span_id": f"s{len(lines)}", "parent_id": None}
        lines.append(ids | {"sequence_id": len(lines), "name": name, "attributes": attributes})

    def number(prefix: str, messages: list[Message]) -> Message:
        attributes: Message = {}
        for index, message in enumerate(messages):
            attributes |= {f"{prefix}.{index}.{key}": message[key] for key in ("role", "content")}
            for call_index, call in enumerate(message.get("tool_calls", ())):
                start = f"{prefix}.{index}.tool_calls.{call_index}"
                attributes |= {f"{start}.{key}": text for key, text in (call["function"] | {"id": call["id"]}).items()}
        return attributes

    for index, call in enumerate(calls):
        attributes = {"gen_ai.request.model": "m"}
        attributes |= number("gen_ai.prompt", prompt(index)) if call.has_prompt else {}
        add(
            "openai.chat.completion",
            attributes | (number("gen_ai.completion", [answer(index)]) if call.has_answer else {}),
        )
        content = {"tool.parameters": arguments(index), "tool.result": f"not {index}"} if call.has_tool else {}
        add("tool", {"agentops.span.kind": "tool", "tool.name": tool_name(index)} | content)
    return "\n".join(map(json.dumps, lines))


def write_langsmith(calls: list[Call]) -> str:
    lines: list[Any] = []

    def add(run_type: str, second: int, inputs: Any, outputs: Any) -> None:
        ids = {"id": f"r{len(lines)}", "trace_id": "t", "parent_run_id": None, "name": run_type, "run_type": run_type}
        times = {"start_time": time_text(second), "end_time": time_text(second + 1), "dotted_order": str(second)}
        lines.append(ids | times | {"inputs": inputs, "outputs": outputs, "feedback_stats": None})

    for index, call in enumerate(calls):
        inputs = {"messages": prompt(index)} if call.has_prompt else {}
        add("llm", 4 * index, inputs, {"messages": [answer(index)]} if call.has_answer else {})
        content = (json.loads(arguments(index)), {"output": f"not {index}"}) if call.has_tool else ({}, {})
        add("tool", 4 * index + 2, *content)
    return "\n".join(map(json.dumps, lines))


def write_mlflow(calls: list[Call]) -> str:
    spans: list[Any] = []

    def add(kind: str, second: int, inputs: Any, outputs: Any) -> None:
        start = 1_800_000_000_000_000_000 + second * 10**9
        attributes = {"mlflow.spanType": kind, "mlflow.spanInputs": inputs, "mlflow.spanOutputs": outputs}
        texts = {key: json.dumps(field) for key, field in attributes.items() if field is not None}
        times = {"start_time_unix_nano": start, "end_time_unix_nano": start + 10**9}
        ids = {"span_id": f"{len(spans):016x}", "parent_span_id": None, "name": kind.lower()}
        spans.append(ids | times | {"status": {"code": "STATUS_CODE_OK"}, "attributes": texts})

    for index, call in enumerate(calls):
        request = {"messages": prompt(index)} if call.has_prompt else None
        response = {"choices": [{"message": answer(index)}]} if call.has_answer else None
        add("CHAT_MODEL", 4 * index, request, response)
        content = (json.loads(arguments(index)), f"not {index}") if call.has_tool else (None, None)
        add("TOOL", 4 * index + 2, *content)
    return json.dumps({"info": {"trace_id": "tr-1"}, "data": {"spans": spans}})


FORMATS: dict[str, tuple[Callable[[list[Call]], str], str, bool]] = {
    "langfuse": (write_langfuse, "LANGFUSE_OBSERVE_DECORATOR_IO_CAPTURE_ENABLED", False),
    "openai_agents": (write_openai_agents, "trace_include_sensitive_data", True),
    "genai": (write_otlp(genai_call, genai_tool), "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", True),
    "openinference": (write_otlp(openinference_call, openinference_tool), "OPENINFERENCE_HIDE_INPUTS", False),
    "vercel": (write_otlp(vercel_call, vercel_tool), "recordInputs", True),
    "langsmith": (write_langsmith, "LANGSMITH_HIDE_INPUTS", False),
    "mlflow": (write_mlflow, "autolog", False),
    "agent_lightning": (write_agent_lightning, "turn_off_message_logging", True),
}
"""Each format with the setting that its report names, and whether its spans of tools say which tool it was."""


@pytest.mark.parametrize("name", FORMATS)
@given(calls=CALLS)
@FUNCTION_SCOPED
def test_what_is_not_recorded_is_counted_and_nothing_is_made_up_for_it(
    tmp_path: Path, name: str, calls: list[Call]
) -> None:
    write, setting, names_tools = FORMATS[name]
    path = tmp_path / "trace.json"
    path.write_text(write(calls), "utf-8")
    file = Input(path, "run")
    items = list(choose_format(path).reader(file))
    assert all(note.kind == "unrecorded" and setting in note.subject for note in file.notes)
    expected = {
        "prompt": sum(not call.has_prompt for call in calls),
        "answer": sum(not call.has_answer for call in calls),
        "tool span": sum(not call.has_tool for call in calls),
    }
    assert Counter({note.name: number for note, number in file.notes.items()}) == Counter(expected)
    (item,) = items
    is_empty = not any(call.has_prompt or call.has_answer or (call.has_tool and names_tools) for call in calls)
    assert isinstance(item, Reject) == is_empty
    if isinstance(item, Reject):
        assert setting in item.message
        return
    for index, (call, step) in enumerate(zip(calls, item[1].steps, strict=True)):
        functions = [tool_call["function"] for tool_call in step.tool_calls or ()]
        decoded = [(f["name"], json.loads(f["arguments"])) for f in functions if f["arguments"] is not None]
        assert len(decoded) == len(functions), "a call without arguments is made up"
        is_known = call.has_answer or (call.has_tool and names_tools)
        assert decoded == ([(tool_name(index), {"at": index})] if is_known else [])
        assert (step.action, step.trainable) == ((f"Look {index}.", True) if call.has_answer else ("", False))
        if call.has_prompt:
            assert step.state == (f"not {index - 1}" if index else "Where is it?")
        else:
            assert step.state in (None, f"not {index - 1}" if index and calls[index - 1].has_tool else None)
