"""OpenTelemetry spans of this process as episodes: an exporter for the SDK's span processors.

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(SpanExporter(recorder)))

A trace becomes an episode when its first span ends. Its spans go to the spool as they arrive, so the open traces of a
process that dies are recorded too, as `aborted`. `lake.formats.otlp` reads files of spans the same way.
"""

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lake.errors import MissingExtraError
from lake.live.frames import SOURCE_FORMAT, BeginFrame, EndFrame, Frame, TraceFrame, new_key
from lake.live.sink import Sink, guarded
from lake.records import EpisodeRecord
from lake.secrets import remove_keys

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

MAX_TRACES = 10_000


class _OpenTrace(msgspec.Struct):
    key: bytes
    frames: int = 0


class SpanExporter:
    """Exports the traces of agents into a recorder. Traces without a call of a model are left out and counted.

    Args:
        recorder: receives the episodes; the caller closes it.
        max_traces: maximum open traces. Beyond it the oldest trace is recorded as far as it is known.

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
        self._open: dict[int, _OpenTrace] = {}

    @property
    def _sink(self) -> Sink:
        """The recorder's sink, which changes after a fork."""
        return self._recorder._sink

    def export(self, spans: Sequence[Any]) -> Any:
        """Record spans that have ended. Called by the SDK, and always successful: the recorder counts errors."""
        self._export(spans)
        return self._success

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return success. Open traces stay open."""
        return timeout_millis >= 0

    @guarded()
    def shutdown(self) -> None:
        """End the open traces as far as they are known."""
        with self._lock:
            for trace_id in list(self._open):
                self._end(trace_id)

    @guarded()
    def _export(self, spans: Sequence[Any]) -> None:
        by_trace: dict[int, list[Any]] = {}
        for span in spans:
            by_trace.setdefault(span.context.trace_id, []).append(span)
        with self._lock:
            for trace_id, of_trace in by_trace.items():
                document = []
                for span in of_trace:
                    text = span.to_json(indent=None)
                    try:
                        document.append(remove_keys(msgspec.json.decode(text)))
                    except msgspec.DecodeError:  # the SDK writes NaN, which JSON does not have
                        document.append(remove_keys(json.loads(text)))
                self._put(trace_id, TraceFrame(trace_id=f"{trace_id:032x}", document=document))
                if any(span.parent is None or span.parent.is_remote for span in of_trace):
                    self._end(trace_id)
            while len(self._open) > self._max_traces:
                self._end(next(iter(self._open)))

    def _put(self, trace_id: int, frame: Frame) -> None:
        trace = self._open.get(trace_id)
        if trace is None:
            trace = self._open[trace_id] = _OpenTrace(new_key())
            self._sink.count("started")
            record = EpisodeRecord(
                task_id=f"{trace_id:032x}", run_id=self._recorder.run, steps=[], source_format=SOURCE_FORMAT
            )
            self._put(trace_id, BeginFrame(episode=record))
        self._sink.append(trace.key, trace.frames, frame)
        trace.frames += 1

    def _end(self, trace_id: int) -> None:
        self._put(trace_id, EndFrame())
        del self._open[trace_id]
        self._sink.count("finished")
        self._sink.on_finished()
        self._sink.sync()
