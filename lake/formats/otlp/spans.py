"""Spans of OpenTelemetry out of whatever wraps them, in one form.

.. code-block:: text

    wrapped as   {resourceSpans: [{resource, scopeSpans: [{scope, spans}]}]}   OTLP JSON
                 {batches: [...]}, {trace: {resourceSpans}}                    Tempo
                              {data: [...]}, {spans: [...]}, a list, a span by itself       Phoenix, own exporters
                 {data: [{traceID, spans, processes}]}                         `lake.formats.otlp.jaeger`
                 {resourceLogs: ...}                                           log records: events of the span they name
    a span as    OTLP JSON, its keys also in snake case, ids in hex or base64, times as text or numbers, kinds and
                 codes as numbers or names; as the Python SDK prints it ({context: {trace_id, span_id}, ...}), or
                 as a row of a table of Phoenix (context.span_id, attributes.NAME, ...)
    becomes      {id, trace, parent, name, kind, start, end, error, attributes, events: [{name, time, attributes}],
                 scope: {name, version}, resource: {...}, more: what else it says, links for example}
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator
from typing import Any

from lake.formats.base.fields import moment
from lake.formats.base.rows import ShapeError
from lake.formats.base.secrets import redacted
from lake.formats.otlp import jaeger
from lake.formats.tracing.episodes import nanoseconds

BUNDLES = ("resourceSpans", "batches", "resource_spans", "resourceLogs", "resource_logs")
"""Keys of a document under which lists of resources with their spans stand."""
BARE = ("data", "spans")
_SCOPES = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans", "instrumentation_library_spans")
_LOG_SCOPES = ("scopeLogs", "scope_logs")
_LOGS = ("logRecords", "log_records")
_OF_A_ROW = frozenset(("context.trace_id", "context.span_id"))
_HEX = re.compile(r"(?:0[xX])?([0-9a-fA-F]{16}|[0-9a-fA-F]{32})\Z")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}\Z")
_KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
_FIRST_YEAR = 10**8
"""Seconds of 1973: what is below it as a time is none."""
_IDS = ("traceId", "trace_id", "spanId", "span_id", "parentSpanId", "parent_span_id", "parent_id", "context", "id")
_TIMES = (
    "startTimeUnixNano",
    "start_time_unix_nano",
    "start_time",
    "endTimeUnixNano",
    "end_time_unix_nano",
    "end_time",
)
_STATED = ("name", "kind", "span_kind", "attributes", "events", "status", "status_code", "status_message", "flags")
_NAMED = frozenset((*_IDS, *_TIMES, *_STATED, "resource", "scope"))
"""Keys of a span that have a place, and `flags`, which say how it was sampled."""


def spans_of(value: Any) -> Iterator[dict[str, Any] | tuple[str, Any]]:
    """The spans and events of a document, or of a part of it; (what is wrong, the value) of those that are none."""
    waiting: list[tuple[Any, str]] = [(value, "")]
    while waiting:
        item, place = waiting.pop()
        if isinstance(item, list):
            waiting += reversed([(inner, f"{place}[{index}]") for index, inner in enumerate(item)])
        elif not isinstance(item, dict):
            yield f"`{place or '$'}` is {type(item).__name__}; valid: an object with spans, or a span", item
        elif (key := next((k for k in BUNDLES if k in item), None)) is not None:
            waiting += reversed(_listed(item[key], f"{place}{key}"))
        elif jaeger.is_trace(item):
            waiting += reversed(_listed(jaeger.of_trace(item), f"{place}spans"))
        elif isinstance(item.get("trace"), dict):
            waiting.append((item["trace"], f"{place}trace."))
        elif any(k in item for k in (*_SCOPES, *_LOG_SCOPES)):
            yield from _of_resource(item, place)
        elif (key := next((k for k in BARE if isinstance(item.get(k), list)), None)) is not None:
            waiting += reversed(_listed(item[key], f"{place}{key}"))
        elif is_span(item):
            yield from _one(item, place, {}, {})
        elif "resource" not in item and "schemaUrl" not in item:
            yield f"`{place or '$'}` is an object without spans; valid: resourceSpans, or a span with traceId", item


def is_span(value: Any) -> bool:
    """Whether an object is a span by itself."""
    if not isinstance(value, dict) or "rollout_id" in value:
        return False
    if jaeger.is_span(value) or value.keys() >= _OF_A_ROW:
        return True
    if isinstance(value.get("context"), dict) and "trace_id" in value["context"]:
        return "name" in value and ("start_time" in value or "attributes" in value)
    has_ids = ("traceId" in value and "spanId" in value) or ("trace_id" in value and "span_id" in value)
    return has_ids and "name" in value and any(key in value for key in ("startTimeUnixNano", "start_time_unix_nano"))


def any_value(value: Any) -> Any:
    """What a value of OTLP says."""
    if not isinstance(value, dict) or len(value) != 1:
        return value if value != {} else None
    ((kind, inner),) = value.items()
    kind = kind.replace("_v", "V")
    if kind == "intValue":
        return int(inner) if isinstance(inner, str) and re.fullmatch(r"-?\d{1,19}", inner) else inner
    if kind == "arrayValue":
        items = inner.get("values") if isinstance(inner, dict) else None
        return [any_value(item) for item in items] if isinstance(items, list) else []
    if kind == "kvlistValue":
        return attributes_of(inner.get("values") if isinstance(inner, dict) else None)
    return inner if kind in ("stringValue", "boolValue", "doubleValue", "bytesValue") else value


def attributes_of(given: Any) -> dict[str, Any]:
    """Attributes as a dict: a list of keys and values, or a dict already."""
    if isinstance(given, dict):
        return {str(key): value for key, value in given.items() if value is not None}
    pairs = [pair for pair in given if isinstance(pair, dict)] if isinstance(given, list) else []
    return {str(pair.get("key")): any_value(pair.get("value")) for pair in pairs}


def span_id(value: Any) -> str | None:
    """An id as hex, however it is written; None for that of no span."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return f"{value:x}"
    if not isinstance(value, str) or not value.strip("0 "):
        return None
    if found := _HEX.match(value):
        return found[1].lower() if found[1].strip("0") else None
    if len(value) in (12, 24) and _BASE64.match(value):
        try:
            data = b64decode(value.replace("-", "+").replace("_", "/"))
        except (Base64Error, ValueError):
            return value
        if len(data) in (8, 16):
            return data.hex() if any(data) else None
    return value


def instant(value: Any) -> int | None:
    """A time in nanoseconds since 1970: nano-, micro- or milliseconds or seconds by its size, or ISO text."""
    if isinstance(value, str):
        if not re.fullmatch(r"\d{1,30}", value):
            return nanoseconds(moment(value))
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _FIRST_YEAR <= value < 1 << 63:
        return None
    return int(value * next((factor for limit, factor in _SCALES if value >= limit), 1))


_SCALES = ((_FIRST_YEAR * 10**9, 1), (_FIRST_YEAR * 10**6, 10**3), (_FIRST_YEAR * 10**3, 10**6), (0, 10**9))


def _listed(value: Any, place: str) -> list[tuple[Any, str]]:
    items = value if isinstance(value, list) else [value]
    return [(item, f"{place}[{index}]") for index, item in enumerate(items)]


def _of_resource(item: dict[str, Any], place: str) -> Iterator[dict[str, Any] | tuple[str, Any]]:
    given = item.get("resource")
    resource = attributes_of(given.get("attributes")) if isinstance(given, dict) else {}
    for scope_key, keys in (*((key, ("spans",)) for key in _SCOPES), *((key, _LOGS) for key in _LOG_SCOPES)):
        for scope, at in _listed(item.get(scope_key) or [], f"{place}.{scope_key}"):
            if not isinstance(scope, dict):
                yield f"`{at}` is {type(scope).__name__}; valid: an object with spans", scope
                continue
            by = scope.get("scope", scope.get("instrumentationLibrary"))
            by = {key: by[key] for key in ("name", "version") if by.get(key)} if isinstance(by, dict) else {}
            for key in keys:
                for span, where in _listed(scope.get(key) or [], f"{at}.{key}"):
                    yield from _log(span, where) if key in _LOGS else _one(span, where, by, resource)


def _one(span: Any, place: str, scope: Any, resource: Any) -> Iterator[dict[str, Any] | tuple[str, Any]]:
    try:
        found = _span(span, place)
    except ShapeError as error:
        yield str(error), span
        return
    except RecursionError:
        yield f"an attribute of `{place}` is nested too deeply", span
        return
    yield found | {"scope": scope or found["scope"], "resource": resource or found["resource"]}


def _first(holder: dict[str, Any], *keys: str) -> Any:
    return next((holder[key] for key in keys if holder.get(key) is not None), None)


def _span(span: Any, place: str) -> dict[str, Any]:
    if not isinstance(span, dict):
        raise ShapeError(f"`{place}` is {type(span).__name__}; valid: a span, an object with traceId and spanId")
    span = jaeger.as_otlp(span) if jaeger.is_span(span) else _of_a_row(span) if span.keys() >= _OF_A_ROW else span
    context = span["context"] if isinstance(span.get("context"), dict) else span
    trace = span_id(_first(context, "traceId", "trace_id"))
    own = span_id(_first(context, "spanId", "span_id"))
    for name, found in (("traceId", trace), ("spanId", own)):
        if found is None:
            given = _first(context, name, "trace_id" if name == "traceId" else "span_id")
            raise ShapeError(f"`{place}.{name}` is {given!r}; valid: an id in hex or base64")
    status = span["status"] if isinstance(span.get("status"), dict) else {}
    given = span["events"] if isinstance(span.get("events"), list) else []
    events = [
        {
            "name": str(event.get("name", "")),
            "time": instant(_first(event, "timeUnixNano", "time_unix_nano", "timestamp")),
            "attributes": attributes_of(event.get("attributes")),
        }
        for event in given
        if isinstance(event, dict)
    ]
    resource, scope, kind = span.get("resource"), span.get("scope"), span.get("kind")
    marked = {"openinference.span.kind": span["span_kind"]} if isinstance(span.get("span_kind"), str) else {}
    return {
        "id": own,
        "trace": trace,
        "parent": span_id(_first(span, "parentSpanId", "parent_span_id", "parent_id")),
        "name": str(span.get("name") or ""),
        "kind": _KINDS.get(kind, str(kind)) if isinstance(kind, int) else str(kind or "").rpartition("_")[2],
        "start": instant(_first(span, "startTimeUnixNano", "start_time_unix_nano", "start_time")),
        "end": instant(_first(span, "endTimeUnixNano", "end_time_unix_nano", "end_time")),
        "error": _error(span, status, events),
        "attributes": attributes_of(span.get("attributes")) | marked,
        "events": events,
        "scope": scope if isinstance(scope, dict) else {},
        "resource": attributes_of(resource.get("attributes", resource)) if isinstance(resource, dict) else {},
        "more": {key: value for key, value in span.items() if key not in _NAMED and value not in (None, "", [], {})},
    }


def _of_a_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table of spans, whose columns have dotted names, as a span."""
    found: dict[str, Any] = {"attributes": {}, "context": {}}
    for key, value in row.items():
        holder, _, name = key.partition(".")
        if name and holder in found:
            found[holder][name] = value
        else:
            found[key] = value
    return found | {"attributes": attributes_of(found["attributes"])}


def _error(span: dict[str, Any], status: dict[str, Any], events: list[dict[str, Any]]) -> str | None:
    """Why a span failed; None if it did not."""
    code = _first(status, "code", "status_code") or span.get("status_code")
    if code != 2 and not str(code).endswith("ERROR"):
        return None
    thrown: dict[str, Any] = next((event["attributes"] for event in events if event["name"] == "exception"), {})
    parts = (thrown.get("exception.type"), thrown.get("exception.message"))
    message = _first(status, "message", "description") or span.get("status_message")
    return redacted(str(message or ": ".join(str(part) for part in parts if part) or "error"))


def _log(record: Any, place: str) -> Iterator[dict[str, Any] | tuple[str, Any]]:
    """A log record as an event of the span that it names; one that names none belongs to no trace."""
    if not isinstance(record, dict):
        yield f"`{place}` is {type(record).__name__}; valid: a log record", record
        return
    trace, own = span_id(_first(record, "traceId", "trace_id")), span_id(_first(record, "spanId", "span_id"))
    if trace is None or own is None:
        return
    attributes = attributes_of(record.get("attributes"))
    name = _first(record, "eventName", "event_name") or attributes.get("event.name") or ""
    body = any_value(record.get("body"))
    yield {
        "trace": trace,
        "of": own,
        "name": str(name),
        "time": instant(_first(record, "timeUnixNano", "observedTimeUnixNano", "time_unix_nano")),
        "attributes": attributes | (body if isinstance(body, dict) else {} if body is None else {"body": body}),
    }
