"""The span exporter: traces of the SDK become the episodes that a file of them would be."""

import builtins
import math
import os
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

import lake
from lake.errors import MissingExtraError
from lake.live.otel import SpanExporter
from testkit.copies import empty_lake

CALL = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "gpt-5",
    "gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "text", "content": "Rome?"}]}]',
    "gen_ai.output.messages": '[{"role": "assistant", "parts": [{"type": "text", "content": "Booked."}]}]',
}


def test_a_trace_is_an_episode_as_it_would_be_from_a_file(tmp_path: Path) -> None:
    empty_lake(tmp_path / "lake")
    with lake.recorder(tmp_path / "lake", run="agent", spool=tmp_path / "spool", batch_seconds=3600) as recorder:
        exporter = SpanExporter(recorder)
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("agents")
        with tracer.start_as_current_span("GET /health"):
            pass
        with tracer.start_as_current_span("agent", attributes={"gen_ai.operation.name": "invoke_agent", "p": math.nan}):
            with tracer.start_as_current_span("chat", attributes=CALL):
                pass
            with tracer.start_as_current_span(
                "tool", attributes={"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "book"}
            ):
                pass
        going_on = tracer.start_span("agent", attributes=CALL)
        with tracer.start_as_current_span("chat", context=None, attributes=CALL):
            pass
        assert recorder.stats().finished == 3
        going_on.end()
        provider.shutdown()
        assert recorder.flush()
        stats = recorder.stats()
        assert (stats.finished, stats.delivered, stats.left_out, stats.troubles) == (4, 3, 1, 0)
    counts = lake.open(tmp_path / "lake").sql(
        "SELECT state, action, model, source_format, run_id, (SELECT count(*) FROM spans p WHERE p.episode_id = "
        "e.episode_id) AS spans FROM steps s JOIN episodes e USING (episode_id, run_id) ORDER BY spans DESC"
    )
    assert counts.rows() == [
        ("Rome?", "Booked.", "gpt-5", "otlp", "agent", 3),
        ("Rome?", "Booked.", "gpt-5", "otlp", "agent", 1),
        ("Rome?", "Booked.", "gpt-5", "otlp", "agent", 1),
    ]


def test_what_a_process_that_died_had_exported_is_recorded(tmp_path: Path) -> None:
    empty_lake(tmp_path / "lake")
    options = {"spool": tmp_path / "spool", "batch_seconds": 3600}
    child = os.fork()
    if child == 0:
        try:
            recorder = lake.recorder(tmp_path / "lake", run="agent", **options)
            provider = TracerProvider()
            provider.add_span_processor(SimpleSpanProcessor(SpanExporter(recorder)))
            tracer = provider.get_tracer("agents")
            with tracer.start_as_current_span("agent"):
                with tracer.start_as_current_span("chat", attributes=CALL):
                    pass
                recorder._sink.spool.sync()
                os._exit(3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    with lake.recorder(tmp_path / "lake", run="later", **options) as recorder:
        assert recorder.flush()
        assert recorder.stats().aborted == 1
    recorded = lake.open(tmp_path / "lake").sql("SELECT run_id, status, num_steps FROM episodes")
    assert recorded.rows() == [("agent", "aborted", 1)]


def test_without_the_sdk_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return load(name, *args, **kwargs)

    with lake.recorder(tmp_path / "lake", run="agent", spool=tmp_path / "spool") as recorder:
        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(MissingExtraError, match=r'pip install "trajlake\[otel\]"'):
            SpanExporter(recorder)
        monkeypatch.undo()
