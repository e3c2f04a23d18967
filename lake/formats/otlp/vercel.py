"""Attributes of the Vercel AI SDK.

.. code-block:: text

    ai.operationId          ai.generateText.doGenerate, ai.streamText.doStream, ...: calls; ai.toolCall: a tool; others
                            are around them
    call                    ai.prompt.messages, ai.prompt.tools, ai.response.{text,toolCalls,reasoning,finishReason,id,
                            model}, ai.usage.*, ai.model.{id,provider}, ai.settings.*, and gen_ai.* beside them
    tool                    ai.toolCall.{name,id,args,result}

Source: the AI SDK's page on telemetry. No file of it was read.
"""

from typing import Any

from lake.formats.otlp import genai
from lake.formats.otlp.genai_messages import Event
from lake.formats.tracing.attributes import count_of, first, name_in
from lake.formats.tracing.payloads import choices, decoded, prompt
from lake.formats.tracing.shapes import messages_of
from lake.formats.tracing.tree import Call, Span, Tool

_ANSWER = {"content": "text", "tool_calls": "toolCalls", "reasoning_content": "reasoning"}


def fill(span: Span, events: list[Event]) -> bool:
    """Say what a span is by its attributes; False if they are of other conventions."""
    said = span.attributes
    operation = name_in(said, "ai.operationId")
    if operation is None and "ai.toolCall.name" not in said:
        return False
    span.kind = str(operation or "tool")
    if "ai.toolCall.name" in said:
        span.kind = "tool"
        back = said.get("ai.toolCall.result")
        span.tool = Tool(
            name=name_in(said, "ai.toolCall.name") or span.name,
            call_id=name_in(said, "ai.toolCall.id"),
            arguments=said.get("ai.toolCall.args"),
            result=span.error if back is None else str(back),
            is_error=True if span.error else None,
        )
    elif span.kind.endswith((".doGenerate", ".doStream")):
        span.kind = "llm"
        span.call = call_of(said, events)
    return True


def call_of(said: dict[str, Any], events: list[Event]) -> Call:
    """The call that attributes tell of; what becomes messages is taken out."""
    call = genai.call_of(said, events)
    given = prompt(said.pop("ai.prompt.messages", None))
    answer: dict[str, Any] = {key: said.pop(f"ai.response.{name}", None) for key, name in _ANSWER.items()}
    answer["tool_calls"] = decoded(answer["tool_calls"])
    tools = decoded(said.pop("ai.prompt.tools", None))
    call.prompt = given.messages or call.prompt
    call.answers = (
        choices(messages_of({"role": "assistant"} | answer, "assistant")) if any(answer.values()) else call.answers
    )
    call.tools = [decoded(tool) for tool in tools] if isinstance(tools, list) else call.tools
    call.model = call.model or name_in(said, "ai.response.model", "ai.model.id")
    call.finish_reason = name_in(said, "ai.response.finishReason") or call.finish_reason
    if call.prompt_tokens is None:
        call.prompt_tokens = count_of(first(said, "ai.usage.inputTokens", "ai.usage.promptTokens"))
    if call.completion_tokens is None:
        call.completion_tokens = count_of(first(said, "ai.usage.outputTokens", "ai.usage.completionTokens"))
    return call
