"""Spans that were received over OTLP are the episodes that a file of them would be, however they arrive."""

import json
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToDict, MessageToJson
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode

from lake.errors import UsageError
from lake.formats.base.source import Input
from lake.formats.otlp.reader import read
from lake.live.calls.address import RolloutAddress
from lake.live.calls.apis import CHAT, parse_answer, parse_request
from lake.live.calls.steps import Call
from lake.live.frames import EndFrame, Frame, TraceFrame, assemble_frames, decode, encode
from lake.live.proxy.connections import RefusedError
from lake.live.proxy.sessions import SETTLING_SECONDS, EndedError, EndRequest, SessionRegistry
from lake.live.proxy.traces import split_request
from lake.records import EpisodeRecord, Reject

NOW = datetime(2026, 11, 1, tzinfo=UTC)
PROTOBUF, JSON = "application/x-protobuf", "application/json"
SECRET = "sk-do-not-store-1234567890"


def chat(question: str, answer: str, **fields: str) -> dict[str, str]:
    inputs = [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in (("user", question),)]
    outputs = [{"role": "assistant", "parts": [{"type": "text", "content": answer}]}]
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.input.messages": json.dumps(inputs),
        "gen_ai.output.messages": json.dumps(outputs),
        **fields,
    }


def spans_of_an_agent() -> list[Any]:
    """Finished spans of a run with two calls, a tool and an exception, and one that no agent wrote."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("agents", "1.0")
    with tracer.start_as_current_span("GET /health"):
        pass
    with tracer.start_as_current_span("agent", attributes={"gen_ai.operation.name": "invoke_agent"}):
        with tracer.start_as_current_span("chat", attributes=chat("Rome?", "I look.")):
            pass
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look"}
        with tracer.start_as_current_span("look", attributes=tool) as span:
            span.set_attribute("http.request.header.authorization", f"Bearer {SECRET}")
            span.set_attribute("url.full", f"https://example.org/?api_key={SECRET}")
            span.record_exception(ValueError(f"refused: Authorization: Bearer {SECRET}"))
            span.set_status(Status(StatusCode.ERROR, f"401: api_key={SECRET}"))
        with tracer.start_as_current_span("chat", attributes=chat("Rome?", "Booked.", **{"gen_ai.response.id": "r-1"})):
            pass
    return list(exporter.get_finished_spans())


SPANS = spans_of_an_agent()
AGENT = next(span.context.trace_id for span in SPANS if span.name == "agent")


class Desk:
    """A book, and the frames of its episodes."""

    def __init__(self) -> None:
        self.frames: dict[bytes, dict[int, Frame]] = {}
        self.registry = SessionRegistry(self._emit, run="live")

    def _emit(self, key: bytes, number: int, frame: Frame, is_reserved: bool) -> None:
        self.frames.setdefault(key, {})[number] = decode(encode(key, number, frame))

    def send(self, spans: list[Any], address: RolloutAddress | None = None) -> None:
        body = encode_spans(spans).SerializeToString()
        for traced, is_over in split_request("/v1/traces", PROTOBUF, body):
            self.registry.record_spans(address or RolloutAddress(), traced, NOW, is_over=is_over)

    def finished(self) -> list[EpisodeRecord | Reject]:
        frames_by_episode = [[frames[number] for number in sorted(frames)] for frames in self.frames.values()]
        return [
            item for frames in frames_by_episode if isinstance(frames[-1], EndFrame) for item in assemble_frames(frames)
        ]


def comparable(record: EpisodeRecord) -> dict[str, Any]:
    """What of a record does not say how it arrived."""
    fields = msgspec.to_builtins(record)
    fields["spans"] = sorted(fields["spans"], key=lambda span: str(span["span_id"]))
    return {key: value for key, value in fields.items() if key not in ("run_id", "source_uri")}


def of_a_file() -> EpisodeRecord:
    """The agent's trace as a file of all spans has it."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "spans.json")
        path.write_text(MessageToJson(encode_spans(SPANS)))
        (record,) = [item[1] for item in read(Input(path, "live")) if not isinstance(item, Reject)]
    return record


OF_A_FILE = of_a_file()


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(len(SPANS))), st.lists(st.integers(1, 4), min_size=5, max_size=5), st.booleans())
def test_spans_in_any_batches_and_order_are_the_episode_of_a_file(
    order: list[int], sizes: list[int], is_repeated: bool
) -> None:
    desk = Desk()
    spans_left = [SPANS[index] for index in order]
    for size in sizes:
        batch, spans_left = spans_left[:size], spans_left[size:]
        for _ in range(1 + is_repeated):
            desk.send(batch)
    desk.send(spans_left)
    desk.registry.stop(NOW)
    (record,) = desk.finished()
    assert isinstance(record, EpisodeRecord)
    record.stop_reason = None
    assert comparable(record) == comparable(OF_A_FILE)
    assert [step.action for step in record.steps] == ["I look.", "Booked."]


def test_a_trace_ends_once_its_root_has_ended_and_nothing_more_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("lake.live.proxy.sessions.time.monotonic", lambda: clock[0])
    desk = Desk()
    inner, root = [[span for span in SPANS if (span.name == "agent") is is_root] for is_root in (False, True)]
    desk.send(inner)
    clock[0] += 2 * SETTLING_SECONDS
    desk.registry.expire(NOW, 600)
    assert not desk.finished(), "its root has not ended"
    desk.send(root)
    desk.registry.expire(NOW, 600)
    assert not desk.finished(), "other processes may still send of it"
    clock[0] += SETTLING_SECONDS
    desk.registry.expire(NOW, 600)
    (record,) = desk.finished()
    assert isinstance(record, EpisodeRecord)
    assert (record.task_id, record.rollout_index, record.stop_reason) == (f"{AGENT:032x}", 0, None)


def test_a_named_rollout_takes_all_traces_until_its_end() -> None:
    """An instrumentation without a span around the agent writes a trace for each call."""
    spans = [span for span in [*SPANS, *spans_of_an_agent()] if span.name == "chat"]
    desk, address = Desk(), RolloutAddress(run="r", task="t", rollout=3)
    for span in spans:
        desk.send([span], address)
    desk.registry.expire(NOW, 600)
    ending = desk.registry.end(address, EndRequest(reward=0.5, scores=[]), NOW)
    (record,) = desk.finished()
    assert isinstance(record, EpisodeRecord)
    assert (record.run_id, record.task_id, record.rollout_index) == ("r", "t", 3)
    assert (len(record.steps), record.env_return, record.status) == (4, 0.5, "completed")
    assert {span.trace_id for span in record.spans} == {f"{AGENT:032x}"}
    assert ending["task_id"] == "t"


def test_spans_of_a_rollout_whose_calls_are_recorded_are_rows_of_its_spans() -> None:
    desk, address = Desk(), RolloutAddress(task="t")
    body = {"model": "gpt-5", "messages": [{"role": "user", "content": "Rome?"}]}
    answer = {"id": "r-1", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Booked."}}]}
    call = Call(
        address=address,
        api=CHAT,
        request=parse_request(CHAT, body),
        answer=parse_answer(CHAT, answer),
        started_at=NOW,
        latency=1.0,
    )
    desk.registry.record_call(call)
    desk.send(SPANS, address)
    desk.registry.stop(NOW)
    (record,) = desk.finished()
    assert isinstance(record, EpisodeRecord)
    assert [step.action for step in record.steps] == ["Booked."]
    assert {span.name: span.step_index for span in record.spans} == {
        "GET /health": None,
        "agent": None,
        "look": None,
        "chat": 0,
    }


def test_a_rollout_of_spans_alone_that_its_end_closes_has_no_step_beside_theirs() -> None:
    address = RolloutAddress(run="r", task="t", rollout=3)
    desk = Desk()
    desk.send([span for span in SPANS if span.name == "chat"], address)
    ending = desk.registry.end(address, EndRequest(reward=1.0, closes=True), NOW)
    (record,) = desk.finished()
    assert isinstance(record, EpisodeRecord)
    assert record.env_return == 1.0
    assert len(record.steps) == ending["spans"]
    assert all(step.action for step in record.steps)
    assert "steps" not in ending


def test_spans_that_were_unpacked_while_their_rollout_ended_begin_no_other_episode() -> None:
    address = RolloutAddress(run="r", task="t", rollout=3)
    desk = Desk()
    desk.send(SPANS, address)
    desk.registry.end(address, EndRequest(closes=True), NOW)
    with pytest.raises(EndedError):
        desk.send(SPANS, address)
    assert len(desk.finished()) == 1


def test_a_book_that_is_resumed_goes_on_with_its_traces() -> None:
    desk, later = Desk(), Desk()
    inner, root = [[span for span in SPANS if (span.name == "agent") is is_root] for is_root in (False, True)]
    desk.send(inner)
    later.frames = desk.frames
    for key, frames in desk.frames.items():
        later.registry.resume(key, [frames[number] for number in sorted(frames)])
    later.send(root)
    later.registry.stop(NOW)
    (record,) = later.finished()
    assert isinstance(record, EpisodeRecord)
    assert len(record.spans) == 4


@pytest.mark.parametrize("name", ["traceId", "spanId"])
def test_a_span_without_its_ids_is_a_reject_and_the_others_are_taken(name: str) -> None:
    document = MessageToDict(encode_spans([span for span in SPANS if span.context.trace_id == AGENT]))
    (resource,) = document["resourceSpans"]
    bad = resource["scopeSpans"][0]["spans"][0].copy()
    bad[name] = ""
    resource["scopeSpans"][0]["spans"].append(bad)
    desk = Desk()
    for traced, is_over in split_request("/v1/traces", JSON, json.dumps(document).encode()):
        desk.registry.record_spans(RolloutAddress(), traced, NOW, is_over=is_over)
    desk.registry.stop(NOW)
    records = desk.finished()
    assert [item.message for item in records if isinstance(item, Reject) and name in item.message]
    assert [len(item.steps) for item in records if isinstance(item, EpisodeRecord)] == [2]


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (b"[]", "the body is list"),
        (b"{", "not OTLP JSON"),
        (b"[" * 100_000, "not OTLP JSON"),
        (b'{"resourceSpans": 3}', "`resourceSpans` is int"),
        (b'{"resourceSpans": [3]}', "around `scopeSpans` is int"),
    ],
)
def test_what_is_no_otlp_is_refused_with_the_reason(body: bytes, fragment: str) -> None:
    with pytest.raises(UsageError, match=fragment):
        split_request("/v1/traces", JSON, body)


def test_a_body_that_is_no_protobuf_is_refused() -> None:
    with pytest.raises(UsageError, match="not OTLP protobuf"):
        split_request("/v1/traces", PROTOBUF, b"\xff\xff")
    with pytest.raises(RefusedError, match="valid: application/x-protobuf"):
        split_request("/v1/traces", "text/plain", b"")
    with pytest.raises(RefusedError, match="OTEL_METRICS_EXPORTER=none"):
        split_request("/v1/metrics", PROTOBUF, b"")


def test_log_records_are_told_of_the_span_that_they_name() -> None:
    """Instrumentations of the GenAI conventions put what was said there; a record of no span is no trajectory."""
    desk, (call, *_) = Desk(), [span for span in SPANS if span.name == "chat"]
    ids = {"traceId": f"{AGENT:032x}", "spanId": f"{call.context.span_id:016x}"}
    record = {"eventName": "gen_ai.evaluation.result", "timeUnixNano": "1790000000000000000"} | ids
    score = {"gen_ai.evaluation.name": {"stringValue": "judge"}, "gen_ai.evaluation.score.value": {"doubleValue": 0.25}}
    record["attributes"] = [{"key": key, "value": value} for key, value in score.items()]
    scopes = [{"scope": {"name": "x"}, "logRecords": [record, {"body": {"stringValue": "of no span"}}]}]
    body = json.dumps({"resourceLogs": [{"scopeLogs": scopes}]}).encode()
    for traced, is_over in split_request("/v1/logs", JSON, body):
        assert not is_over
        desk.registry.record_spans(RolloutAddress(), traced, NOW, is_over=is_over)
    desk.send(SPANS)
    desk.registry.stop(NOW)
    (only_record,) = [item for item in desk.finished() if isinstance(item, EpisodeRecord)]
    assert [(score.scorer, score.value, score.step_index) for score in only_record.scores] == [("judge", 0.25, 0)]


def test_no_key_of_an_attribute_comes_into_a_frame() -> None:
    trace_frames = split_request("/v1/traces", PROTOBUF, encode_spans(SPANS).SerializeToString())
    assert SECRET not in repr(trace_frames)
    assert "Rome?" in repr(trace_frames)


def test_frames_of_traces_keep_their_form() -> None:
    frame = TraceFrame(trace_id="ab", document={"resourceSpans": []})
    assert decode(encode(b"k" * 16, 3, frame)) == frame


def test_many_spans_are_recorded_in_pieces_that_keep_nobody_waiting() -> None:
    ids = [f"{number:016x}" for number in range(1, 1202)]
    spans = [{"traceId": f"{AGENT:032x}", "spanId": span_id, "name": "s", "startTimeUnixNano": "1"} for span_id in ids]
    document = {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": spans}]}]}
    traced_frames = [traced for traced, _ in split_request("/v1/traces", JSON, json.dumps(document).encode())]
    span_lists = [frame.document["resourceSpans"][0]["scopeSpans"][0]["spans"] for frame in traced_frames]
    assert max(map(len, span_lists)) <= 500
    assert [span["spanId"] for part in span_lists for span in part] == ids


def test_traces_that_nobody_ends_crowd_out_each_other_and_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lake.live.proxy.sessions.MOST_TRACES", 3)
    desk = Desk()
    chats = [span for span in SPANS if span.name == "chat"]
    desk.send(chats, RolloutAddress(task="t"))
    for number in range(1, 6):
        desk.registry.record_spans(
            RolloutAddress(), TraceFrame(trace_id=f"{number:032x}", document={"resourceSpans": []}), NOW, is_over=False
        )
    assert desk.registry.counts.crowded_out == 2
    desk.registry.end(RolloutAddress(task="t"), EndRequest(reward=1.0), NOW)
    (record,) = desk.finished()
    assert isinstance(record, EpisodeRecord)
    assert record.env_return == 1.0
