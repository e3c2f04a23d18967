"""A receiver of OpenTelemetry: spans, and log records that belong to spans, over OTLP/HTTP.

.. code-block:: text

    POST .../v1/traces   ExportTraceServiceRequest   spans
    POST .../v1/logs     ExportLogsServiceRequest    log records, in which some instrumentations put what was said

In JSON or protobuf, packed with gzip or not (the OTLP/HTTP specification 1.x). An exporter is told
that it may forget its spans once they are on the disk. Those that name no trace are taken too: they are rejects.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from lake.errors import UsageError
from lake.formats.base.secrets import NO_REQUEST, Secrets
from lake.formats.otlp.spans import span_id
from lake.live.calls.shapes import NO_JSON
from lake.live.frames import Traced
from lake.live.proxy.replies import RefusedError

_PROTOBUF, _JSON = "application/x-protobuf", "application/json"
_SIGNALS = {
    "/v1/traces": ("resourceSpans", "scopeSpans", "spans"),
    "/v1/logs": ("resourceLogs", "scopeLogs", "logRecords"),
}
"""Path -> keys under which a request holds its resources, their scopes, and what it is about."""
_TRACES = 10_000
"""Of a request: each is an episode."""
_IN_A_FRAME = 500
"""Spans."""
PATHS = frozenset((*_SIGNALS, "/v1/metrics"))


def refuse_misplaced(path: str, address: str) -> None:
    """Keep what an exporter sends to a path of another depth from the upstream, which may be a vendor.

    Args:
        path: from the first `/v1` on.
        address: what stands before it.

    Raises:
        RefusedError: the path ends as an exporter's does, and is none.
    """
    if path not in PATHS and path.rstrip("/").endswith(tuple(PATHS)):
        raise RefusedError(
            404,
            f"{path} takes no spans; exporters add /v1/traces to their endpoint themselves, so set "
            f"OTEL_EXPORTER_OTLP_ENDPOINT={address}",
        )


def received(path: str, content_type: str, body: bytes, secrets: Secrets = NO_REQUEST) -> list[tuple[Traced, bool]]:
    """What an exporter sent, by trace, and whether the root of the trace is among it.

    Args:
        path: of one of the signals.
        content_type: of the body.
        body: as it came.
        secrets: what the exporter's request brought.

    Raises:
        RefusedError: metrics, or a type of content that is none of OTLP.
        UsageError: the body is not of OTLP.
    """
    if path not in _SIGNALS:
        raise RefusedError(404, "metrics are not recorded; set OTEL_METRICS_EXPORTER=none")
    try:
        document = secrets.without_keys(_decoded(path, content_type, body))
    except NO_JSON as error:
        raise UsageError(f"the body is no OTLP JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"the body is {type(document).__name__}; valid: an object with {_SIGNALS[path][0]}")
    resources, scopes, items = _SIGNALS[path]
    found = []
    traces = _by_trace(document, resources, scopes, items)
    if len(traces) > _TRACES:
        raise RefusedError(413, f"the request has spans of {len(traces):,} traces; send {_TRACES:,} at a time at most")
    for trace_id, (parts, is_over) in traces.items():
        for part in _pieces(parts, scopes, items):
            found.append((Traced(trace_id=trace_id, document={resources: part}), is_over))
    return found


def acknowledged(content_type: str) -> web.Response:
    """What an exporter is told: all of it was taken. An empty message has no bytes in protobuf."""
    is_json = content_type == _JSON
    return web.Response(body=b"{}" if is_json else b"", content_type=_JSON if is_json else _PROTOBUF)


def _decoded(path: str, content_type: str, body: bytes) -> Any:
    if content_type == _JSON:
        return msgspec.json.decode(body)
    if content_type != _PROTOBUF:
        raise RefusedError(415, f"the content is {content_type!r}; valid: {_PROTOBUF}, {_JSON}")
    try:
        from google.protobuf.json_format import MessageToDict
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError as error:
        raise RefusedError(
            415,
            'OTLP in protobuf needs the package opentelemetry-proto: pip install "trajlake[record]"; or export JSON: '
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/json",
        ) from error
    kinds: dict[str, Callable[[], Any]] = {
        "/v1/traces": ExportTraceServiceRequest,
        "/v1/logs": ExportLogsServiceRequest,
    }
    message = kinds[path]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UsageError(f"the body is no OTLP protobuf: {error}") from error
    return MessageToDict(message)


def _by_trace(
    document: dict[str, Any], resources: str, scopes: str, items: str
) -> dict[str, tuple[list[dict[str, Any]], bool]]:
    """The parts of a document by trace, each below its own resource and scope, and whether a root is among them."""
    found: dict[str, tuple[list[dict[str, Any]], bool]] = {}
    for resource, scope, item in _walked(document, resources, scopes, items):
        trace_id, is_root = "", False
        if isinstance(item, dict):
            trace_id = span_id(item.get("traceId")) or ""
            is_root = items == "spans" and span_id(item.get("parentSpanId")) is None
        if items != "spans" and not trace_id:
            continue  # of no span
        parts, is_over = found.get(trace_id, ([], False))
        if not parts or parts[-1]["resource"] is not resource.get("resource"):
            parts.append({"resource": resource.get("resource"), scopes: []})
        of_resource = parts[-1][scopes]
        if not of_resource or of_resource[-1]["scope"] is not scope.get("scope"):
            of_resource.append({"scope": scope.get("scope"), items: []})
        of_resource[-1][items].append(item)
        found[trace_id] = parts, is_over or is_root
    return found


def _pieces(resources: list[dict[str, Any]], scopes: str, items: str) -> Iterator[list[dict[str, Any]]]:
    """The same in pieces of so many spans that to record one keeps nobody waiting."""
    for resource in resources:
        for scope in resource[scopes]:
            for start in range(0, len(scope[items]), _IN_A_FRAME):
                part = scope | {items: scope[items][start : start + _IN_A_FRAME]}
                yield [resource | {scopes: [part]}]


def _walked(document: dict[str, Any], *keys: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], Any]]:
    """Every span or log record with its resource and its scope. Raises UsageError: something is of the wrong type."""
    resources, scopes, items = keys
    for resource in _listed(document, resources):
        for scope in _listed(resource, scopes):
            for item in _listed(scope, items):
                yield resource, scope, item


def _listed(holder: Any, key: str) -> list[Any]:
    if not isinstance(holder, dict):
        raise UsageError(f"what holds `{key}` is {type(holder).__name__}; valid: an object")
    found = holder.get(key) or []
    if not isinstance(found, list):
        raise UsageError(f"`{key}` is {type(found).__name__}; valid: a list")
    return found
