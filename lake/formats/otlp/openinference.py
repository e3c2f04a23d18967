"""Attributes of OpenInference (Arize Phoenix).

.. code-block:: text

    openinference.span.kind   LLM is a call (whatever the kind of the OpenTelemetry span), AGENT an agent, TOOL a tool;
                              CHAIN, RETRIEVER, RERANKER, EMBEDDING, GUARDRAIL, EVALUATOR, PROMPT are around them
    call      llm.input_messages.<i>.message.{role,content,contents,name,tool_call_id,tool_calls.<j>.tool_call.{id,
              function.{name,arguments}}}, llm.output_messages.<i>..., else input.value and output.value;
              llm.prompts.<i>, llm.choices.<i>; llm.tools.<i>.tool.json_schema, llm.invocation_parameters,
              llm.{model_name,provider,finish_reason}, llm.token_count.*, llm.cost.total
    tool      tool.{name,parameters}, tool_call.id, input.value, output.value
    agent     agent.name, graph.node.id
    judgement annotations.<i>.annotation.{name,label,score,explanation,annotator_kind,...} of the span,
              trace.annotations of the trace, session.annotations of the session

Attributes may be nested already, as Phoenix exports them. The prompt in input.value is dropped where the numbered
messages say it; output.value is the raw response and stays with the span.

Source: the semantic conventions of OpenInference; spans of openinference-instrumentation-openai and -langchain.
"""

from typing import Any

from lake.formats.base.fields import number
from lake.formats.chat.messages import Message
from lake.formats.tracing.attributes import count_of, first, flattened, name_in, numeric
from lake.formats.tracing.payloads import Payload, answers, choices, decoded, joined, prompt
from lake.formats.tracing.shapes import messages_of, result, text
from lake.formats.tracing.tree import Call, Score, Span, Tool

_KINDS = {"LLM": "llm", "AGENT": "agent", "TOOL": "tool"}
_NO_SETTING = frozenset(("model", "model_name", "tools", "messages", "input", "stream", "_type"))
_FINISH = ("llm.finish_reason",)


def fill(span: Span) -> bool:
    """Say what a span is by its attributes, less what becomes messages; False if they are of other conventions."""
    said = span.attributes
    kind = name_in(said, "openinference.span.kind")
    span.scores += _scores(said, "annotations", {})
    if kind is None or (kind.upper() == "UNKNOWN" and "llm.model_name" not in said):
        return False
    span.kind = _KINDS.get(kind.upper(), kind.lower())
    span.agent = name_in(said, "agent.name")
    if span.kind == "llm":
        span.call = call_of(said)
    elif span.kind == "tool":
        span.tool = _tool(span)
    elif span.kind == "agent":
        span.agent = span.agent or name_in(said, "graph.node.id") or span.name.removeprefix("invoke_agent ")
    return True


def trace_scores(said: dict[str, Any]) -> list[Score]:
    """The judgements of the whole trace and of its session that an attribute of a span tells; taken out."""
    return _scores(said, "trace.annotations", {}) + _scores(said, "session.annotations", {"of": "session"})


def call_of(said: dict[str, Any]) -> Call:
    """The call that attributes tell of; what becomes messages is taken out."""
    given, answered = _given(said), _answered(said)
    settings = decoded(said.get("llm.invocation_parameters"))
    settings = settings if isinstance(settings, dict) else {}
    usage = {
        k.removeprefix("llm.token_count."): count_of(v) for k, v in said.items() if k.startswith("llm.token_count.")
    }
    cost = {k: v for k, v in said.items() if k.startswith("llm.cost.")}
    raw = decoded(said.get("output.value"))
    more = {
        "response_id": name_in(raw, "id") if isinstance(raw, dict) else None,
        "provider": name_in(said, "llm.provider", "llm.system"),
        "usage": {k: v for k, v in usage.items() if k not in ("prompt", "completion", "total") and v is not None},
        "prompt_template": {k.rpartition(".")[2]: v for k, v in said.items() if k.startswith("llm.prompt_template.")},
    }
    return Call(
        prompt=given.messages or None,
        answers=choices(answered.messages, count_of(settings.get("n"))),
        tools=_tools(said) or given.tools,
        sampling={k: v for k, v in settings.items() if k not in _NO_SETTING and v is not None},
        model=name_in(said, "llm.model_name"),
        finish_reason=name_in(said, *_FINISH),
        prompt_tokens=usage.get("prompt"),
        completion_tokens=usage.get("completion"),
        cost=number(numeric(first(cost, "llm.cost.total"))),
        extra={key: value for key, value in more.items() if value},
    )


def _given(said: dict[str, Any]) -> Payload:
    """The prompt of a call; taken out."""
    listed = flattened(said, "llm.input_messages") or flattened(said, "llm.prompts")
    messages = [message for item in listed for message in _messages(item, "user")]
    raw = said.get("input.value")
    found = prompt(raw)
    if messages:
        found.messages = joined(messages)
    if raw is not None:
        left = {key: value for key, value in found.rest.items() if key not in ("model", "tools")}
        said.pop("input.value")
        said |= {"input.value": left} if left else {}
    return found


def _answered(said: dict[str, Any]) -> Payload:
    """The messages of a call's output; taken out. The raw response stays, if it says more than its text."""
    listed = flattened(said, "llm.output_messages") or flattened(said, "llm.choices")
    raw = said.get("output.value")
    if isinstance(raw, str) and not isinstance(decoded(raw), dict | list):
        said.pop("output.value")
    if listed:
        return Payload([message for item in listed for message in _messages(item, "assistant")])
    return answers(raw)


def _messages(item: Any, role: str) -> list[Message]:
    """One numbered message, prompt or choice."""
    inner = item
    for key in ("message", "prompt", "completion"):
        inner = inner[key] if isinstance(inner, dict) and isinstance(inner.get(key), dict) else inner
    if not isinstance(inner, dict):
        return messages_of(inner, role)
    message = {key: value for key, value in inner.items() if key not in ("contents", "text")}
    if isinstance(inner.get("text"), str):
        message["content"] = inner["text"]
    if isinstance(contents := inner.get("contents"), list):
        message["content"] = [_unwrapped(part, "message_content") for part in contents]
    if isinstance(calls := inner.get("tool_calls"), list):
        message["tool_calls"] = [_unwrapped(call, "tool_call") for call in calls]
    if isinstance(name := message.pop("function_call_name", None), str):
        arguments = message.pop("function_call_arguments_json", None)
        message.setdefault("tool_calls", [{"function": {"name": name, "arguments": arguments}}])
    return messages_of(message, role)


def _unwrapped(part: Any, key: str) -> Any:
    return part[key] if isinstance(part, dict) and isinstance(part.get(key), dict) else part


def _tools(said: dict[str, Any]) -> list[Any]:
    """The tools that were offered; taken out."""
    found = []
    for item in flattened(said, "llm.tools"):
        tool = _unwrapped(item, "tool")
        schema = decoded(tool.get("json_schema")) if isinstance(tool, dict) else None
        found.append(tool if schema is None else schema)
    return found


def _tool(span: Span) -> Tool:
    said = span.attributes
    back = said.get("output.value")
    content, call_id, is_error = result(decoded(back))
    return Tool(
        name=name_in(said, "tool.name") or span.name,
        call_id=name_in(said, "tool_call.id", "tool.id") or call_id,
        arguments=first(said, "input.value", "tool.parameters"),
        result=span.error if back is None else text(back) if call_id is None else content,
        is_error=True if span.error else is_error,
    )


def _scores(said: dict[str, Any], prefix: str, metrics: dict[str, Any]) -> list[Score]:
    found = []
    for item in flattened(said, prefix):
        score = _unwrapped(item, "annotation")
        if isinstance(score, dict) and isinstance(score.get("name"), str):
            known = ("name", "score", "explanation")
            more = metrics | {key: value for key, value in score.items() if key not in known}
            value = numeric(score.get("score"))
            found.append(Score(scorer=score["name"], value=value, reason=score.get("explanation"), metrics=more))
    return found
