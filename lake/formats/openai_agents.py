"""Traces of the OpenAI Agents SDK: lines of `trace` and `trace.span` objects, as its `export()` writes them.

.. code-block:: text

    trace        {object, id, workflow_name, group_id?, metadata?}
    trace.span   {object, id, trace_id, parent_id, started_at, ended_at, span_data, error: {message, data}?}
    span_data    generation {input, output, model, model_config, usage}: a call of the chat API
                 response {response_id, usage; input, response if an exporter adds them}: a call of the Responses API
                 function {name, input, output, mcp_data}: a tool; agent {name, handoffs, tools, output_type}
                 handoff, guardrail, custom (also the SDK's own task and turn), mcp_tools, transcription, speech, ...

* A trace is an episode; its generations and responses in the order of their start are the decisions
  (`tracing.episodes`). A handoff stays in the episode; an agent inside a function is a sub-agent.
* The export of a `response` has no messages. Such steps have the tool calls of the function spans after them.
* The task is the trace: the traces of a group (`group_id`, in `extra`) are the turns of one conversation, not siblings.
  The environment is the workflow.
* The lines of a trace may be in any order, mixed with those of other traces, in batches, {data: [...]}, or as
  {trace, spans}. There is no version.

Source: the tracing modules of openai-agents 0.24.0.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from lake.formats.base.fields import as_object
from lake.formats.base.format import FileHead, Format, Item, get_parent_folder
from lake.formats.base.json_array import Element
from lake.formats.base.rows import ShapeError, omit_fields, read_values
from lake.formats.base.source import Input
from lake.formats.tracing.episodes import ModelCall, Span, Tool, Trace, build_episodes, convert_traces, to_nanoseconds
from lake.formats.tracing.payloads import (
    add_instructions,
    get_first,
    get_text,
    omit_empty,
    parse_answers,
    parse_prompt,
    to_count,
    to_text,
)
from lake.records import EpisodeRecord, Reject, excerpt

NAME = "openai_agents"
_OBJECTS = ("trace", "trace.span")
_TRACE_ID = re.compile(r'"(?:trace_id|id)"\s*:\s*"(trace_[^"]{8,80})"')
_CALLS = ("generation", "response")
_COUNTED = ("input_tokens", "output_tokens", "total_tokens", "requests", "prompt_tokens", "completion_tokens")
_SETTINGS = ("temperature", "top_p", "max_output_tokens", "tool_choice", "parallel_tool_calls", "reasoning", "text")
_SPAN_KEYS = ("object", "id", "trace_id", "parent_id", "started_at", "ended_at", "error")
_CAPTURE = "trace_include_sensitive_data=True of RunConfig, or OPENAI_AGENTS_TRACE_INCLUDE_SENSITIVE_DATA=1"
_RESPONSE_CAPTURE = f"an exporter that adds input and response to spans of responses (export() omits them); {_CAPTURE}"
_TURN_LIMIT = "Max turns exceeded"
_NO_TRACE = "no trace, no span: valid are objects {object: trace, id} and {object: trace.span, id, trace_id}"


def recognise(head: FileHead) -> bool:
    """Return whether a file has traces or spans of the SDK."""
    return any(map(_is_line, _list_objects(head)))


def no_trajectory(head: FileHead) -> str | None:
    """Describe a file that has traces and no spans, if all of it was examined."""
    objects = _list_objects(head)
    if not objects or len(head.text) >= 1 << 15:
        return None
    if all(_is_line(line) and line["object"] == "trace" for line in objects):
        return "it names traces of the OpenAI Agents SDK and has none of their spans; ingest the file that has them"
    return None


def read(file: Input) -> Iterator[Item]:
    """Read the records and rejects of a file; a trace has the position of its first line."""
    lost: Counter[str] = Counter()
    pieces = _split_pieces(read_values(file, by_line=True), lost)
    return convert_traces(pieces, NAME, lambda trace_id, lines: _build_records(trace_id, lines, lost[trace_id], file))


def _list_objects(head: FileHead) -> list[dict[str, Any]]:
    return [line for node in head.objects for line in _unwrap(node) if isinstance(line, dict)]


def _unwrap(node: Any) -> list[Any]:
    """Return the traces and spans in a value: the value, a batch as the SDK sends it, or a trace with its spans."""
    if isinstance(node, list):
        return node
    if not isinstance(node, dict) or node.get("object") == "trace.span":
        return [node]
    lists = [node[key] for key in ("data", "traces", "spans") if isinstance(node.get(key), list)]
    trace = node if node.get("object") == "trace" else node.get("trace")
    head = [{"object": "trace"} | (omit_fields(trace, "spans") or {})] if isinstance(trace, dict) else []
    return [*head, *(line for lines in lists for line in lines)] if lists else [node]


def _is_line(node: dict[str, Any]) -> bool:
    if node.get("object") == "trace.span":
        return "trace_id" in node or "span_data" in node
    return node.get("object") == "trace" and ("workflow_name" in node or "group_id" in node)


def _split_pieces(items: Iterable[Element | Reject], lost: Counter[str]) -> Iterator[tuple[str, int, Any] | Reject]:
    """Yield lines with their trace. `lost` counts the damaged lines that name a trace."""
    for item in items:
        lines = _unwrap(item.value) if isinstance(item, Element) and item.problem is None else [None]
        for line in lines:
            fields = as_object(line)
            trace_id = fields.get("id" if fields.get("object") == "trace" else "trace_id")
            is_valid = fields.get("object") in _OBJECTS and isinstance(fields.get("id"), str)
            if isinstance(item, Element) and is_valid and isinstance(trace_id, str) and trace_id:
                yield trace_id, item.index, line
                continue
            raw = item.raw if len(lines) == 1 else Element(0, line, source=None).raw
            lost.update(set(_TRACE_ID.findall(raw)))
            if isinstance(item, Reject):
                yield item
            else:
                message = excerpt(item.problem or _NO_TRACE)
                yield Reject(position=item.index, reason="invalid", message=message, raw=raw)


def _build_records(trace_id: str, lines: list[Any], lost: int, file: Input) -> list[EpisodeRecord]:
    """Build the episodes of a trace. Raises ShapeError: it has no call of a model, or no messages."""
    fields: dict[str, Any] = {}
    for line in lines:
        fields |= line if line["object"] == "trace" else {}
    spans = [_build_span(line) for line in lines if line["object"] == "trace.span"]
    if not spans:
        raise ShapeError(f"trace {trace_id!r} has no span; ingest the file that has them")
    extra = omit_empty(fields, ("object", "id", "workflow_name"))
    extra |= {"lost_lines": lost} if lost else {}
    extra |= {} if fields else {"trace": "its own line is missing"}
    environment = get_text(fields, "workflow_name")
    trace = Trace(id=trace_id, spans=spans, task_id=trace_id, environment=environment, extra=extra)
    is_of_responses = any(span.call is not None and span.attributes.get("type") == "response" for span in spans)
    trace.capture_setting = _RESPONSE_CAPTURE if is_of_responses else _CAPTURE
    records = build_episodes(trace, file, NAME)
    for record in records:
        if record.error is not None and record.error.startswith(_TURN_LIMIT):
            record.status, record.terminated, record.stop_reason = "truncated", False, "max_turns"
    return records


def _build_span(line: dict[str, Any]) -> Span:
    fields = as_object(line.get("span_data"))
    kind = str(fields.get("type") or "span")
    error = line.get("error")
    message, detail = (error.get("message"), error.get("data")) if isinstance(error, dict) else (error, None)
    mapped_keys = _SPAN_KEYS if line.get("span_data") is not fields else (*_SPAN_KEYS, "span_data")
    parent = line.get("parent_id")
    span = Span(
        id=line["id"],
        parent=parent if isinstance(parent, str) and parent else None,
        name=get_text(fields, "name") or kind,
        kind={"function": "tool"}.get(kind, "llm" if kind in _CALLS else kind),
        start=to_nanoseconds(line.get("started_at")),
        end=to_nanoseconds(line.get("ended_at")),
        error=to_text(message or error) + (f": {to_text(detail)}" if detail else "") if error else None,
        attributes=omit_empty({key: field for key, field in line.items() if key not in mapped_keys} | fields),
    )
    if kind in _CALLS:
        span.call = _build_call(fields, span.attributes)
    elif kind == "function":
        output = fields.get("output")
        text = span.error if output is None else to_text(output)
        is_error = True if span.error else None
        span.tool = Tool(name=span.name, arguments=fields.get("input"), result=text, is_error=is_error)
    elif kind == "agent":
        span.agent = span.name
    return span


def _build_call(fields: dict[str, Any], attributes: dict[str, Any]) -> ModelCall:
    """Build the call of a generation or a response; its messages are removed from the attributes."""
    response = as_object(fields.get("response"))
    prompt, answers = parse_prompt(fields.get("input")), parse_answers(response or fields.get("output"))
    for key in ("input", "output", "response"):
        attributes.pop(key, None)
    settings = as_object(fields.get("model_config"))
    settings = settings or {key: answers.rest.pop(key) for key in _SETTINGS if key in answers.rest}
    usage = as_object(fields.get("usage") or response.get("usage"))
    extra = {
        "response_id": get_text(fields, "response_id") or get_text(response, "id"),
        "usage": {key: count for key, count in usage.items() if key not in _COUNTED and count is not None},
        "payload": {k: v for k, v in (prompt.rest | answers.rest).items() if k not in ("id", "usage")},
    }
    return ModelCall(
        prompt=add_instructions(prompt, answers) or None,
        answers=answers.messages,
        tools=answers.tools or prompt.tools,
        sampling=omit_fields(settings, "base_url") or {},
        model=get_text(fields, "model") or get_text(response, "model"),
        prompt_tokens=to_count(get_first(usage, "input_tokens", "prompt_tokens")),
        completion_tokens=to_count(get_first(usage, "output_tokens", "completion_tokens")),
        extra={key: field for key, field in extra.items() if field},
    )


FORMAT = Format(
    NAME, "OpenAI Agents SDK traces", recognise, read, no_trajectory, is_whole=True, run_folder=get_parent_folder
)
