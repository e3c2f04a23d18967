"""Spans of OpenTelemetry under the conventions for calls of models: GenAI, OpenInference, and the Vercel AI SDK.

GenAI conventions, old and new, and their predecessors:

.. code-block:: text

    operation    gen_ai.operation.name: chat, generate_content, text_completion are calls; invoke_agent an agent;
                 execute_tool a tool. Before it: llm.request.type, traceloop.span.kind; pydantic-ai's agent_name
    messages     gen_ai.input.messages, gen_ai.output.messages, gen_ai.system_instructions: JSON text or structured, on
                 the span or on its event gen_ai.client.inference.operation.details
                 gen_ai.prompt.N.{role,content,tool_calls.M.*}, gen_ai.completion.N.{...}          (until about 2025)
                 gen_ai.prompt, gen_ai.completion as JSON text, also on events gen_ai.content.*
                 events gen_ai.{system,user,assistant,tool}.message and gen_ai.choice: span events, log records, or
                 JSON text in the attribute `events`; and the pairs of attributes in `_PAIRS`
    settings     gen_ai.request.*; tools: gen_ai.tool.definitions, llm.request.functions.N.*, model_request_parameters
    outcome      gen_ai.response.{model,id,finish_reasons}, gen_ai.usage.*, operation.cost
    tools        gen_ai.tool.{name,call.id,call.arguments,call.result}; before: the pairs of `_TOOL_KEYS`
    judgement    event gen_ai.evaluation.result {gen_ai.evaluation.{name,score.value,score.label,explanation}}

OpenInference (Arize Phoenix). Attributes may be nested already, as Phoenix exports them. The prompt in input.value is
dropped if the numbered messages contain it; output.value is the raw response and stays with the span.

.. code-block:: text

    openinference.span.kind   LLM is a call (for any kind of the OpenTelemetry span), AGENT an agent, TOOL a tool
    call      llm.input_messages.<i>.message.{role,content,contents,name,tool_call_id,tool_calls.<j>.tool_call.{id,
              function.{name,arguments}}}, llm.output_messages.<i>..., else input.value and output.value;
              llm.prompts.<i>, llm.choices.<i>; llm.tools.<i>.tool.json_schema, llm.invocation_parameters,
              llm.{model_name,provider,finish_reason}, llm.token_count.*, llm.cost.total
    tool      tool.{name,parameters}, tool_call.id, input.value, output.value
    agent     agent.name, graph.node.id
    judgement annotations.<i>.annotation.{name,label,score,explanation,annotator_kind,...} of the span,
              trace.annotations of the trace, session.annotations of the session

Vercel AI SDK: ai.operationId ends with .doGenerate or .doStream for a call: ai.prompt.{messages,tools},
ai.response.{text,toolCalls,reasoning,...}, ai.usage.*, ai.model.*, and gen_ai.* in addition; ai.toolCall.* is a tool.

Sources: semantic-conventions-genai, and spans of the instrumentations that tests/golden/formats/make_otlp.py names; the
semantic conventions of OpenInference, and spans of openinference-instrumentation-openai and -langchain; the AI SDK's
page on telemetry (no file of it was read).
"""

from typing import Any

from lake.formats.base.fields import as_object, parse_number
from lake.formats.chat.messages import Message
from lake.formats.tracing.episodes import GENAI_CAPTURE, ModelCall, Score, Span, Tool
from lake.formats.tracing.payloads import (
    Payload,
    decode_payload,
    get_first,
    get_text,
    join_messages,
    list_objects,
    parse_answers,
    parse_instructions,
    parse_numeric,
    parse_prompt,
    parse_result,
    pop_indexed,
    split_choices,
    to_count,
    to_messages,
    to_text,
)

LANGFUSE_CAPTURE = (
    "capture_input and capture_output of Langfuse's @observe, LANGFUSE_OBSERVE_DECORATOR_IO_CAPTURE_ENABLED=true"
)
_CAPTURE_SETTINGS = {
    "openinference.": "OPENINFERENCE_HIDE_INPUTS=false and OPENINFERENCE_HIDE_OUTPUTS=false",
    "ai.operationId": "recordInputs: true and recordOutputs: true of the AI SDK's telemetry",
    "langfuse.observation.": LANGFUSE_CAPTURE,
    "traceloop.": "TRACELOOP_TRACE_CONTENT=true",
    "gcp.vertex.agent.": "ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS=true",
    "model_request_parameters": "InstrumentationSettings(include_content=True) of Pydantic AI",
}
"""Beginning of an attribute that only one tracer writes -> its setting that records content."""
SpanEvent = dict[str, Any]
"""name, time, attributes."""


def find_capture_setting(attributes: dict[str, Any]) -> str:
    """Return the setting that makes the tracer of a span with these attributes record content."""
    starts = (start for start in _CAPTURE_SETTINGS if any(key.startswith(start) for key in attributes))
    return _CAPTURE_SETTINGS.get(next(starts, ""), GENAI_CAPTURE)


# ---------------------------------------------------------------- GenAI: messages

DETAILS = "gen_ai.client.inference.operation.details"
_CONTENT = ("gen_ai.content.prompt", "gen_ai.content.completion")
_EVENT_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_PAIRS = (
    ("gen_ai.prompt", "gen_ai.completion"),
    ("llm.prompts", "llm.completions"),
    ("request_data", "response_data"),
    ("gcp.vertex.agent.llm_request", "gcp.vertex.agent.llm_response"),
    ("mlflow.spanInputs", "mlflow.spanOutputs"),
)
_HEADS = ("gen_ai.input.messages", "gen_ai.output.messages", *(key for pair in _PAIRS for key in pair))
_PART_KEYS = frozenset(("type", "text", "toolUse", "toolResult", "reasoningContent", "image"))


def pop_genai_messages(attributes: dict[str, Any], events: list[SpanEvent]) -> tuple[Payload, Payload]:
    """Remove and return the prompt of a call and the messages of its output, from its attributes and events."""
    for event in [e for e in events if e["name"] in (DETAILS, *_CONTENT)]:
        attributes.update({key: field for key, field in event["attributes"].items() if key not in attributes})
        events.remove(event)
    system = attributes.pop("gen_ai.system_instructions", None)
    prompt = parse_prompt(attributes.pop("gen_ai.input.messages", None))
    output = decode_payload(attributes.pop("gen_ai.output.messages", None))
    outputs = output if isinstance(output, list) else [] if output is None else [output]
    answers = Payload([message for entry in outputs for message in to_messages(entry, "assistant")])
    for prompt_key, answer_key in _PAIRS:
        if not prompt.messages and prompt_key in attributes:
            prompt = parse_prompt(attributes.pop(prompt_key))
        elif not prompt.messages:
            prompt = Payload(join_messages(_pop_numbered_messages(attributes, prompt_key, "user")))
        if not answers.messages and answer_key in attributes:
            answers = parse_answers(attributes.pop(answer_key))
        elif not answers.messages:
            answers = Payload(_pop_numbered_messages(attributes, answer_key, "assistant"))
    if not prompt.messages and not answers.messages:
        prompt, answers = _pop_event_messages(attributes, events)
    if system is not None and not any(message["role"] == "system" for message in prompt.messages):
        prompt.messages = [parse_instructions(system), *prompt.messages]
    return prompt, answers


def _pop_numbered_messages(attributes: dict[str, Any], prefix: str, role: str) -> list[Message]:
    messages = []
    for entry in pop_indexed(attributes, prefix):
        message = {k: v for k, v in entry.items() if v is not None} if isinstance(entry, dict) else entry
        if isinstance(message, dict) and isinstance(content := message.get("content"), str):
            message["content"] = _decode_parts(content)
        if isinstance(message, dict) and message.get("role") == "thinking":
            message = {"role": "assistant", "reasoning_content": to_text(message.get("content", ""))}
        messages += to_messages(message, role)
    return messages


def _decode_parts(content: str) -> Any:
    """Return the parts of a message in JSON text; text that only looks like JSON stays text."""
    decoded = decode_payload(content) if content.startswith("[{") else content
    is_parts = isinstance(decoded, list) and all(as_object(part).keys() & _PART_KEYS for part in decoded)
    return decoded if is_parts else content


def _pop_event_messages(attributes: dict[str, Any], events: list[SpanEvent]) -> tuple[Payload, Payload]:
    """Remove and return the messages of events that are one message each."""
    message_events = [event for event in events if event["name"] in _EVENT_ROLES or event["name"] == "gen_ai.choice"]
    for event in message_events:
        events.remove(event)
    pairs = [(event["name"], event["attributes"]) for event in message_events]
    listed = decode_payload(attributes.get("events"))
    if not pairs and isinstance(listed, list) and all(isinstance(event, dict) for event in listed):
        pairs = [(str(event.get("event.name")), event) for event in listed]
        attributes.pop("events")
    prompt: list[Message] = []
    answers: list[Message] = []
    for name, event_attributes in pairs:
        # One attribute may hold all of the event.
        body = event_attributes | _as_content(decode_payload(event_attributes.get("gen_ai.event.content")))
        is_choice = name == "gen_ai.choice"
        message: Message = {"role": _EVENT_ROLES.get(name, "assistant")}
        message |= {k: v for k, v in body.items() if k not in ("message", "index") and "." not in k}
        message |= _as_content(decode_payload(body.get("message")) if is_choice else None)
        if isinstance(message.get("content"), str):
            message["content"] = _decode_parts(message["content"])
        if isinstance(calls := decode_payload(message.get("tool_calls")), list):
            message["tool_calls"] = calls
        (answers if is_choice else prompt).extend(to_messages(message, message["role"]))
    return Payload(join_messages(prompt)), Payload(answers)


def _as_content(body: Any) -> dict[str, Any]:
    return body if isinstance(body, dict) else {} if body is None else {"content": body}


# ---------------------------------------------------------------- GenAI: spans

_CALLS = frozenset(("chat", "generate_content", "text_completion", "completion", "message", "responses"))
_OPERATIONS = {"invoke_agent": "agent", "execute_tool": "tool"}
MIRRORS = ("pydantic_ai.all_messages", "all_messages_events")
"""Attributes of an agent's span that repeat the messages of its calls, like those that the conventions put there."""
_AGENT_MIRRORS = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions")
_OLDER_NAMES = (
    ("gen_ai.task.input", "traceloop.entity.input"),
    ("gen_ai.task.output", "traceloop.entity.output"),
    ("gen_ai.tool.call.arguments", "traceloop.entity.input"),
    ("gen_ai.tool.call.result", "traceloop.entity.output"),
)
"""Attributes that instrumentations in transition write under both names."""
_PROMPT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens")
_COMPLETION_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens")
_TOOL_KEYS = (
    ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result"),
    ("tool_arguments", "tool_response"),
    ("traceloop.entity.input", "traceloop.entity.output"),
    ("gcp.vertex.agent.tool_call_args", "gcp.vertex.agent.tool_response"),
    ("mlflow.spanInputs", "mlflow.spanOutputs"),
    ("input.value", "output.value"),
)
"""Attributes of a tool's arguments and result."""
_COSTS = ("operation.cost", "gen_ai.usage.cost")
_COUNTED = frozenset((*_PROMPT_TOKENS, *_COMPLETION_TOKENS, *_COSTS))
_GENAI_NO_SETTINGS = frozenset(("model", "stream", "is_stream", "choice.count"))


def fill_genai_span(span: Span, events: list[SpanEvent]) -> bool:
    """Set the kind and content of a span by its attributes; False if they follow other conventions.

    Messages are removed from the attributes and the events.
    """
    kind = get_genai_kind(span.attributes)
    if kind is None:
        return False
    span.kind = kind
    span.agent = get_text(span.attributes, "gen_ai.agent.name", "agent_name")
    if kind == "llm":
        span.call = build_genai_call(span.attributes, events)
    elif kind == "tool":
        span.tool = build_genai_tool(span)
    elif kind == "agent":
        entity = get_text(span.attributes, "traceloop.entity.name")
        span.agent = span.agent or entity or span.name.removeprefix("invoke_agent ")
    for key in MIRRORS if kind != "agent" else (*MIRRORS, *_AGENT_MIRRORS):
        span.attributes.pop(key, None)
    for key, older in _OLDER_NAMES:
        if older in span.attributes and span.attributes.get(key) == span.attributes[older]:
            del span.attributes[older]
    return True


def get_genai_kind(attributes: dict[str, Any]) -> str | None:
    """Return llm, tool, agent, or another operation; None if no attribute states it."""
    operation = get_text(attributes, "gen_ai.operation.name", "llm.request.type")
    entity = get_text(attributes, "traceloop.span.kind")
    if operation is not None:
        unknown = "llm" if "gen_ai.output.messages" in attributes else operation
        return "llm" if operation in _CALLS else _OPERATIONS.get(operation, unknown)
    if entity in ("agent", "tool") or "gen_ai.tool.name" in attributes:
        return "agent" if entity == "agent" else "tool"
    if (mlflow_type := get_text(attributes, "mlflow.spanType")) is not None:
        return "llm" if (kind := mlflow_type.strip('"')) == "CHAT_MODEL" else kind.lower()
    has_model = any(key in attributes for key in ("gen_ai.request.model", "gen_ai.system", "request_data"))
    if has_model and ("events" in attributes or any(key.startswith(_HEADS) for key in attributes)):
        return "llm"
    if "agent_name" in attributes or ("gen_ai.agent.name" in attributes and "gen_ai.request.model" not in attributes):
        return "agent"
    return entity


def build_genai_call(attributes: dict[str, Any], events: list[SpanEvent]) -> ModelCall:
    """Build the call that attributes and events describe; its messages are removed from both."""
    prompt, answers = pop_genai_messages(attributes, events)
    reasons = decode_payload(attributes.get("gen_ai.response.finish_reasons"))
    reason = reasons[0] if isinstance(reasons, list) and reasons else reasons
    requested = get_text(attributes, "gen_ai.request.model", "llm.request.model")
    model = get_text(attributes, "gen_ai.response.model", "llm.response.model") or requested
    settings = {k.removeprefix("gen_ai.request."): v for k, v in attributes.items() if k.startswith("gen_ai.request.")}
    usage = {k: to_count(v) for k, v in attributes.items() if k.startswith("gen_ai.usage.") and k not in _COUNTED}
    extra = {
        "response_id": get_text(attributes, "gen_ai.response.id"),
        "provider": get_text(attributes, "gen_ai.provider.name", "gen_ai.system"),
        "request_model": None if requested == model else requested,
        "usage": {k.removeprefix("gen_ai.usage."): count for k, count in usage.items() if count is not None},
        "payload": prompt.rest | answers.rest,
    }
    return ModelCall(
        prompt=prompt.messages or None,
        answers=split_choices(answers.messages, to_count(attributes.get("gen_ai.request.choice.count"))),
        tools=pop_genai_tools(attributes) or prompt.tools,
        sampling={key: setting for key, setting in settings.items() if key not in _GENAI_NO_SETTINGS},
        model=model,
        finish_reason=reason if isinstance(reason, str) else None,
        prompt_tokens=to_count(get_first(attributes, *_PROMPT_TOKENS)),
        completion_tokens=to_count(get_first(attributes, *_COMPLETION_TOKENS)),
        cost=parse_number(parse_numeric(get_first(attributes, *_COSTS))),
        extra={key: field for key, field in extra.items() if field},
    )


def pop_genai_tools(attributes: dict[str, Any]) -> list[Any]:
    """Remove and return the offered tools."""
    tools = decode_payload(attributes.pop("gen_ai.tool.definitions", None))
    settings = decode_payload(attributes.get("model_request_parameters"))
    if isinstance(settings, dict):
        settings = attributes["model_request_parameters"] = dict(settings)
        listed = [tool for key in ("function_tools", "output_tools") for tool in settings.pop(key, None) or ()]
        tools = tools if isinstance(tools, list) else listed
    if isinstance(tools, list):
        return [decode_payload(tool) for tool in tools]
    functions = list_objects(pop_indexed(attributes, "llm.request.functions"))
    return [{key: decode_payload(field) for key, field in function.items()} for function in functions]


def build_genai_tool(span: Span) -> Tool:
    """Build the execution of a tool that a span describes."""
    attributes = span.attributes
    arguments, output = (get_first(attributes, *keys) for keys in zip(*_TOOL_KEYS, strict=True))
    inputs = as_object(decode_payload(arguments)).get("inputs")
    name = get_text(attributes, "gen_ai.tool.name", "tool.name", "traceloop.entity.name")
    call_id = get_text(attributes, "gen_ai.tool.call.id", "tool_call.id", "ai.toolCall.id")
    return _build_tool(span, name, call_id, inputs if isinstance(inputs, dict) else arguments, output)


def _build_tool(span: Span, name: str | None, call_id: str | None, arguments: Any, output: Any) -> Tool:
    """Build the execution of a tool; its output may name the call and say that it is an error."""
    content, answered_id, is_error = parse_result(decode_payload(output))
    return Tool(
        name=name or span.name,
        is_named=name is not None,
        call_id=call_id or answered_id,
        arguments=arguments,
        result=span.error if output is None else to_text(output) if answered_id is None else content,
        is_error=True if span.error else is_error,
    )


def build_evaluations(events: list[SpanEvent]) -> list[Score]:
    """Build the judgements among events."""
    scores = []
    for event in events:
        fields = {k.removeprefix("gen_ai.evaluation."): v for k, v in event["attributes"].items()}
        if event["name"] == "gen_ai.evaluation.result" and isinstance(name := fields.pop("name", None), str):
            number, reason = parse_numeric(fields.pop("score.value", None)), fields.pop("explanation", None)
            error = fields.pop("error.type", None)
            scores.append(Score(scorer=name, value=number, reason=reason, error=error, metrics=fields))
    return scores


# ---------------------------------------------------------------- OpenInference

_ARGUMENTS = ("input.value", "tool.parameters")
_OPENINFERENCE_NO_SETTINGS = frozenset(("model", "model_name", "tools", "messages", "input", "stream", "_type"))


def fill_openinference_span(span: Span) -> bool:
    """Set the kind and content of a span by its attributes; False if they follow other conventions.

    Messages are removed from the attributes.
    """
    attributes = span.attributes
    kind = get_text(attributes, "openinference.span.kind")
    span.scores += _pop_annotations(attributes, "annotations", {})
    if kind is None or (kind.upper() == "UNKNOWN" and "llm.model_name" not in attributes):
        return False
    span.kind = kind.lower()
    span.agent = get_text(attributes, "agent.name")
    if span.kind == "llm":
        span.call = build_openinference_call(attributes)
    elif span.kind == "tool":
        call_id, arguments = get_text(attributes, "tool_call.id", "tool.id"), get_first(attributes, *_ARGUMENTS)
        name, output = get_text(attributes, "tool.name"), attributes.get("output.value")
        span.tool = _build_tool(span, name, call_id, arguments, output)
        span.tool.is_named = "tool.name" in attributes
    elif span.kind == "agent":
        span.agent = span.agent or get_text(attributes, "graph.node.id") or span.name.removeprefix("invoke_agent ")
    return True


def pop_trace_scores(attributes: dict[str, Any]) -> list[Score]:
    """Remove and return the judgements of the trace and of its session from the attributes of a span."""
    session_scores = _pop_annotations(attributes, "session.annotations", {"of": "session"})
    return _pop_annotations(attributes, "trace.annotations", {}) + session_scores


def build_openinference_call(attributes: dict[str, Any]) -> ModelCall:
    """Build the call that attributes describe; its messages are removed from them."""
    prompt, answers = _pop_prompt(attributes), _pop_answers(attributes)
    settings = as_object(decode_payload(attributes.get("llm.invocation_parameters")))
    prefix = "llm.token_count."
    usage = {k.removeprefix(prefix): to_count(v) for k, v in attributes.items() if k.startswith(prefix)}
    template = {k.rpartition(".")[2]: v for k, v in attributes.items() if k.startswith("llm.prompt_template.")}
    tools = []
    for entry in pop_indexed(attributes, "llm.tools"):
        tool = _unwrap(entry, "tool")
        schema = decode_payload(as_object(tool).get("json_schema"))
        tools.append(tool if schema is None else schema)
    extra = {
        "response_id": get_text(as_object(decode_payload(attributes.get("output.value"))), "id"),
        "provider": get_text(attributes, "llm.provider", "llm.system"),
        "usage": {k: v for k, v in usage.items() if k not in ("prompt", "completion", "total") and v is not None},
        "prompt_template": template,
    }
    return ModelCall(
        prompt=prompt.messages or None,
        answers=split_choices(answers.messages, to_count(settings.get("n"))),
        tools=tools or prompt.tools,
        sampling={k: v for k, v in settings.items() if k not in _OPENINFERENCE_NO_SETTINGS and v is not None},
        model=get_text(attributes, "llm.model_name"),
        finish_reason=get_text(attributes, "llm.finish_reason"),
        prompt_tokens=usage.get("prompt"),
        completion_tokens=usage.get("completion"),
        cost=parse_number(parse_numeric(get_first(attributes, "llm.cost.total"))),
        extra={key: field for key, field in extra.items() if field},
    )


def _pop_prompt(attributes: dict[str, Any]) -> Payload:
    listed = pop_indexed(attributes, "llm.input_messages") or pop_indexed(attributes, "llm.prompts")
    messages = [message for entry in listed for message in _parse_numbered(entry, "user")]
    request = attributes.get("input.value")
    prompt = parse_prompt(request)
    if messages:
        prompt.messages = join_messages(messages)
    if request is not None:
        settings = {key: field for key, field in prompt.rest.items() if key not in ("model", "tools")}
        attributes.pop("input.value")
        attributes |= {"input.value": settings} if settings else {}
    return prompt


def _pop_answers(attributes: dict[str, Any]) -> Payload:
    """Remove and return the messages of a call's output. The raw response stays if it is more than its text."""
    listed = pop_indexed(attributes, "llm.output_messages") or pop_indexed(attributes, "llm.choices")
    response = attributes.get("output.value")
    if isinstance(response, str) and not isinstance(decode_payload(response), dict | list):
        attributes.pop("output.value")
    if listed:
        return Payload([message for entry in listed for message in _parse_numbered(entry, "assistant")])
    return parse_answers(response)


def _parse_numbered(entry: Any, role: str) -> list[Message]:
    """Parse one numbered message, prompt or choice."""
    inner = entry
    for key in ("message", "prompt", "completion"):
        inner = _unwrap(inner, key)
    if not isinstance(inner, dict):
        return to_messages(inner, role)
    message = {key: field for key, field in inner.items() if key not in ("contents", "text")}
    if isinstance(inner.get("text"), str):
        message["content"] = inner["text"]
    if isinstance(contents := inner.get("contents"), list):
        message["content"] = [_unwrap(part, "message_content") for part in contents]
    if isinstance(calls := inner.get("tool_calls"), list):
        message["tool_calls"] = [_unwrap(call, "tool_call") for call in calls]
    if isinstance(name := message.pop("function_call_name", None), str):
        arguments = message.pop("function_call_arguments_json", None)
        message.setdefault("tool_calls", [{"function": {"name": name, "arguments": arguments}}])
    return to_messages(message, role)


def _unwrap(entry: Any, key: str) -> Any:
    return entry[key] if isinstance(entry, dict) and isinstance(entry.get(key), dict) else entry


def _pop_annotations(attributes: dict[str, Any], prefix: str, metrics: dict[str, Any]) -> list[Score]:
    scores = []
    for entry in pop_indexed(attributes, prefix):
        fields = dict(as_object(_unwrap(entry, "annotation")))
        if isinstance(name := fields.pop("name", None), str):
            number, reason = parse_numeric(fields.pop("score", None)), fields.pop("explanation", None)
            scores.append(Score(scorer=name, value=number, reason=reason, metrics=metrics | fields))
    return scores


# ---------------------------------------------------------------- Vercel AI SDK

_ANSWER = {"content": "text", "tool_calls": "toolCalls", "reasoning_content": "reasoning"}


def fill_vercel_span(span: Span, events: list[SpanEvent]) -> bool:
    """Set the kind and content of a span by its attributes; False if they follow other conventions."""
    attributes = span.attributes
    operation = get_text(attributes, "ai.operationId")
    if operation is None and "ai.toolCall.name" not in attributes:
        return False
    span.kind = str(operation or "tool")
    if "ai.toolCall.name" in attributes:
        span.kind = "tool"
        output = attributes.get("ai.toolCall.result")
        span.tool = Tool(
            name=get_text(attributes, "ai.toolCall.name") or span.name,
            call_id=get_text(attributes, "ai.toolCall.id"),
            arguments=attributes.get("ai.toolCall.args"),
            result=span.error if output is None else str(output),
            is_error=True if span.error else None,
        )
    elif span.kind.endswith((".doGenerate", ".doStream")):
        span.kind = "llm"
        span.call = build_vercel_call(attributes, events)
    return True


def build_vercel_call(attributes: dict[str, Any], events: list[SpanEvent]) -> ModelCall:
    """Build the call that attributes describe; its messages are removed from them."""
    call = build_genai_call(attributes, events)
    prompt = parse_prompt(attributes.pop("ai.prompt.messages", None))
    answer: dict[str, Any] = {key: attributes.pop(f"ai.response.{name}", None) for key, name in _ANSWER.items()}
    answer["tool_calls"] = decode_payload(answer["tool_calls"])
    tools = decode_payload(attributes.pop("ai.prompt.tools", None))
    call.prompt = prompt.messages or call.prompt
    if any(answer.values()):
        call.answers = split_choices(to_messages({"role": "assistant"} | answer, "assistant"))
    call.tools = [decode_payload(tool) for tool in tools] if isinstance(tools, list) else call.tools
    call.model = call.model or get_text(attributes, "ai.response.model", "ai.model.id")
    call.finish_reason = get_text(attributes, "ai.response.finishReason") or call.finish_reason
    if call.prompt_tokens is None:
        call.prompt_tokens = to_count(get_first(attributes, "ai.usage.inputTokens", "ai.usage.promptTokens"))
    if call.completion_tokens is None:
        completion_tokens = get_first(attributes, "ai.usage.outputTokens", "ai.usage.completionTokens")
        call.completion_tokens = to_count(completion_tokens)
    return call
