"""OpenTelemetry traces of agents: OTLP JSON, however it is wrapped, under any of the conventions for calls of models.

Also traces as Jaeger writes them, and tables of spans of Phoenix. `lake.formats.otlp.spans` says what wraps spans; the
conventions are `otlp.genai`, `otlp.openinference`, `otlp.vercel` and `langfuse.observation`. The spans of a trace may
stand anywhere in a file.

* A trace is an episode, its calls in order of their start are the decisions (`tracing.tree`). A trace without a
  call of a model is rejected: services write many.
* The task is the trace, because nothing in it says which others are its siblings; only experiments of Langfuse name
  the item of a dataset. A session or conversation is in `extra`. The environment is the service's name.
* Scores: events gen_ai.evaluation.result, annotations of OpenInference; those of a call's span are of its step.
* All spans are kept, without the messages that became steps. What a span says beside its attributes is under `otel`.

The conventions have no version in a file; `source_version` is the instrumentation that wrote the first call.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lake.formats.base.fields import sibling_number
from lake.formats.base.format import Format, its_folder
from lake.formats.base.json_array import Element, Member
from lake.formats.base.look import HEAD_BYTES, Look, look
from lake.formats.base.rows import Item, ShapeError, items_of, members, values
from lake.formats.base.source import Input
from lake.formats.langfuse import observation as langfuse_observation
from lake.formats.otlp import genai as otlp_genai
from lake.formats.otlp import jaeger
from lake.formats.otlp import openinference as otlp_openinference
from lake.formats.otlp import vercel as otlp_vercel
from lake.formats.otlp.spans import BARE, BUNDLES, is_span, span_id, spans_of
from lake.formats.tracing.attributes import first, name_in
from lake.formats.tracing.episodes import episodes, span_record, time
from lake.formats.tracing.payloads import decoded
from lake.formats.tracing.tree import Span, Trace, traces
from lake.records import EpisodeRecord, Reject, SpanRecord, excerpt

NAME = "otlp"
_OF_MODELS = re.compile(
    r"gen_ai|\bllm\.|openinference|langfuse\.observation|\bai\.(?:operationId|toolCall|prompt)|mlflow\.span"
)
_TRACE_ID = re.compile(r'"trace_?[iI]d"\s*:\s*"([^"]{16,40})"')
_SESSIONS = ("session.id", "gen_ai.conversation.id", "langfuse.session.id", "langfuse.trace.session_id")
_NAMES = ("run_id", "task_id", "rollout_index", "attempt", "agent_id", "collection_round", "split")
"""What a rollout is called, by the fields of its record."""
_ABOUT = {"user": ("user.id", "langfuse.user.id"), "workflow": ("gen_ai.workflow.name", "traceloop.workflow.name")}


def recognise(look: Look) -> bool:
    """Whether a file holds resources with spans, or spans."""
    if look.kind == "parquet":
        return {"context.trace_id", "context.span_id"} <= set(look.names)
    return any(_is_document(value) for value in look.objects)


def no_trajectory(look: Look) -> str | None:
    """What a file of metrics or logs is, and one of traces of which none is of a model."""
    if look.kind not in ("lines", "array", "object"):
        return None
    if look.has("resourceMetrics") and not recognise(look):
        return "it holds OpenTelemetry metrics; ingest the file of traces"
    kinds = [key for key in ("resourceLogs", "resource_logs") if look.has(key)]
    if kinds and not look.has("resourceSpans") and len(look.text.encode()) < HEAD_BYTES // 2:
        return "it holds OpenTelemetry log records without spans; ingest a file that has the spans too"
    if recognise(look) and len(look.text.encode()) < HEAD_BYTES // 2 and not _OF_MODELS.search(look.text):
        return (
            "none of its OpenTelemetry spans is a call of a model (no gen_ai, llm or openinference attribute); ingest "
            "traces of an instrumented agent"
        )
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file; a trace stands where its first span does."""
    yield from _read(_elements(file), file)


def read_rollout(found: Iterable[Any], rollout: EpisodeRecord) -> Iterator[Item]:
    """Records and rejects of what was received, and is no file: one episode, and those of its sub-agents.

    Args:
        found: documents or spans; they may be of several traces, and the first one's id stands for all.
        rollout: the names of the episode: run, task, rollout index, attempt, agent, collection round, split.
    """
    yield from _read(_received(found), Input(Path(NAME), rollout.run_id or NAME), rollout)


def span_records(found: Iterable[Any]) -> Iterator[SpanRecord]:
    """The spans of documents that no episode is made of, because its steps are known from elsewhere."""
    for item in traces(_pieces(_received(found), {})):
        if isinstance(item, Reject):
            continue
        trace_id, element = item
        told, own = _divided(element.value)
        for piece in own:
            yield span_record(_span(piece, told.get(piece["id"], []), own[0]["resource"]), trace_id, None)


def _received(found: Iterable[Any]) -> Iterator[Element]:
    return (Element(index, value, source=None) for index, value in enumerate(found))


def _read(elements: Iterable[Element | Reject], file: Input, rollout: EpisodeRecord | None = None) -> Iterator[Item]:
    lost: dict[str, int] = {}
    pieces = _pieces(elements, lost)
    for found in traces(pieces if rollout is None else _joined(pieces)):
        if isinstance(found, Reject):
            yield found
        else:
            trace_id, element = found
            missing = lost.get(trace_id, 0)
            yield from items_of(
                element,
                NAME,
                lambda pieces: _episodes(trace_id, pieces, missing, file, rollout),  # noqa: B023
            )


def _joined(pieces: Iterable[tuple[str, int, Any] | Reject]) -> Iterator[tuple[str, int, Any] | Reject]:
    """Pieces of several traces as those of the first; the others' ids stay in what else their spans say."""
    first: str | None = None
    for item in pieces:
        if isinstance(item, Reject):
            yield item
            continue
        trace_id, index, piece = item
        first = first or trace_id
        if trace_id != first and "more" in piece:
            piece["more"]["trace_id"] = trace_id
        yield first, index, piece


def _is_document(value: dict[str, Any]) -> bool:
    if any(key in value for key in ("resourceSpans", "resource_spans", "resourceLogs")) or is_span(value):
        return True
    trace, batches = value.get("trace"), value.get("batches")
    if isinstance(trace, dict) and "resourceSpans" in trace:
        return True
    if isinstance(batches, list):
        return any(isinstance(batch, dict) and ("scopeSpans" in batch or "resource" in batch) for batch in batches)
    data: list[Any] = next((value[key] for key in BARE if isinstance(value.get(key), list)), [])
    # Of a damaged document only the keys are known.
    return any(is_span(item) or jaeger.is_trace(item) for item in data) or (
        "batches" in value and "scopeSpans" in value
    )


def _pieces(elements: Iterable[Element | Reject], lost: dict[str, int]) -> Iterator[tuple[str, int, Any] | Reject]:
    """Spans and events by trace. `lost` counts the damaged parts that name a trace."""
    for item in elements:
        if isinstance(item, Reject) or item.problem is not None:
            raw = item.raw
            for trace in {span_id(found) or found for found in _TRACE_ID.findall(raw)}:
                lost[trace] = lost.get(trace, 0) + 1
            problem = "" if isinstance(item, Reject) else item.problem or ""
            yield item if isinstance(item, Reject) else _reject(item.index, problem, raw)
            continue
        for piece in spans_of(item.value):
            if isinstance(piece, dict):
                yield piece["trace"], item.index, piece
            else:
                problem, value = piece
                yield _reject(item.index, problem, Element(0, value, source=None).raw)


def _reject(position: int, message: str, raw: str) -> Reject:
    return Reject(position=position, reason="invalid", message=excerpt(message), raw=raw)


def _elements(file: Input) -> Iterator[Element | Reject]:
    """The parts of a file that are decoded at a time."""
    seen = look(file.path)
    if seen.kind != "object":
        yield from values(file)
    elif seen.text.lstrip().partition("\n")[0].rstrip() == "{" and is_span(seen.first):
        yield from _printed(file)
    else:
        for item in members(file, *BUNDLES, *BARE):
            if not isinstance(item, Member):
                yield item
            elif item.key == "trace":
                yield Element(0, item.value, source=None)


def _printed(file: Input) -> Iterator[Element | Reject]:
    """Spans that stand one after the other, each on many lines, as the Python SDK prints them."""
    from lake.formats.base.lines import read_lines

    lines: list[bytes] = []
    for item in read_lines(file):
        if isinstance(item, Reject):
            yield item
            continue
        number, line = item
        lines.append(line)
        if line.rstrip() == b"}":
            yield _decoded(number - len(lines) + 1, b"".join(lines))
            lines = []
    if lines:
        yield _decoded(file.from_line - len(lines) + 1, b"".join(lines))


def _decoded(number: int, data: bytes) -> Element | Reject:
    text = data.decode("utf-8", errors="backslashreplace")
    value = decoded(text)
    if isinstance(value, dict):
        return Element(number, value, source=data)
    return Reject(position=number, reason="malformed", message="not JSON: a span that begins here", raw=excerpt(text))


def _divided(pieces: list[Any]) -> tuple[dict[str, list[Any]], list[Any]]:
    """The events of each span that log records told, and the spans."""
    told: dict[str, list[Any]] = {}
    for piece in pieces:
        if "id" not in piece:
            told.setdefault(piece["of"], []).append(piece)
    return told, [piece for piece in pieces if "id" in piece]


def _episodes(
    trace_id: str, pieces: list[Any], lost: int, file: Input, rollout: EpisodeRecord | None
) -> list[EpisodeRecord]:
    """A trace as episodes. Raises ShapeError: it has no call of a model, or says nothing of it."""
    told, own = _divided(pieces)
    if not own:
        raise ShapeError(f"trace {trace_id!r} has log records and no span; ingest them together with its spans")
    trace = Trace(id=trace_id, spans=[], task_id=trace_id)
    said: dict[str, Any] = {}
    resources = [piece["resource"] for piece in own]
    for piece in own:
        attributes = piece["attributes"]
        if isinstance(attributes.get("openinference"), dict):
            attributes = piece["attributes"] = _flat(attributes)
        said = attributes | said
        trace.scores += otlp_openinference.trace_scores(attributes)
        trace.spans.append(_span(piece, told.get(piece["id"], []), resources[0]))
    versions = [piece["scope"] for piece, span in zip(own, trace.spans, strict=True) if span.call and piece["scope"]]
    if versions:
        trace.source_version = " ".join(str(versions[0][key]) for key in ("name", "version") if versions[0].get(key))
    service = resources[0].get("service.name")
    trace.environment = service if isinstance(service, str) and not service.startswith("unknown_service") else None
    if item := name_in(said, *langfuse_observation.ITEM):
        trace.task_id, trace.rollout_index = item, sibling_number(trace_id)
        trace.run_id = name_in(said, *langfuse_observation.RUN)
        trace.ground_truth = decoded(first(said, *langfuse_observation.EXPECTED))
    if rollout is not None:
        for name in _NAMES:
            setattr(trace, name, getattr(rollout, name))
    names = {"session": _SESSIONS, **_ABOUT}
    more = {key: first(said, *keys) for key, keys in names.items()}
    more |= {"resource": resources[0] or None, "lost_lines": lost or None}
    trace.extra = {key: value for key, value in more.items() if value is not None}
    return episodes(trace, file, NAME)


def _span(piece: dict[str, Any], logged: list[Any], resource: dict[str, Any]) -> Span:
    span = Span(
        id=piece["id"],
        parent=piece["parent"],
        name=piece["name"],
        kind=piece["kind"].lower() or "span",
        start=piece["start"],
        end=piece["end"],
        error=piece["error"],
        attributes=piece["attributes"],
    )
    events = [*piece["events"], *logged]
    span.scores += otlp_genai.evaluations(events)
    kind = span.kind
    if (
        not otlp_openinference.fill(span)
        and not langfuse_observation.fill_of_sdk(span)
        and not otlp_vercel.fill(span, events)
    ):
        otlp_genai.fill(span, events)
    elif span.call is not None and not span.call.is_recorded:
        also = otlp_genai.call_of(span.attributes, events)
        span.call.prompt, span.call.answers = also.prompt, also.answers
    kept = []
    for event in events:
        at = time(event["time"])
        about_event = {"name": event["name"], "time": at and at.isoformat(), "attributes": event["attributes"]}
        kept.append({key: value for key, value in about_event.items() if value})
    about = {
        "kind": kind if kind != span.kind else None,
        "events": [event for event in kept if event],
        "scope": piece["scope"],
        "resource": piece["resource"] if piece["resource"] != resource else None,
        **piece["more"],
    }
    otel = {key: value for key, value in about.items() if value}
    span.attributes |= {"otel": otel} if otel else {}
    return span


def _flat(said: dict[str, Any]) -> dict[str, Any]:
    """Attributes that are nested, with dotted names instead; lists stay."""
    found: dict[str, Any] = {}
    waiting = [("", said)]
    while waiting:
        prefix, value = waiting.pop()
        for key, inner in value.items():
            if isinstance(inner, dict) and inner:
                waiting.append((f"{prefix}{key}.", inner))
            else:
                found[prefix + key] = inner
    return found


FORMAT = Format(
    NAME,
    "OpenTelemetry traces (OTLP JSON; GenAI, OpenInference)",
    recognise,
    read,
    no_trajectory,
    is_whole=True,
    run_folder=its_folder,
)
