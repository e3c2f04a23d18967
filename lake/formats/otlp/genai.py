"""Attributes of OpenTelemetry's GenAI conventions, old and new, and of what came before them.

.. code-block:: text

    operation    gen_ai.operation.name: chat, generate_content, text_completion are calls; invoke_agent an agent;
                 execute_tool a tool. Before it: llm.request.type, traceloop.span.kind; pydantic-ai's agent_name
    messages     gen_ai.input.messages, gen_ai.output.messages, gen_ai.system_instructions: JSON text or structured, on
                 the span or on its event gen_ai.client.inference.operation.details
                 gen_ai.prompt.N.{role,content,tool_calls.M.*}, gen_ai.completion.N.{...}          (until about 2025)
                 gen_ai.prompt, gen_ai.completion as JSON text, also on events gen_ai.content.*
                 events gen_ai.{system,user,assistant,tool}.message and gen_ai.choice: span events, log records, or
                 JSON text in the attribute `events`
                 request_data, response_data of logfire
                 llm.prompts.N.*, llm.completions.N.* (2023); gcp.vertex.agent.llm_request, .llm_response of ADK;
                 mlflow.spanInputs, mlflow.spanOutputs, with mlflow.spanType
    settings     gen_ai.request.*; tools: gen_ai.tool.definitions, llm.request.functions.N.*, model_request_parameters
    outcome      gen_ai.response.{model,id,finish_reasons}, gen_ai.usage.*, operation.cost
    tools        gen_ai.tool.{name,call.id,call.arguments,call.result}; before: tool_arguments, tool_response,
                 traceloop.entity.{name,input,output}; gcp.vertex.agent.{tool_call_args,tool_response}
    judgement    event gen_ai.evaluation.result {gen_ai.evaluation.{name,score.value,score.label,explanation}}

Source: semantic-conventions-genai, and spans of the instrumentations that tests/golden/formats/make_otlp.py names.
"""

from typing import Any

from lake.formats.base.fields import number
from lake.formats.otlp.genai_messages import Event, messages_in, speaks
from lake.formats.tracing.attributes import count_of, first, flattened, name_in, numeric
from lake.formats.tracing.payloads import choices, decoded
from lake.formats.tracing.shapes import result, text
from lake.formats.tracing.tree import Call, Score, Span, Tool

_CALLS = frozenset(("chat", "generate_content", "text_completion", "completion", "message", "responses"))
_OPERATIONS = {"invoke_agent": "agent", "execute_tool": "tool"}
_MIRRORS = ("pydantic_ai.all_messages", "all_messages_events")
"""Of an agent's span: the messages of its calls once more, like those that the conventions put there."""
_AGENT_MIRRORS = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions")
_TWICE = (
    ("gen_ai.task.input", "traceloop.entity.input"),
    ("gen_ai.task.output", "traceloop.entity.output"),
    ("gen_ai.tool.call.arguments", "traceloop.entity.input"),
    ("gen_ai.tool.call.result", "traceloop.entity.output"),
)
"""What instrumentations that are changing over say under both names."""
_PROMPT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens")
_COMPLETION_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens")
_ARGUMENTS = (
    "gen_ai.tool.call.arguments",
    "tool_arguments",
    "traceloop.entity.input",
    "gcp.vertex.agent.tool_call_args",
    "mlflow.spanInputs",
    "input.value",
)
_RESULTS = (
    "gen_ai.tool.call.result",
    "tool_response",
    "traceloop.entity.output",
    "gcp.vertex.agent.tool_response",
    "mlflow.spanOutputs",
    "output.value",
)
_OF_MLFLOW = {"CHAT_MODEL": "llm", "LLM": "llm", "TOOL": "tool", "AGENT": "agent"}
_COSTS = ("operation.cost", "gen_ai.usage.cost")
_COUNTED = frozenset((*_PROMPT_TOKENS, *_COMPLETION_TOKENS, *_COSTS))
_NO_SETTING = frozenset(("model", "stream", "is_stream", "choice.count"))
_EVALUATION = "gen_ai.evaluation."


def fill(span: Span, events: list[Event]) -> bool:
    """Say what a span is by its attributes; False if they are of other conventions.

    What becomes messages is taken out of the attributes and the events.
    """
    kind = kind_of(span.attributes)
    if kind is None:
        return False
    span.kind = kind
    span.agent = name_in(span.attributes, "gen_ai.agent.name", "agent_name")
    if kind == "llm":
        span.call = call_of(span.attributes, events)
    elif kind == "tool":
        span.tool = tool_of(span)
    elif kind == "agent":
        entity = name_in(span.attributes, "traceloop.entity.name")
        span.agent = span.agent or entity or span.name.removeprefix("invoke_agent ")
    for key in _MIRRORS if kind != "agent" else (*_MIRRORS, *_AGENT_MIRRORS):
        span.attributes.pop(key, None)
    for key, older in _TWICE:
        if older in span.attributes and span.attributes.get(key) == span.attributes[older]:
            del span.attributes[older]
    return True


def kind_of(said: dict[str, Any]) -> str | None:
    """llm, tool, agent, or another operation; None if no attribute says it."""
    operation = name_in(said, "gen_ai.operation.name", "llm.request.type")
    entity = name_in(said, "traceloop.span.kind")
    if operation is not None:
        unknown = "llm" if "gen_ai.output.messages" in said else operation
        return "llm" if operation in _CALLS else _OPERATIONS.get(operation, unknown)
    if entity in ("agent", "tool") or "gen_ai.tool.name" in said:
        return "agent" if entity == "agent" else "tool"
    if (typed := name_in(said, "mlflow.spanType")) is not None:
        return _OF_MLFLOW.get(typed.strip('"'), typed.strip('"').lower())
    if any(key in said for key in ("gen_ai.request.model", "gen_ai.system", "request_data")) and speaks(said):
        return "llm"
    if "agent_name" in said or ("gen_ai.agent.name" in said and "gen_ai.request.model" not in said):
        return "agent"
    return entity


def call_of(said: dict[str, Any], events: list[Event]) -> Call:
    """The call that attributes and events tell of; what becomes messages is taken out of both."""
    given, answered = messages_in(said, events)
    reasons = decoded(said.get("gen_ai.response.finish_reasons"))
    reason = reasons[0] if isinstance(reasons, list) and reasons else reasons
    requested = name_in(said, "gen_ai.request.model", "llm.request.model")
    model = name_in(said, "gen_ai.response.model", "llm.response.model") or requested
    settings = {k.removeprefix("gen_ai.request."): v for k, v in said.items() if k.startswith("gen_ai.request.")}
    usage = {k: count_of(v) for k, v in said.items() if k.startswith("gen_ai.usage.") and k not in _COUNTED}
    more = {
        "response_id": name_in(said, "gen_ai.response.id"),
        "provider": name_in(said, "gen_ai.provider.name", "gen_ai.system"),
        "request_model": None if requested == model else requested,
        "usage": {k.removeprefix("gen_ai.usage."): count for k, count in usage.items() if count is not None},
        "payload": given.rest | answered.rest,
    }
    return Call(
        prompt=given.messages or None,
        answers=choices(answered.messages, count_of(said.get("gen_ai.request.choice.count"))),
        tools=tools_of(said) or given.tools,
        sampling={key: value for key, value in settings.items() if key not in _NO_SETTING},
        model=model,
        finish_reason=reason if isinstance(reason, str) else None,
        prompt_tokens=count_of(first(said, *_PROMPT_TOKENS)),
        completion_tokens=count_of(first(said, *_COMPLETION_TOKENS)),
        cost=number(numeric(first(said, *_COSTS))),
        extra={key: value for key, value in more.items() if value},
    )


def tools_of(said: dict[str, Any]) -> list[Any]:
    """The tools that were offered; taken out."""
    tools = decoded(said.pop("gen_ai.tool.definitions", None))
    settings = decoded(said.get("model_request_parameters"))
    if not isinstance(tools, list) and isinstance(settings, dict):
        tools = [tool for key in ("function_tools", "output_tools") for tool in settings.get(key) or ()]
    if isinstance(settings, dict):
        left = {key: value for key, value in settings.items() if key not in ("function_tools", "output_tools")}
        said["model_request_parameters"] = left
    if isinstance(tools, list):
        return [decoded(tool) for tool in tools]
    functions = [function for function in flattened(said, "llm.request.functions") if isinstance(function, dict)]
    return [{key: decoded(value) for key, value in function.items()} for function in functions]


def tool_of(span: Span) -> Tool:
    """The execution of a tool that a span is."""
    said = span.attributes
    arguments = first(said, *_ARGUMENTS)
    given = decoded(arguments)
    if isinstance(given, dict) and isinstance(given.get("inputs"), dict):
        arguments = given["inputs"]
    back = first(said, *_RESULTS)
    content, call_id, is_error = result(decoded(back))
    return Tool(
        name=name_in(said, "gen_ai.tool.name", "tool.name", "traceloop.entity.name") or span.name,
        call_id=name_in(said, "gen_ai.tool.call.id", "tool_call.id", "ai.toolCall.id") or call_id,
        arguments=arguments,
        result=span.error if back is None else text(back) if call_id is None else content,
        is_error=True if span.error else is_error,
    )


def evaluations(events: list[Event]) -> list[Score]:
    """The judgements among events."""
    found = []
    for event in events:
        said = {k.removeprefix(_EVALUATION): v for k, v in event["attributes"].items()}
        if event["name"] == "gen_ai.evaluation.result" and isinstance(said.get("name"), str):
            score = Score(
                scorer=said["name"],
                value=numeric(said.get("score.value")),
                reason=said.get("explanation"),
                error=said.get("error.type"),
            )
            score.metrics = {
                k: v for k, v in said.items() if k not in ("name", "score.value", "explanation", "error.type")
            }
            found.append(score)
    return found
