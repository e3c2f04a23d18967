"""OpenTelemetry spans of this process, as episodes: an exporter for the SDK's own span processors.

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(SpanExporter(recorder)))

A trace is an episode once its first span has ended. What spans mean is said by `lake.formats.otlp`, which reads files
of them too. The spans of a trace are in memory until then: of a process that dies, traces that go on are not recorded.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lake.errors import MissingExtraError
from lake.formats.otlp.reader import NAME, read_values
from lake.formats.tracing.episodes import NO_CALL
from lake.records import Reject

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

MAX_SPANS = 100_000


class SpanExporter:
    """Exports the traces of agents into a recorder.

    Traces without a call of a model are counted and left out; those that cannot be read are rejects, with the reason.

    Args:
        recorder: where episodes go; closing it is left to its owner.
        max_spans: of traces that go on; beyond it the oldest one is recorded as far as it is known.

    Raises:
        MissingExtraError: the SDK is not installed.
    """

    def __init__(self, recorder: "Recorder", *, max_spans: int = MAX_SPANS) -> None:
        try:
            from opentelemetry.sdk.trace.export import SpanExportResult
        except ImportError as error:
            raise MissingExtraError('the exporter needs opentelemetry-sdk: pip install "trajlake[otel]"') from error
        self.left_out = 0
        """Traces without a call of a model."""
        self._success = SpanExportResult.SUCCESS
        self._recorder, self._max_spans = recorder, max_spans
        self._lock = threading.Lock()
        self._open: dict[int, list[Any]] = {}

    def export(self, spans: Sequence[Any]) -> Any:
        """Take spans that have ended; the SDK calls this, and never hears of a fault: the recorder counts them."""
        ended = []
        with self._lock:
            for span in spans:
                trace = span.context.trace_id
                self._open.setdefault(trace, []).append(msgspec.json.decode(span.to_json(indent=None)))
                if span.parent is None or span.parent.is_remote:
                    ended.append(trace)
            while sum(map(len, self._open.values())) > self._max_spans:
                ended.append(next(trace for trace in self._open if trace not in ended))
            traces = [self._open.pop(trace) for trace in dict.fromkeys(ended)]
        self._record(traces)
        return self._success

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Traces that go on stay open."""
        return timeout_millis >= 0

    def shutdown(self) -> None:
        """Record the traces that go on, as far as they are known."""
        with self._lock:
            traces = list(self._open.values())
            self._open.clear()
        self._record(traces)

    def _record(self, traces: Sequence[Sequence[Any]]) -> None:
        for trace in traces:
            for item in read_values(trace, self._recorder.run):
                if not isinstance(item, Reject):
                    self._recorder.record(item[1])
                elif NO_CALL in item.message:
                    self.left_out += 1
                else:
                    self._recorder.reject(msgspec.structs.replace(item, source_format=NAME))
