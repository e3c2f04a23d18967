"""Observations of Langfuse as spans: in its exports, and as attributes of the spans that its SDK writes.

.. code-block:: text

    type           GENERATION is a call, AGENT an agent, TOOL a tool; CHAIN, RETRIEVER, EVALUATOR, EMBEDDING, GUARDRAIL,
                   SPAN and EVENT are around them, unless the attributes of the span that they were say more
    input, output  what went into it and came out: an object, JSON text of one, or text
    model, modelParameters, usageDetails {input, output, ...}, costDetails {total}; before: usage, promptTokens
    level, statusMessage   ERROR and why
    metadata       {attributes: the attributes of the OpenTelemetry span, resourceAttributes, scope, ...}
"""

from typing import Any

from lake.formats.base.fields import number
from lake.formats.otlp import openinference, vercel
from lake.formats.otlp.genai import call_of, kind_of, tool_of
from lake.formats.tracing.attributes import count_of, first, name_in, numeric
from lake.formats.tracing.payloads import answers, decoded, instructed, prompt
from lake.formats.tracing.shapes import is_empty, result, text
from lake.formats.tracing.tree import Call, Span, Tool, tells_roles

TYPES = frozenset(
    ("GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL")
)
_CALL_KEYS = ("input", "output", "toolDefinitions")
_COUNTED = frozenset(("input", "output", "total", "unit", "inputCost", "outputCost", "totalCost"))
_NO_SETTING = frozenset(
    ("id", "created_at", "finishReason", "http_options", "instructions", "metadata", "system_instruction")
)
"""Keys of `modelParameters` that say what was asked or answered; they stay with the span."""
_PREFIX = "langfuse.observation."
_NAMES = {
    "input": "input",
    "output": "output",
    "model": "model.name",
    "modelParameters": "model.parameters",
    "usageDetails": "usage_details",
    "costDetails": "cost_details",
}
_MIRRORS = ("pydantic_ai.all_messages", "all_messages_events")
ITEM = ("langfuse.experiment.item.id", "dataset_item_id")
RUN = ("langfuse.experiment.name", "experiment_run_name", "dataset_run_name")
EXPECTED = ("langfuse.experiment.item.expected_output",)


def fill(span: Span, kind: str, said: dict[str, Any]) -> None:
    """Say what an observation is, and take out what becomes messages.

    Args:
        span: what is known of it; its attributes are the observation's.
        kind: its type.
        said: the observation; the values that may be JSON text are taken as what they say.
    """
    metadata = decoded(said.get("metadata"))
    inner = decoded(metadata.get("attributes")) if isinstance(metadata, dict) else None
    attributes = dict(inner) if isinstance(inner, dict) else {}
    traced = kind_of(attributes) or (name_in(attributes, "openinference.span.kind") or "").lower()
    model = name_in(said, "model", "provided_model_name")
    span.kind = {"generation": "llm"}.get(kind.lower(), kind.lower())
    if span.kind in ("span", "chain") and traced in ("agent", "tool"):
        span.kind = traced
    if span.kind == "llm" and (traced == "embeddings" or "embedding" in (model or "").lower()):
        span.kind = "embedding"
    _, call_id, _ = result(decoded(said.get("output")))
    if span.kind in ("span", "chain") and call_id is not None:
        span.kind = "tool"
    span.agent = name_in(attributes, "gen_ai.agent.name", "agent_name", "agent.name", "graph.node.id")
    if span.kind == "llm":
        span.call = _call(said, attributes, model)
        for key in _CALL_KEYS:
            span.attributes.pop(key, None)
    elif span.kind == "tool":
        span.tool = _tool(span, said, attributes)
    elif span.kind == "agent":
        span.agent = span.agent or span.name
    if attributes and isinstance(metadata, dict) and "metadata" in span.attributes:
        kept = {key: value for key, value in attributes.items() if key not in _MIRRORS}
        span.attributes["metadata"] = metadata | {"attributes": kept}


def fill_of_sdk(span: Span) -> bool:
    """Say what a span of Langfuse's SDK is by its attributes; False if it is of another."""
    said = span.attributes
    kind = name_in(said, f"{_PREFIX}type")
    if kind is None:
        return False
    found = {key: decoded(said.get(_PREFIX + name)) for key, name in _NAMES.items()}
    found |= {key: said[_PREFIX + key] for key in ("input", "output") if _PREFIX + key in said}
    fill(span, kind, found)
    if span.call is not None:
        for key in ("input", "output"):
            said.pop(_PREFIX + key, None)
    return True


def _call(said: dict[str, Any], attributes: dict[str, Any], model: str | None) -> Call:
    call = _traced(attributes)
    given, answered = prompt(said.get("input")), answers(said.get("output"))
    usage = _object(said, "usageDetails", "usage_details", "usage")
    cost = _object(said, "costDetails", "cost_details")
    settings = _object(said, "modelParameters", "model_parameters")
    asked = instructed(given, answered)
    if not tells_roles(call.prompt) or tells_roles(asked):
        call.prompt = asked or call.prompt
    call.answers = answered.messages or call.answers
    call.tools = _definitions(said) or given.tools or answered.tools or call.tools
    call.sampling = {
        key: value for key, value in settings.items() if value is not None and key not in _NO_SETTING
    } or call.sampling
    call.model = model or call.model
    counts = (usage.get("input"), first(said, "promptTokens", "prompt_tokens"), call.prompt_tokens)
    call.prompt_tokens = next((count for value in counts if (count := count_of(value)) is not None), None)
    counts = (usage.get("output"), first(said, "completionTokens", "completion_tokens"), call.completion_tokens)
    call.completion_tokens = next((count for value in counts if (count := count_of(value)) is not None), None)
    # A price that is not known is 0 in the totals, and absent from the details.
    total = cost.get("total", said.get("calculatedTotalCost"))
    call.cost = call.cost if total is None else number(numeric(total))
    more = {"usage": {key: value for key, value in usage.items() if key not in _COUNTED}}
    more["payload"] = given.rest | answered.rest
    call.extra |= {key: value for key, value in more.items() if value}
    return call


def _traced(attributes: dict[str, Any]) -> Call:
    """The call that the attributes of the span tell of."""
    if "ai.operationId" in attributes:
        return vercel.call_of(attributes, [])
    if "openinference.span.kind" in attributes:
        return openinference.call_of(attributes)
    return call_of(attributes, [])


def _tool(span: Span, said: dict[str, Any], attributes: dict[str, Any]) -> Tool:
    found = tool_of(Span(id=span.id, name=span.name, error=span.error, attributes=attributes))
    back = said.get("output")
    if back is not None:
        content, call_id, is_error = result(decoded(back))
        found.call_id = found.call_id or call_id
        found.result = content if call_id is not None else text(back)
        found.is_error = found.is_error if found.is_error is not None else is_error
    if found.arguments is None:
        found.arguments = said.get("input")
    return found


def _definitions(said: dict[str, Any]) -> list[Any]:
    """The tools that were offered: by name, or listed."""
    tools = decoded(first(said, "toolDefinitions", "tool_definitions"))
    if isinstance(tools, dict):
        return [
            inner
            if isinstance(inner := decoded(tool), dict) and "name" in inner
            else {"name": name, "definition": inner}
            for name, tool in tools.items()
        ]
    return [decoded(tool) for tool in tools] if isinstance(tools, list) else []


def _object(said: dict[str, Any], *keys: str) -> dict[str, Any]:
    found = decoded(first(said, *keys))
    return {key: value for key, value in found.items() if not is_empty(key, value)} if isinstance(found, dict) else {}
