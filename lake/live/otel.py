"""OpenTelemetry spans of this process, as episodes: an exporter for the SDK's own span processors.

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(SpanExporter(recorder)))

A trace is an episode once its first span has ended; its spans are in the spool as they come, so that of a process that
dies traces that go on are recorded too, as `aborted`. What spans mean is said by `lake.formats.otlp`, which reads files
of them too.
"""

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lake.errors import MissingExtraError
from lake.formats.base.secrets import without_secrets
from lake.live.frames import SOURCE_FORMAT, Begin, End, Frame, Traced, new_key
from lake.live.sink import Sink, guarded
from lake.records import EpisodeRecord

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

MAX_TRACES = 10_000


class _Trace(msgspec.Struct):
    """A trace that goes on."""

    key: bytes
    frames: int = 0


class SpanExporter:
    """Exports the traces of agents into a recorder; traces without a call of a model are left out, and counted there.

    Args:
        recorder: where episodes go; closing it is left to its owner.
        max_traces: that go on; beyond it the oldest one is recorded as far as it is known.

    Raises:
        MissingExtraError: the SDK is not installed.
    """

    def __init__(self, recorder: "Recorder", *, max_traces: int = MAX_TRACES) -> None:
        try:
            from opentelemetry.sdk.trace.export import SpanExportResult
        except ImportError as error:
            raise MissingExtraError('the exporter needs opentelemetry-sdk: pip install "trajlake[otel]"') from error
        self._success = SpanExportResult.SUCCESS
        self._recorder, self._max_traces = recorder, max_traces
        self._lock = threading.Lock()
        self._open: dict[int, _Trace] = {}

    @property
    def _sink(self) -> Sink:
        """The recorder's; another one after a fork."""
        return self._recorder._sink

    def export(self, spans: Sequence[Any]) -> Any:
        """Take spans that have ended; the SDK calls this, and never hears of a fault: the recorder counts them."""
        self._export(spans)
        return self._success

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Traces that go on stay open."""
        return timeout_millis >= 0

    @guarded()
    def shutdown(self) -> None:
        """End the traces that go on, as far as they are known."""
        with self._lock:
            for trace_id in list(self._open):
                self._end(trace_id)

    @guarded()
    def _export(self, spans: Sequence[Any]) -> None:
        found: dict[int, list[Any]] = {}
        for span in spans:
            found.setdefault(span.context.trace_id, []).append(span)
        with self._lock:
            for trace_id, of_trace in found.items():
                said = [without_secrets(_said(span)) for span in of_trace]
                self._put(trace_id, Traced(trace_id=f"{trace_id:032x}", document=said))
                if any(span.parent is None or span.parent.is_remote for span in of_trace):
                    self._end(trace_id)
            while len(self._open) > self._max_traces:
                self._end(next(iter(self._open)))

    def _put(self, trace_id: int, frame: Frame) -> None:
        trace = self._open.get(trace_id)
        if trace is None:
            trace = self._open[trace_id] = _Trace(new_key())
            self._sink.count("begun")
            record = EpisodeRecord(
                task_id=f"{trace_id:032x}", run_id=self._recorder.run, steps=[], source_format=SOURCE_FORMAT
            )
            self._put(trace_id, Begin(episode=record))
        self._sink.take(trace.key, trace.frames, frame)
        trace.frames += 1

    def _end(self, trace_id: int) -> None:
        self._put(trace_id, End())
        del self._open[trace_id]
        self._sink.count("finished")
        self._sink.on_finished()
        self._sink.sync()


def _said(span: Any) -> Any:
    """A span as the SDK writes it; it writes NaN where JSON has no such thing."""
    text = span.to_json(indent=None)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)
