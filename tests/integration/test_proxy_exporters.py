"""The receiver of the proxy and the real OTLP exporter: what was acknowledged is in the lake, once."""

import json
import signal
from pathlib import Path
from urllib.error import HTTPError

import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import lake
from testkit.engine_server import engine_server
from testkit.proxy_process import proxy

MESSAGE = {"role": "user", "parts": [{"type": "text", "content": "Rome?"}]}
ANSWER = {"role": "assistant", "parts": [{"type": "text", "content": "Booked."}]}
CALL = {
    "gen_ai.operation.name": "chat",
    "gen_ai.input.messages": json.dumps([MESSAGE]),
    "gen_ai.output.messages": json.dumps([ANSWER]),
}


def test_what_an_exporter_was_told_to_forget_is_in_the_lake_once(tmp_path: Path) -> None:
    with engine_server() as engine:
        with proxy(engine, tmp_path) as at:
            for path, packed in (("", Compression.NoCompression), ("/run/r/task/t/rollout/3", Compression.Gzip)):
                provider = TracerProvider()
                exporter = OTLPSpanExporter(endpoint=f"{at.base}{path}/v1/traces", compression=packed)
                provider.add_span_processor(BatchSpanProcessor(exporter))
                with provider.get_tracer("agents").start_as_current_span("agent"):
                    for _ in range(2):
                        with provider.get_tracer("agents").start_as_current_span("chat", attributes=CALL):
                            pass
                assert provider.force_flush()
                provider.shutdown()
            at.end(signal.SIGKILL)
        with proxy(engine, tmp_path) as at:
            at.post("/run/r/task/t/rollout/3/v1/end", {"reward": 1.0})
            with pytest.raises(HTTPError, match="400"):
                at.post("/v1/traces", {"resourceSpans": 3}, **{"Content-Type": "application/json"})
            at.end()
    lk = lake.open(at.lake)
    rows = lk.sql(
        "SELECT run_id, num_steps, env_return, rollout_index, (SELECT count(*) FROM spans s WHERE s.episode_id = "
        "e.episode_id) AS spans FROM episodes e ORDER BY env_return"
    )
    assert rows.rows() == [("r", 2, 1.0, 3, 3), ("live", 2, None, 0, 3)]
