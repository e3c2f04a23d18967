"""Traces of the OpenAI Agents SDK: lines of `trace` and `trace.span` objects, as its `export()` writes them.

.. code-block:: text

    trace        {object, id, workflow_name, group_id?, metadata?}
    trace.span   {object, id, trace_id, parent_id, started_at, ended_at, span_data, error: {message, data}?}
    span_data    generation {input, output, model, model_config, usage}: a call of the chat API
                 response {response_id, usage; input, response if an exporter adds them}: a call of the Responses API
                 function {name, input, output, mcp_data}: a tool; agent {name, handoffs, tools, output_type}
                 handoff, guardrail, custom (also the SDK's own task and turn), mcp_tools, transcription, speech, ...

* A trace is an episode; generations and responses in order of their start are its decisions (`tracing.tree`).
  A handoff goes on in the same episode, `agent_id` of a step says who; an agent inside a function is a sub-agent.
* The export of a `response` does not say what was said: such steps have the tool calls that the function spans after
  them tell, and are not trained on.
* The task is the trace: those of a group (`group_id`, in `extra`) are the turns of one conversation, and no siblings.
  The environment is the workflow.
* The lines of a trace stand in any order and may be mixed with those of others; they may stand in batches,
  {data: [...]}, or as {trace, spans}. There is no version.

Source: the tracing modules of openai-agents 0.24.0.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from lake.formats.base.fields import moment
from lake.formats.base.format import Format, its_folder
from lake.formats.base.json_array import Element
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, items_of, rest, values
from lake.formats.base.source import Input
from lake.formats.tracing.attributes import count_of, name_in
from lake.formats.tracing.episodes import episodes, nanoseconds
from lake.formats.tracing.payloads import answers, instructed, prompt
from lake.formats.tracing.shapes import is_empty, text
from lake.formats.tracing.tree import Call, Span, Tool, Trace, traces
from lake.records import EpisodeRecord, Reject, excerpt

NAME = "openai_agents"
_OBJECTS = ("trace", "trace.span")
_TRACE_ID = re.compile(r'"(?:trace_id|id)"\s*:\s*"(trace_[^"]{8,80})"')
_CALLS = ("generation", "response")
_COUNTED = frozenset(
    ("input_tokens", "output_tokens", "total_tokens", "requests", "prompt_tokens", "completion_tokens")
)
_SETTINGS = ("temperature", "top_p", "max_output_tokens", "tool_choice", "parallel_tool_calls", "reasoning", "text")
_LIMIT = "Max turns exceeded"
_NONE = "no trace, no span: valid are objects {object: trace, id} and {object: trace.span, id, trace_id}"


def recognise(look: Look) -> bool:
    """Whether a file has traces or spans of the SDK."""
    return any(_is_line(value) for value in _objects(look))


def no_trajectory(look: Look) -> str | None:
    """Whether a file has traces and no spans, all of which were looked at."""
    found = _objects(look)
    if found and all(_is_line(value) and value["object"] == "trace" for value in found) and len(look.text) < 1 << 15:
        return "it names traces of the OpenAI Agents SDK and has none of their spans; ingest the file that has them"
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file; a trace stands where its first line does."""
    lost: dict[str, int] = {}
    for found in traces(_pieces(values(file, by_line=True), lost)):
        if isinstance(found, Reject):
            yield found
        else:
            trace_id, element = found
            missing = lost.get(trace_id, 0)
            yield from items_of(element, NAME, lambda lines: _episodes(trace_id, lines, missing, file))  # noqa: B023


def _objects(look: Look) -> list[dict[str, Any]]:
    return [part for value in look.objects for part in _opened(value) if isinstance(part, dict)]


def _opened(value: Any) -> list[Any]:
    """The traces and spans that a value holds: itself, a batch as the SDK sends it, or a trace with its spans."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or value.get("object") == "trace.span":
        return [value]
    lists = [value[key] for key in ("data", "traces", "spans") if isinstance(value.get(key), list)]
    about = value if value.get("object") == "trace" else value.get("trace")
    head = [{"object": "trace"} | (rest(about, "spans") or {})] if isinstance(about, dict) else []
    return [*head, *(part for found in lists for part in found)] if lists else [value]


def _is_line(value: dict[str, Any]) -> bool:
    if value.get("object") == "trace.span":
        return "trace_id" in value or "span_data" in value
    return value.get("object") == "trace" and ("workflow_name" in value or "group_id" in value)


def _pieces(items: Iterable[Element | Reject], lost: dict[str, int]) -> Iterator[tuple[str, int, Any] | Reject]:
    """Lines by trace. `lost` counts the damaged lines that name a trace."""
    for item in items:
        parts = _opened(item.value) if isinstance(item, Element) and item.problem is None else [None]
        for part in parts:
            key = _trace_of(part)
            if isinstance(item, Element) and key is not None:
                yield key, item.index, part
                continue
            raw = item.raw if len(parts) == 1 else Element(0, part, source=None).raw
            for trace in set(_TRACE_ID.findall(raw)):
                lost[trace] = lost.get(trace, 0) + 1
            if isinstance(item, Reject):
                yield item
            else:
                yield Reject(position=item.index, reason="invalid", message=excerpt(item.problem or _NONE), raw=raw)


def _trace_of(value: Any) -> str | None:
    """The trace that a line is of; None if it is neither a trace nor a span."""
    if not isinstance(value, dict) or value.get("object") not in _OBJECTS:
        return None
    key = "id" if value["object"] == "trace" else "trace_id"
    return value[key] if isinstance(value.get(key), str) and isinstance(value.get("id"), str) and value[key] else None


def _episodes(trace_id: str, lines: list[Any], lost: int, file: Input) -> list[EpisodeRecord]:
    """A trace as episodes. Raises ShapeError: it has no call of a model, or says nothing of it."""
    about: dict[str, Any] = {}
    for line in lines:
        about |= line if line["object"] == "trace" else {}
    spans = [_span(line) for line in lines if line["object"] == "trace.span"]
    if not spans:
        raise ShapeError(f"trace {trace_id!r} has no span; ingest the file that has them")
    known = ("object", "id", "workflow_name")
    extra = {key: value for key, value in about.items() if key not in known and not is_empty(key, value)}
    trace = Trace(
        id=trace_id,
        spans=spans,
        task_id=trace_id,
        environment=name_in(about, "workflow_name"),
        extra=extra | ({"lost_lines": lost} if lost else {}) | ({} if about else {"trace": "its own line is missing"}),
    )
    found = episodes(trace, file, NAME)
    for record in found:
        if record.error is not None and record.error.startswith(_LIMIT):
            record.status, record.terminated, record.stop_reason = "truncated", False, "max_turns"
    return found


def _span(line: dict[str, Any]) -> Span:
    data = line["span_data"] if isinstance(line.get("span_data"), dict) else {}
    kind = str(data.get("type") or "span")
    error = line.get("error")
    said = error.get("message") if isinstance(error, dict) else error
    detail = error.get("data") if isinstance(error, dict) else None
    parent = line.get("parent_id")
    known = ("object", "id", "trace_id", "parent_id", "started_at", "ended_at", "error")
    about = {key: value for key, value in line.items() if key not in known and value is not data}
    span = Span(
        id=line["id"],
        parent=parent if isinstance(parent, str) and parent else None,
        name=name_in(data, "name") or kind,
        kind={"function": "tool"}.get(kind, "llm" if kind in _CALLS else kind),
        start=nanoseconds(moment(line.get("started_at"))),
        end=nanoseconds(moment(line.get("ended_at"))),
        error=None if not error else text(said or error) + (f": {text(detail)}" if detail else ""),
        attributes={key: value for key, value in (about | data).items() if not is_empty(key, value)},
    )
    if kind in _CALLS:
        span.call = _call(data, span.attributes)
    elif kind == "function":
        back = data.get("output")
        span.tool = Tool(
            name=span.name,
            arguments=data.get("input"),
            result=span.error if back is None else text(back),
            is_error=True if span.error else None,
        )
    elif kind == "agent":
        span.agent = span.name
    return span


def _call(data: dict[str, Any], attributes: dict[str, Any]) -> Call:
    """A generation or a response; what becomes messages is taken out of the attributes."""
    response = data.get("response") if isinstance(data.get("response"), dict) else {}
    given = prompt(data.get("input"))
    answered = answers(response or data.get("output"))
    for key in ("input", "output", "response"):
        attributes.pop(key, None)
    settings = data["model_config"] if isinstance(data.get("model_config"), dict) else {}
    settings = settings or {key: answered.rest.pop(key) for key in _SETTINGS if key in answered.rest}
    usage = data.get("usage") or (response or {}).get("usage")
    usage = usage if isinstance(usage, dict) else {}
    more = {
        "response_id": name_in(data, "response_id") or name_in(response or {}, "id"),
        "usage": {key: value for key, value in usage.items() if key not in _COUNTED and value is not None},
        "payload": {key: value for key, value in (given.rest | answered.rest).items() if key not in ("id", "usage")},
    }
    prompt_tokens, completion_tokens = usage.get("input_tokens"), usage.get("output_tokens")
    return Call(
        prompt=instructed(given, answered) or None,
        answers=answered.messages,
        tools=answered.tools or given.tools,
        sampling={key: value for key, value in settings.items() if value is not None and key != "base_url"},
        model=name_in(data, "model") or name_in(response or {}, "model"),
        prompt_tokens=count_of(usage.get("prompt_tokens") if prompt_tokens is None else prompt_tokens),
        completion_tokens=count_of(usage.get("completion_tokens") if completion_tokens is None else completion_tokens),
        extra={key: value for key, value in more.items() if value},
    )


FORMAT = Format(NAME, "OpenAI Agents SDK traces", recognise, read, no_trajectory, is_whole=True, run_folder=its_folder)
