"""Traces of OpenTelemetry as Jaeger's interface and its API write them, brought into the form of OTLP.

.. code-block:: text

    trace     {traceID, spans, processes: {processID: {serviceName, tags}}}; in {data: [trace]}
    span      {traceID, spanID, operationName, references: [{refType, spanID}], startTime, duration (microseconds),
               tags: [{key, type, value}], logs: [{timestamp, fields: [{key, value}]}], processID}
"""

from typing import Any

_OF_STATUS = ("error", "otel.status_code", "otel.status_description", "span.kind", "internal.span.format")
_SCOPES = (("otel.scope.name", "otel.scope.version"), ("otel.library.name", "otel.library.version"))


def is_trace(value: Any) -> bool:
    """Whether a value is a trace with its spans."""
    return isinstance(value, dict) and "traceID" in value and isinstance(value.get("spans"), list)


def is_span(value: Any) -> bool:
    """Whether a value is a span."""
    return isinstance(value, dict) and all(key in value for key in ("traceID", "spanID", "operationName"))


def of_trace(value: dict[str, Any]) -> list[Any]:
    """The spans of a trace, each with the process that it ran in; what is no span as it is."""
    given = value.get("processes")
    processes = given if isinstance(given, dict) else {}
    return [
        span | {"process": processes.get(str(span.get("processID")))} if is_span(span) else span
        for span in value["spans"]
    ]


def as_otlp(span: dict[str, Any]) -> dict[str, Any]:
    """A span in the form of OTLP."""
    said = _tags(span.get("tags"))
    status = {"code": said.get("otel.status_code"), "message": said.get("otel.status_description")}
    if said.get("error") is True:
        status["code"] = 2
    scope: dict[str, Any] = {}
    for name, version in _SCOPES:
        scope = scope or {"name": said.pop(name, None), "version": said.pop(version, None)}
        scope = {key: inner for key, inner in scope.items() if inner}
    start, duration = (value if isinstance(value := span.get(key), int) else None for key in ("startTime", "duration"))
    process = span["process"] if isinstance(span.get("process"), dict) else {}
    service = {"service.name": process["serviceName"]} if process.get("serviceName") else {}
    references = [one for one in _dicts(span.get("references")) if one.get("refType", "CHILD_OF") == "CHILD_OF"]
    return {
        "traceId": span["traceID"],
        "spanId": span["spanID"],
        "parentSpanId": references[0].get("spanID") if references else span.get("parentSpanID"),
        "name": span["operationName"],
        "kind": said.get("span.kind"),
        "startTimeUnixNano": None if start is None else start * 1000,
        "endTimeUnixNano": None if start is None or duration is None else (start + duration) * 1000,
        "status": status,
        "attributes": {key: value for key, value in said.items() if key not in _OF_STATUS},
        "events": [_event(log) for log in _dicts(span.get("logs"))],
        "scope": scope,
        "resource": {"attributes": service | _tags(process.get("tags"))},
    }


def _event(log: dict[str, Any]) -> dict[str, Any]:
    fields = _tags(log.get("fields"))
    at = log.get("timestamp")
    return {
        "name": fields.pop("event", ""),
        "timeUnixNano": at * 1000 if isinstance(at, int) else None,
        "attributes": fields,
    }


def _tags(given: Any) -> dict[str, Any]:
    return {str(tag["key"]): tag.get("value") for tag in _dicts(given) if "key" in tag}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
