"""OpenTelemetry traces: what wraps spans, how spans are written, and real files."""

import base64
import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lake.errors import FormatError
from lake.formats.otlp.reader import decode_any_value, normalise_id, parse_instant
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import shared_data

MADE = Path(__file__).parent.parent / "golden" / "formats" / "otlp"
TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319c"
BEGIN = 1767225600 * 10**9
ASKED = [{"role": "user", "parts": [{"type": "text", "content": "Weather?"}]}]
SAID = [{"role": "assistant", "parts": [{"type": "text", "content": "Sunny."}], "finish_reason": "stop"}]
HELLO = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "m-1",
    "gen_ai.input.messages": json.dumps(ASKED),
    "gen_ai.output.messages": json.dumps(SAID),
}


def value_of(value: Any) -> Any:
    """A value as OTLP writes it."""
    for kind, name in ((bool, "boolValue"), (str, "stringValue"), (float, "doubleValue")):
        if isinstance(value, kind):
            return {name: value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [value_of(item) for item in value]}}
    return {"kvlistValue": {"values": pairs(value)}}


def pairs(attributes: dict[str, Any]) -> list[Any]:
    return [{"key": key, "value": value_of(value)} for key, value in attributes.items()]


def span(
    attributes: dict[str, Any] | None = None, span_id: str = "00000000000000a1", at: int = 0, **fields: Any
) -> dict[str, Any]:
    """A span of a second."""
    return {
        "traceId": TRACE,
        "spanId": span_id,
        "name": "chat m-1",
        "kind": 3,
        "startTimeUnixNano": str(BEGIN + at * 10**9),
        "endTimeUnixNano": str(BEGIN + (at + 1) * 10**9),
        "attributes": pairs(HELLO if attributes is None else attributes),
        "status": {},
    } | fields


def document(*spans: Any, resource: dict[str, Any] | None = None) -> dict[str, Any]:
    about = {"attributes": pairs({"service.name": "weather"} if resource is None else resource)}
    return {
        "resourceSpans": [
            {"resource": about, "scopeSpans": [{"scope": {"name": "s", "version": "1"}, "spans": list(spans)}]}
        ]
    }


def written(path: Path, *values: Any, lines: bool = False) -> Path:
    text = "".join(json.dumps(value) + "\n" for value in values) if lines else json.dumps(values[0])
    path.write_text(text, "utf-8")
    return path


def read_one(path: Path, *values: Any, lines: bool = False) -> EpisodeRecord:
    """The only episode of a file."""
    assert choose_format(written(path, *values, lines=lines)).name == "otlp"
    (record,), rejects = read_file(path)
    assert rejects == []
    return record


# ---------------------------------------------------------------- real files, counted plainly


def plain(value: Any) -> Any:
    """A value of OTLP, by its only member."""
    ((kind, inner),) = value.items()
    return [plain(item) for item in inner["values"]] if kind == "arrayValue" else inner


def expected(path: Path) -> Counts:
    """What a plain reading of a file finds: calls, their texts and calls of tools, by whichever attributes say them."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    episodes, decisions, n_calls, characters = set(), 0, 0, 0
    for line in text.splitlines():
        value = json.loads(line)
        resources = (
            value.get("resourceSpans") or value.get("batches") or value.get("trace", {}).get("resourceSpans") or []
        )
        for raw_span in [s for r in resources for scope in r["scopeSpans"] for s in scope["spans"]]:
            attributes = {pair["key"]: plain(pair["value"]) for pair in raw_span.get("attributes", ())}
            kind = (
                attributes.get("openinference.span.kind")
                or attributes.get("llm.request.type")
                or attributes.get("gen_ai.operation.name")
            )
            if kind not in ("LLM", "chat"):
                continue
            decisions += 1
            episodes.add((raw_span["traceId"], attributes.get("gen_ai.agent.name")))
            pieces = [p for m in json.loads(attributes.get("gen_ai.output.messages", "[]")) for p in m["parts"]]
            n_calls += sum(part["type"] == "tool_call" for part in pieces)
            characters += sum(len(part["content"]) for part in pieces if part["type"] == "text")
            n_calls += sum(key.endswith(("completion.0.tool_calls.0.name",)) for key in attributes)
            n_calls += sum(key.startswith("llm.output") and key.endswith("function.name") for key in attributes)
            characters += len(attributes.get("gen_ai.completion.0.content", ""))
            characters += len(attributes.get("llm.output_messages.0.message.content", ""))
        logs = [s for r in value.get("resourceLogs", ()) for s in r["scopeLogs"]]
        for record in [r for scope in logs for r in scope["logRecords"] if r["eventName"] == "gen_ai.choice"]:
            body = json.dumps(record["body"])
            n_calls += body.count('"key": "arguments"')
            characters += len("So it is: 22C in Paris") if '"stop"' in body else 0
    return Counts(len(episodes), decisions, n_calls, [], characters)


REAL = ("openinference_openai.json", "traceloop_openai.json")


@pytest.mark.parametrize("name", REAL)
def test_a_real_file_holds_what_a_plain_count_finds(name: str) -> None:
    path = shared_data("formats", "otlp", name)
    records, rejects = read_file(path)
    assert rejects == []
    assert counts(records) == expected(path)
    assert counts(records)[:3] == (2, 4, 2)
    first = records[0]
    assert [step.state for step in first.steps] == ["Weather in Paris?", "22C"]
    assert first.steps[1].action.startswith("The answer is ")
    assert first.steps[1].context[0]["tool_call_id"] == (first.steps[0].tool_calls or [])[0]["id"]
    assert (first.environment, first.policy, first.sampling) == (
        "weather-agent",
        "mock-1",
        {"max_tokens": 64, "temperature": 0.5},
    )
    assert first.tools is not None
    assert "get_weather" in json.dumps(first.tools)
    assert [(span.kind, span.step_index) for span in first.spans] == [
        ("agent", None),
        ("llm", 0),
        ("tool", 0),
        ("llm", 1),
    ]
    assert {step.agent_id for step in first.steps} == {"weather"}
    assert "You are a weather agent" not in json.dumps([span.attributes for span in first.spans])


def test_a_session_is_kept_and_a_trace_is_a_task_of_its_own() -> None:
    records, _ = read_file(shared_data("formats", "otlp", REAL[0]))
    assert [record.extra and record.extra["session"] for record in records] == ["sess-1", "sess-1"]
    assert [record.task_id for record in records] == [record.spans[0].trace_id for record in records]


MADE_FILES = (
    "pydantic_ai.jsonl",
    "openinference_langgraph.json",
    "traceloop_langgraph.json.gz",
    "traceloop_0.40.json",
    "openai_v2.jsonl",
)


@pytest.mark.parametrize("name", MADE_FILES)
def test_spans_of_instrumentations_hold_what_a_plain_count_finds(name: str) -> None:
    records, rejects = read_file(MADE / name)
    assert rejects == []
    assert counts(records) == expected(MADE / name)
    states = [step.state for record in records for step in record.steps]
    assert states[0] == "Weather in Paris?"
    assert all(step.trainable and step.latency is not None for record in records for step in record.steps)
    assert records[0].initial_messages is not None
    assert [message["role"] for message in records[0].initial_messages] == ["system", "user"]
    assert records[0].started_at == datetime(2026, 1, 1, tzinfo=UTC)


def test_an_agent_in_a_tool_of_pydantic_ai_is_a_sub_agent() -> None:
    host, expert = read_file(MADE / "pydantic_ai.jsonl")[0]
    assert (expert.relation, expert.agent_id, expert.parent_step_index) == ("subagent", "expert", 0)
    assert expert.steps[1].state == "say the country too"
    assert expert.steps[1].state_is_error is True
    assert host.source_version == "pydantic-ai 2.68.0"


def test_the_sdk_of_langfuse_writes_observations_as_attributes() -> None:
    (record,), rejects = read_file(MADE / "langfuse_sdk.jsonl")
    assert rejects == []
    (step,) = record.steps
    assert (step.state, step.action, step.agent_id, step.prompt_tokens) == ("Weather?", "Sunny.", "weather", 11)
    assert record.sampling == {"temperature": 0.5}


# ---------------------------------------------------------------- wrappings


def renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    if isinstance(value, dict):
        return {names.get(key, key): renamed(inner, names) for key, inner in value.items()}
    return value


SNAKE = {
    "resourceSpans": "resource_spans",
    "scopeSpans": "scope_spans",
    "traceId": "trace_id",
    "spanId": "span_id",
    "startTimeUnixNano": "start_time_unix_nano",
    "endTimeUnixNano": "end_time_unix_nano",
    "stringValue": "string_value",
}
PRINTED = {
    "name": "chat m-1",
    "context": {"trace_id": f"0x{TRACE}", "span_id": "0x00000000000000a1", "trace_state": "[]"},
    "kind": "SpanKind.CLIENT",
    "parent_id": None,
    "start_time": "2026-01-01T00:00:00.000000Z",
    "end_time": "2026-01-01T00:00:01.000000Z",
    "status": {"status_code": "UNSET"},
    "attributes": HELLO,
    "events": [],
    "links": [],
    "resource": {"attributes": {"service.name": "weather"}, "schema_url": ""},
}
JAEGER = {
    "traceID": TRACE,
    "spanID": "00000000000000a1",
    "operationName": "chat m-1",
    "references": [],
    "startTime": 1767225600000000,
    "duration": 1000000,
    "tags": [{"key": key, "type": "string", "value": value} for key, value in HELLO.items()],
    "logs": [],
    "processID": "p1",
}
ROW = {key: value for key, value in PRINTED.items() if key not in ("context", "attributes")}
ROW |= {f"context.{key}": value for key, value in PRINTED["context"].items()}
ROW |= {f"attributes.{key}": value for key, value in HELLO.items()}
WRAPPED: list[tuple[Any, bool]] = [
    ({"data": [{"traceID": TRACE, "spans": [JAEGER], "processes": {"p1": {"serviceName": "weather"}}}]}, False),
    (ROW, True),
    (document(span()), False),
    (document(span()), True),
    ({"batches": document(span())["resourceSpans"]}, False),
    ({"trace": document(span())}, False),
    (renamed(document(span()), SNAKE), False),
    (
        renamed(document(span()), {"scopeSpans": "instrumentationLibrarySpans", "scope": "instrumentationLibrary"}),
        False,
    ),
    ([document(span())], False),
    ([span() | {"resource": {"attributes": pairs({"service.name": "weather"})}}], False),
    ({"data": [PRINTED], "next_cursor": None}, False),
    ({"spans": [PRINTED]}, False),
    (PRINTED, True),
    ([PRINTED], False),
]


@pytest.mark.parametrize(("value", "lines"), WRAPPED)
def test_spans_are_read_however_they_are_wrapped(tmp_path: Path, value: Any, lines: bool) -> None:
    record = read_one(tmp_path / "f", value, lines=lines)
    assert (record.task_id, record.environment) == (TRACE, "weather")
    (step,) = record.steps
    assert (step.state, step.action, step.finish_reason, step.latency) == ("Weather?", "Sunny.", "stop", 1.0)
    assert record.started_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert record.spans[0].span_id == "00000000000000a1"


def test_a_table_of_spans_of_phoenix_is_read_from_parquet_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({key: [value] for key, value in ROW.items() if value not in ({}, [])}), tmp_path / "f")
    (record,), rejects = read_file(tmp_path / "f")
    assert (record.task_id, record.steps[0].action, rejects) == (TRACE, "Sunny.", [])


def test_a_span_of_jaeger_says_what_it_is_inside_and_why_it_failed(tmp_path: Path) -> None:
    tags = [{"key": "error", "type": "bool", "value": True}, {"key": "otel.status_description", "value": "no"}]
    log = {"timestamp": 1767225600000001, "fields": [{"key": "event", "value": "other"}]}
    child = {"spanID": "00000000000000b1", "references": [{"refType": "CHILD_OF", "spanID": JAEGER["spanID"]}]}
    child |= {"operationName": "x", "tags": tags, "logs": [log]}
    record = read_one(tmp_path / "f", {"traceID": TRACE, "spans": [JAEGER, JAEGER | child]})
    (_, tool_span) = record.spans
    assert (tool_span.parent_span_id, tool_span.name, tool_span.error) == (JAEGER["spanID"], "x", "no")
    assert tool_span.attributes is not None
    assert tool_span.attributes["otel"]["events"] == [{"name": "other", "time": "2026-01-01T00:00:00.000001+00:00"}]


def test_spans_that_the_python_sdk_prints_on_many_lines_are_read_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "f"
    again = PRINTED | {"context": {"trace_id": f"0x{OTHER}", "span_id": "0x00000000000000a2"}}
    printed = [
        json.dumps(PRINTED, indent=4),
        '{\n    "name": 7,,\n}',
        json.dumps(again, indent=4),
        json.dumps(again, indent=4)[:99],
    ]
    path.write_text("\n".join(printed), "utf-8")
    records, rejects = read_file(path)
    assert [record.task_id for record in records] == [TRACE, OTHER]
    first = printed[0].count("\n") + 2
    assert [reject.reason for reject in rejects] == ["malformed"] * 2
    assert rejects[0].position == first


def test_a_trace_may_be_spread_over_the_lines_of_a_file_with_others(tmp_path: Path) -> None:
    messages = json.dumps([*ASKED, *SAID, ASKED[0]])
    later = span(HELLO | {"gen_ai.input.messages": messages}, span_id="00000000000000a2", at=5)
    values = [document(later), document(span(traceId=OTHER)), document(span())]
    records, _ = read_file(written(tmp_path / "f", *values, lines=True))
    assert [(record.task_id, len(record.steps)) for record in records] == [(TRACE, 2), (OTHER, 1)]


def test_log_records_are_events_of_the_spans_that_they_name(tmp_path: Path) -> None:
    def event(name: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"traceId": TRACE, "spanId": "00000000000000a1", "eventName": name, "body": value_of(body)}

    logged = [
        event("gen_ai.user.message", {"content": "Weather?"}),
        event(
            "gen_ai.choice",
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Sunny."}},
        ),
        {"body": {"stringValue": "of no span"}},
    ]
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": logged}]}]}
    bare = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m-1"}
    record = read_one(tmp_path / "f", logs, document(span(bare)), lines=True)
    assert (record.steps[0].state, record.steps[0].action, record.steps[0].finish_reason) == (
        "Weather?",
        "Sunny.",
        "stop",
    )


# ---------------------------------------------------------------- how spans are written


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        (TRACE, TRACE),
        (TRACE.upper(), TRACE),
        (f"0x{TRACE}", TRACE),
        (base64.b64encode(bytes.fromhex(TRACE)).decode(), TRACE),
        ("AAYAAAAAAAM=", "0006000000000003"),
        (0xA1, "a1"),
        ("my-own-id", "my-own-id"),
        ("", None),
        ("0000000000000000", None),
        ("AAAAAAAAAAA=", None),
        (None, None),
        ([], None),
    ],
)
def test_ids_are_hex_however_they_are_written(identifier: Any, expected: str | None) -> None:
    assert normalise_id(identifier) == expected


@pytest.mark.parametrize(
    "instant",
    [
        BEGIN,
        str(BEGIN),
        BEGIN // 10**3,
        BEGIN // 10**6,
        BEGIN // 10**9,
        BEGIN / 1e9,
        "2026-01-01T00:00:00Z",
        "2026-01-01 01:00:00+01:00",
    ],
)
def test_times_are_nanoseconds_however_they_are_written(instant: Any) -> None:
    assert parse_instant(instant) == BEGIN


@pytest.mark.parametrize("instant", [None, 0, "0", -1, True, "soon", [], 10**30, float("nan"), float("inf")])
def test_what_is_no_time_is_none(instant: Any) -> None:
    assert parse_instant(instant) is None


def test_values_of_every_kind_are_taken() -> None:
    value = {"a": [1, 2.5, True, "x"], "b": {"c": -(2**62)}}
    assert decode_any_value(value_of(value)) == value
    assert [
        decode_any_value(v) for v in ({}, {"bytesValue": "AA=="}, {"intValue": 7}, {"doubleValue": "NaN"}, "bare")
    ] == [
        None,
        "AA==",
        7,
        "NaN",
        "bare",
    ]
    assert decode_any_value({"int_value": "7"}) == 7


@pytest.mark.parametrize("code", [2, "STATUS_CODE_ERROR", "ERROR"])
def test_a_span_whose_status_is_an_error_says_why(tmp_path: Path, code: Any) -> None:
    thrown = {"name": "exception", "attributes": pairs({"exception.type": "TimeoutError", "exception.message": "slow"})}
    attributes = {key: value for key, value in HELLO.items() if "output" not in key}
    failed = span(attributes, span_id="00000000000000a2", status={"code": code}, events=[thrown])
    record = read_one(tmp_path / "f", document(span(at=3), failed))
    assert {span.error for span in record.spans} == {None, "TimeoutError: slow"}
    assert record.extra is not None
    assert (len(record.steps), record.extra["failed_calls"]) == (1, 1)


def test_what_a_span_says_beside_its_attributes_is_kept(tmp_path: Path) -> None:
    event = {"name": "cache", "timeUnixNano": str(BEGIN), "attributes": pairs({"hit": True})}
    link = {"traceId": OTHER, "spanId": "00000000000000b1"}
    record = read_one(tmp_path / "f", document(span(events=[event], links=[link], traceState="k=v", flags=256)))
    attributes = record.spans[0].attributes
    assert attributes is not None
    assert attributes["otel"] == {
        "kind": "client",
        "events": [{"name": "cache", "time": "2026-01-01T00:00:00+00:00", "attributes": {"hit": True}}],
        "scope": {"name": "s", "version": "1"},
        "links": [link],
        "traceState": "k=v",
    }
    assert record.source_version == "s 1"


def test_a_service_without_a_name_is_no_environment(tmp_path: Path) -> None:
    assert (
        read_one(tmp_path / "f", document(span(), resource={"service.name": "unknown_service:python"})).environment
        is None
    )


def test_an_experiment_of_langfuse_names_task_and_run(tmp_path: Path) -> None:
    attributes = {"langfuse.experiment.item.id": "item-1", "langfuse.experiment.name": "nightly"}
    record = read_one(tmp_path / "f", document(span(HELLO | attributes)))
    assert (record.task_id, record.run_id) == ("item-1", "nightly")
    assert record.rollout_index > 0


def test_a_file_that_names_a_later_schema_is_read_by_its_attributes(tmp_path: Path) -> None:
    """The conventions say no version that could be unknown."""
    value = document(span())
    value["resourceSpans"][0]["schemaUrl"] = "https://opentelemetry.io/schemas/9.9.9"
    assert read_one(tmp_path / "f", value).steps[0].action == "Sunny."


# ---------------------------------------------------------------- files without trajectories


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"resourceMetrics": []}, "metrics; ingest the file of traces"),
        ({"resourceLogs": [{"scopeLogs": []}]}, "log records without spans"),
        (document(span({"http.method": "GET"}, name="GET /")), "none of its OpenTelemetry spans is a call of a model"),
    ],
)
def test_a_file_of_anything_else_of_opentelemetry_says_what_it_is(tmp_path: Path, value: Any, says: str) -> None:
    for lines in (False, True):
        with pytest.raises(FormatError, match=says):
            choose_format(written(tmp_path / "f", value, lines=lines))


def test_a_trace_without_a_call_beside_others_is_rejected(tmp_path: Path) -> None:
    values = [document(span({"http.method": "GET"}, traceId=OTHER)), document(span())]
    (record,), (reject,) = read_file(written(tmp_path / "f", *values, lines=True))
    assert record.task_id == TRACE
    assert (reject.position, reject.reason) == (1, "invalid")
    assert f"trace '{OTHER}' has no call" in reject.message
    assert "1 spans are of kind client" in reject.message


def test_rows_of_other_tools_are_not_taken_for_spans(tmp_path: Path) -> None:
    row = {"rollout_id": "r", "trace_id": TRACE, "span_id": "a", "name": "n", "attributes": {}, "start_time": 1.0}
    for value in (
        row,
        {"trace": {"id": 1}, "observations": []},
        {"batches": [1]},
        {"data": [{"id": 1}]},
        {"spans": [[1, 2]]},
    ):
        path = written(tmp_path / "f", value)
        try:
            assert choose_format(path).name != "otlp"
        except FormatError:
            continue


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (7, "`resourceSpans[0].scopeSpans[0].spans[1]` is int; valid: a span"),
        (span(traceId=None), "spans[1].traceId` is None; valid: an id in hex or base64"),
        (span(spanId=""), "spans[1].spanId` is ''; valid"),
        ({}, "spans[1].traceId` is None"),
    ],
)
def test_a_span_that_is_none_is_rejected_alone(tmp_path: Path, bad: Any, says: str) -> None:
    (record,), (reject,) = read_file(written(tmp_path / "f", document(span(), bad)))
    assert len(record.spans) == 1
    assert (reject.position, reject.reason) == (1, "invalid")
    assert says in reject.message


def test_of_a_document_that_ends_too_early_the_whole_resources_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    value = {"resourceSpans": [*document(span())["resourceSpans"], *document(span(traceId=OTHER))["resourceSpans"]]}
    text = json.dumps(value)
    path.write_text(text[: text.index(OTHER)], "utf-8")
    (record,), (reject,) = read_file(path)
    assert (record.task_id, reject.position, reject.reason) == (TRACE, 1, "truncated")


def test_a_damaged_line_costs_its_spans_and_the_trace_knows(tmp_path: Path) -> None:
    path = written(
        tmp_path / "f",
        document(span()),
        document(span(span_id="00000000000000a2")),
        document(span(traceId=OTHER)),
        lines=True,
    )
    text = path.read_text("utf-8").splitlines()
    text[1] = text[1][:-30]
    path.write_bytes("\n".join(text).encode() + b"\n\xff\xfe\n")
    records, rejects = read_file(path)
    assert [(record.task_id, (record.extra or {}).get("lost_lines")) for record in records] == [
        (TRACE, 1),
        (OTHER, None),
    ]
    assert [(reject.position, reject.reason) for reject in rejects] == [(2, "malformed"), (4, "malformed")]


@pytest.mark.parametrize("broken", ['"\\ud800"', "[" * 2000 + "]" * 2000, "7" * 5000, "NaN", '{"a": 1, "a": 2}'])
def test_values_that_cannot_be_stored_cost_their_line_or_trace_and_no_more(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "f"
    good = [json.dumps(document(span(traceId=name))) for name in (TRACE, OTHER)]
    bad = (
        json.dumps(document(span(span_id="00000000000000a9")))
        .replace('"Weather?"', broken)
        .replace('"weather"', broken)
    )
    path.write_text("\n".join((good[0].replace("a1", "a8"), bad, good[1])), "utf-8")
    records, rejects = read_file(path)
    assert [record.task_id for record in records] == [TRACE, OTHER]
    assert [reject.position for reject in rejects] == [2]


CASES: list[Callable[[], Any]] = [
    lambda: document(
        span(), span({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "x"}, span_id="00000000000000a2")
    ),
    lambda: [PRINTED],
]


@pytest.mark.parametrize("make", CASES)
def test_nothing_in_a_file_makes_the_reader_raise(tmp_path: Path, make: Callable[[], Any]) -> None:
    assert_never_raises(tmp_path / "f.json", make())
