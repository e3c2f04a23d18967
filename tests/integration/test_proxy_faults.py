"""The recording proxy when engines and clients fail: each call is recorded as what it was, or absent, never half."""

import contextlib
import http.client
import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import lake
from testkit.engine_server import Engine, engine_server
from testkit.proxy_process import Proxy, proxy

STEPS = "SELECT task_id, step_index, action FROM steps JOIN episodes USING (episode_id) ORDER BY 1, 2"
SPANS = (
    "SELECT task_id, spans.error AS error, spans.attributes AS attributes FROM spans JOIN episodes USING (episode_id) "
    "WHERE kind = 'call' ORDER BY task_id, spans.started_at"
)
FAULTS: dict[str, tuple[str, bool, str]] = {
    "refused": ("error-400", False, "HTTP 400: .*refused with 400"),
    "refused stream": ("error-429", True, "HTTP 429"),
    "broken": ("error-500", False, "HTTP 500"),
    "overloaded": ("error-503", True, "HTTP 503"),
    "reset": ("half", False, "the upstream failed"),
    "cut": ("cut-3", True, "the upstream failed"),
    "ended early": ("ends-3", True, "ended the stream before the answer was whole"),
    "error in the stream": ("echo-event", True, "the stream says"),
    "silent": ("hang", False, "silent for too long"),
    "silent stream": ("hang", True, "silent for too long"),
    "endless": ("endless", True, "longer than 1,048,576 bytes"),
}
"""What the engine does: model, whether the client asks for a stream, the error that is recorded."""


def body(model: str, *, stream: bool = False, text: str = "find the key") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "stream": stream, "temperature": 1.0}


def answer_of(text: str) -> str:
    """What an answer says, whole or streamed."""
    if text.startswith("{"):
        return str(json.loads(text)["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def begun(at: Proxy, path: str, model: str, until: bytes) -> socket.socket:
    """A streaming call of which so much has arrived."""
    connection = at.connect()
    data = json.dumps(body(model, stream=True)).encode()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    heard = b""
    while until not in heard:
        more = connection.recv(4096)
        assert more, heard
        heard += more
    return connection


def left_by(engine: Engine, count: int) -> None:
    """Wait until the engine noticed that clients left."""
    deadline = time.monotonic() + 30
    while engine.left < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.left == count


def test_what_an_engine_does_wrong_is_a_span_with_the_reason_and_the_next_call_a_step(tmp_path: Path) -> None:
    said: dict[str, str] = {}
    with engine_server() as engine, proxy(engine, tmp_path, "--timeout", "1", "--max-answer", "1") as at:
        for name, (model, stream, _) in FAULTS.items():
            path = f"/ep/{name.replace(' ', '%20')}/v1/chat/completions"
            with contextlib.suppress(Exception):  # each client library has its own
                at.post(path, body(model, stream=stream))
            said[name] = answer_of(at.post(path, body("policy", stream=stream)))
        at.end()
        assert at.log.read_text() == ""
    found = lake.open(at.lake)
    assert {row["task_id"]: row["action"] for row in found.sql(STEPS).to_dicts()} == said
    assert found.sql("SELECT DISTINCT status FROM episodes").to_dicts() == [{"status": "completed"}]
    spans = {row["task_id"]: row for row in found.sql(SPANS).to_dicts()}
    assert spans.keys() == FAULTS.keys()
    for name, (_, _, reason) in FAULTS.items():
        assert re.search(reason, spans[name]["error"]), name
    partial = {name: json.loads(span["attributes"] or "{}").get("partial") for name, span in spans.items()}
    assert {name for name, text in partial.items() if text} == {"cut", "ended early", "error in the stream", "endless"}


def test_an_answer_that_broke_off_is_no_whole_one_for_the_client(tmp_path: Path) -> None:
    """Not even as HTTP: the connection ends where the engine's did, without the end of the body."""
    with engine_server() as engine, proxy(engine, tmp_path) as at:
        for path in ("/v1/chat/completions", "/v1/unknown/stream"):
            with pytest.raises(http.client.IncompleteRead):
                at.ask("POST", path, json.dumps(body("cut-3", stream=True)).encode())


def test_an_engine_that_is_away_is_told_and_is_found_again(tmp_path: Path) -> None:
    engine = Engine()
    with engine_server(engine), proxy(engine, tmp_path) as at:
        pass
    path = "/ep/door/v1/chat/completions"
    with proxy(engine, tmp_path) as at:
        status, _, said = at.ask("POST", path, json.dumps(body("policy")).encode())
        assert (status, json.loads(said)["error"]["type"]) == (502, "trajlake_proxy")
        away = f"nothing answers at {engine.url.removesuffix('/v1')} (connection refused); is the engine running, and "
        assert json.loads(said)["error"]["message"] == f"{away}is --upstream right?"
        assert at.ask("GET", "/v1/models")[0] == 502
        assert at.log.read_text().splitlines() == [f"upstream: {away}is --upstream right?"], "once an outage"
        with engine_server(engine):
            text = answer_of(at.post(path, body("policy")))
        assert at.log.read_text().splitlines()[1:] == [f"upstream: {engine.url.removesuffix('/v1')} answers again"]
        assert at.ask("POST", "/ep/other/v1/chat/completions", json.dumps(body("policy")).encode())[0] == 502
        assert f"upstream: {away}" in at.end()
    found = lake.open(at.lake)
    episodes = found.sql("SELECT task_id, status, num_steps FROM episodes ORDER BY 1").to_dicts()
    assert episodes == [
        {"task_id": "door", "status": "completed", "num_steps": 1},
        {"task_id": "other", "status": "failed", "num_steps": 1},
    ]
    assert [row["action"] for row in found.sql(STEPS).to_dicts()] == [text, ""]
    trainable = found.sql("SELECT task_id, trainable FROM steps JOIN episodes USING (episode_id) ORDER BY 1").to_dicts()
    assert [row["trainable"] for row in trainable] == [True, False]
    assert [row["error"].partition(";")[0] for row in found.sql(SPANS).to_dicts()] == [away.partition(";")[0]] * 2


def test_a_client_that_leaves_ends_its_call_and_disturbs_no_other(tmp_path: Path) -> None:
    with engine_server() as engine, proxy(engine, tmp_path) as at:
        begun(at, "/ep/middle/v1/chat/completions", "slow-300", b"content").close()
        left_by(engine, 1)
        before = at.connect()
        data = json.dumps(body("hang")).encode()
        head = f"POST /ep/before/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        before.sendall(head.encode() + data)
        while "hang" not in engine.asked:
            time.sleep(0.01)
        before.close()
        left_by(engine, 2)
        # All of an answer but the end of its stream: many clients stop there.
        begun(at, "/ep/all but the end/v1/chat/completions".replace(" ", "%20"), "slow-300", b'"stop"').close()
        left_by(engine, 3)
        half = at.connect()
        half.sendall(head.replace("before", "half").encode() + data[:9])
        half.close()
        at.post("/ep/other/v1/chat/completions", body("policy"))
        at.end()
        assert at.log.read_text() == ""
    found = lake.open(at.lake)
    actions = {row["task_id"]: row["action"] for row in found.sql(STEPS).to_dicts()}
    assert actions == {
        "middle": "",
        "before": "",
        "all but the end": "answer 1 to 1 messages",
        "other": "answer 2 to 1 messages",
    }
    spans = {row["task_id"]: row["error"] for row in found.sql(SPANS).to_dicts()}
    assert spans == dict.fromkeys(("middle", "before"), "the client left before the answer was whole")


def test_killed_in_the_middle_of_a_stream_the_call_is_absent_and_those_before_are_there(tmp_path: Path) -> None:
    path = "/ep/door/v1/chat/completions"
    with engine_server() as engine:
        with proxy(engine, tmp_path) as at:
            first = answer_of(at.post(path, body("policy")))
            time.sleep(0.2)  # the spool writes every few milliseconds
            connection = begun(at, path, "slow-300", b"content")
            at.end(signal.SIGKILL)
            connection.close()
        with proxy(engine, tmp_path) as at:
            second = answer_of(at.post(path, body("policy", stream=True, text="again")))
            at.end()
        assert at.log.read_text() == ""
    found = lake.open(at.lake)
    assert [row["action"] for row in found.sql(STEPS).to_dicts()] == [first, second]
    assert found.sql("SELECT status FROM episodes").to_dicts() == [{"status": "completed"}]
    assert found.sql(SPANS).height == 0


def test_a_proxy_that_is_stopped_says_so_of_the_calls_that_it_cut(tmp_path: Path) -> None:
    with engine_server() as engine, proxy(engine, tmp_path) as at:
        connection = begun(at, "/ep/door/v1/chat/completions", "slow-60000", b"HTTP/1.1 200")
        at.end(signal.SIGTERM)
        connection.close()
    found = lake.open(at.lake)
    assert found.sql("SELECT status, stop_reason FROM episodes").to_dicts() == [
        {"status": "failed", "stop_reason": "proxy_stopped"}
    ]
    assert found.sql(SPANS)["error"].to_list() == ["the proxy was stopped before the answer was whole"]
