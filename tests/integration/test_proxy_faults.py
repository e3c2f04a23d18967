"""The recording proxy when engines and clients fail: each call is recorded as what it was, or absent, never half.

Tests that kill no proxy share one; each has its own episodes, which it ends and reads once they are delivered.
"""

import contextlib
import errno
import http.client
import json
import os
import re
import signal
import socket
import time
import urllib.error
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lake
from testkit.engine_server import Engine, engine_server
from testkit.object_store import unused_endpoint
from testkit.proxy_process import Client, Proxy, proxy, proxy_here
from testkit.wording import Wording

STEPS = "SELECT task_id, step_index, action, trainable FROM steps JOIN episodes USING (episode_id) ORDER BY 1, 2"
EPISODES = "SELECT task_id, status, num_steps FROM episodes ORDER BY 1"
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


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_server() as running:
        yield running


@pytest.fixture(scope="module")
def at(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy that says nothing of what fails."""
    with proxy(engine, tmp_path_factory.mktemp("faults"), "--set", "timeout=2", "--set", "max_answer=1") as running:
        yield running
        running.end()
        assert running.log.read_text() == ""


def path_of(task: str) -> str:
    return f"/ep/{task.replace(' ', '%20')}/v1/chat/completions"


class Told:
    """What is in the lake of some tasks.

    Attributes:
        actions: of each task's steps.
        errors: of each task's failed calls.
        partial: of each task's failed calls, how much of the answer there was.
        statuses: of each task.
    """

    def __init__(self, uri: str, tasks: Collection[str]) -> None:
        recorded = lake.open(uri)

        def rows(query: str) -> list[dict[str, Any]]:
            return [row for row in recorded.sql(query).to_dicts() if row["task_id"] in tasks]

        self.actions, self.errors, self.partial = (defaultdict[str, list[Any]](list) for _ in range(3))
        for row in rows(STEPS):
            self.actions[row["task_id"]].append(row["action"])
        for row in rows(SPANS):
            self.errors[row["task_id"]].append(row["error"])
            self.partial[row["task_id"]].append(json.loads(row["attributes"] or "{}").get("partial"))
        self.statuses = {row["task_id"]: row["status"] for row in rows(EPISODES)}


def told_of(at: Client, tasks: Collection[str]) -> Told:
    """End the episodes of tasks; what is in the lake of them."""
    for task in tasks:
        at.post(path_of(task).replace("chat/completions", "end"), {})
    at.post("/v1/flush", {})
    return Told(at.lake, tasks)


def body(model: str, *, stream: bool = False, text: str = "find the key") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "stream": stream, "temperature": 1.0}


def answer_of(text: str) -> str:
    """What an answer says, whole or streamed."""
    if text.startswith("{"):
        return str(json.loads(text)["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def begun(at: Client, path: str, model: str, until: bytes) -> socket.socket:
    """A streaming call, after so much has arrived."""
    connection = at.connect()
    data = json.dumps(body(model, stream=True)).encode()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    heard = b""
    while until not in heard:
        chunk = connection.recv(4096)
        assert chunk, heard
        heard += chunk
    return connection


def left(engine: Engine, model: str) -> None:
    """Wait until the engine noticed that the client of a model's call left."""
    deadline = time.monotonic() + 30
    while model not in engine.gone:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_an_engine_does_wrong_is_a_span_with_the_reason_and_the_next_call_a_step(at: Proxy) -> None:
    def say(name: str) -> str:
        model, stream, _ = FAULTS[name]
        with contextlib.suppress(Exception):  # each client library has its own
            at.post(path_of(name), body(model, stream=stream))
        return answer_of(at.post(path_of(name), body("policy", stream=stream)))

    with ThreadPoolExecutor(len(FAULTS)) as pool:
        answers = dict(zip(FAULTS, pool.map(say, FAULTS), strict=True))
    record = told_of(at, FAULTS)
    assert record.actions == {name: [text] for name, text in answers.items()}
    assert record.statuses == dict.fromkeys(FAULTS, "completed")
    assert record.errors.keys() == FAULTS.keys()
    for name, (_, _, reason) in FAULTS.items():
        (error,) = record.errors[name]
        assert re.search(reason, error), name
    started = {name for name, (text,) in record.partial.items() if text}
    assert started == {"cut", "ended early", "error in the stream", "endless"}


def test_an_answer_that_broke_off_is_no_whole_one_for_the_client(at: Proxy) -> None:
    """Not even as HTTP: the connection ends where the engine's did, without the end of the body."""
    for path in ("/v1/chat/completions", "/v1/unknown/stream"):
        with pytest.raises(http.client.IncompleteRead):
            at.ask("POST", path, json.dumps(body("cut-3", stream=True)).encode())


def test_a_client_that_leaves_ends_its_call_and_disturbs_no_other(at: Proxy, engine: Engine) -> None:
    begun(at, path_of("middle"), "slow-300", b"content").close()
    left(engine, "slow-300")
    before = at.connect()
    data = json.dumps(body("hang-for-one")).encode()
    head = f"POST {path_of('before')} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    before.sendall(head.encode() + data)
    while "hang-for-one" not in engine.asked:
        time.sleep(0.01)
    before.close()
    left(engine, "hang-for-one")
    # All of an answer but the end of its stream: many clients stop there.
    begun(at, path_of("all but the end"), "slow-301", b'"stop"').close()
    left(engine, "slow-301")
    half = at.connect()
    half.sendall(head.replace("before", "half").encode() + data[:9])
    half.close()
    other_answer = answer_of(at.post(path_of("other"), body("policy")))
    record = told_of(at, ("middle", "before", "all but the end", "other"))
    (text,) = (call.text for call in engine.calls if call.body["model"] == "slow-301")
    assert record.actions == {"middle": [""], "before": [""], "all but the end": [text], "other": [other_answer]}
    left_early = "the client left before the answer was whole"
    assert record.errors == {"middle": [left_early], "before": [left_early]}
    assert "half" not in Told(at.lake, ("half",)).statuses


def test_an_end_that_is_refused_breaks_off_no_call(at: Proxy, engine: Engine) -> None:
    path = path_of("refused end")
    connection = begun(at, path, "slow-100", b"content")
    for wrong in ({"status": "nonsense"}, {"step_rewards": [1.0, 1.0]}, {"scores": [{"scorer": " ", "value": 1.0}]}):
        body_of_end = json.dumps(wrong | {"closes": True}).encode()
        assert at.ask("POST", path.replace("chat/completions", "end"), body_of_end)[0] == 400
    heard = b""
    while b"[DONE]" not in heard:
        heard += (chunk := connection.recv(4096))
        assert chunk, heard
    connection.close()
    record = told_of(at, ("refused end",))
    (text,) = (call.text for call in engine.calls if call.body["model"] == "slow-100")
    assert (record.actions, record.errors) == ({"refused end": [text]}, {})


def test_an_engine_that_is_away_is_told_and_is_found_again(tmp_path: Path) -> None:
    engine, path = Engine(), path_of("door")
    engine.port = int(unused_endpoint().rpartition(":")[2])
    with proxy(engine, tmp_path) as at:
        status, _, payload = at.ask("POST", path, json.dumps(body("policy")).encode())
        assert (status, json.loads(payload)["error"]["type"]) == (502, "trajlake_proxy")
        away = f"nothing answers at {engine.url.removesuffix('/v1')} (connection refused); is the engine running, and "
        assert json.loads(payload)["error"]["message"] == f"{away}is --upstream right?"
        assert at.ask("GET", "/v1/models")[0] == 502
        assert at.log.read_text().splitlines() == [f"upstream: {away}is --upstream right?"], "once an outage"
        with engine_server(engine):
            text = answer_of(at.post(path, body("policy")))
        assert at.log.read_text().splitlines()[1:] == [f"upstream: {engine.url.removesuffix('/v1')} answers again"]
        assert at.ask("POST", "/ep/other/v1/chat/completions", json.dumps(body("policy")).encode())[0] == 502
        assert f"upstream: {away}" in at.end()
    lk = lake.open(at.lake)
    episodes = lk.sql("SELECT task_id, status, num_steps FROM episodes ORDER BY 1").to_dicts()
    assert episodes == [
        {"task_id": "door", "status": "completed", "num_steps": 1},
        {"task_id": "other", "status": "failed", "num_steps": 1},
    ]
    assert [row["action"] for row in lk.sql(STEPS).to_dicts()] == [text, ""]
    trainable = lk.sql("SELECT task_id, trainable FROM steps JOIN episodes USING (episode_id) ORDER BY 1").to_dicts()
    assert [row["trainable"] for row in trainable] == [True, False]
    assert [row["error"].partition(";")[0] for row in lk.sql(SPANS).to_dicts()] == [away.partition(";")[0]] * 2


def test_killed_in_the_middle_of_a_stream_the_call_is_absent_and_those_before_are_there(
    engine: Engine, tmp_path: Path
) -> None:
    path = path_of("door")
    with proxy(engine, tmp_path) as at:
        first = answer_of(at.post(path, body("policy")))
        while not any(first.encode() in frames.read_bytes() for frames in tmp_path.rglob("*.frames")):
            time.sleep(0.005)
        connection = begun(at, path, "slow-300", b"content")
        at.end(signal.SIGKILL)
        connection.close()
    with proxy(engine, tmp_path) as at:
        second = answer_of(at.post(path, body("policy", stream=True, text="again")))
        at.end()
    assert at.log.read_text() == ""
    record = Told(at.lake, ("door",))
    assert (record.actions, record.errors, record.statuses) == ({"door": [first, second]}, {}, {"door": "completed"})


def test_a_proxy_that_is_stopped_says_so_of_the_calls_that_it_cut(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr("lake.live.proxy.serve._LEAVING_SECONDS", 0.1)
    with proxy_here(engine, tmp_path) as at:
        connection = begun(at, path_of("door"), "slow-60000", b"HTTP/1.1 200")
        outcome = at.end()
        connection.close()
    assert outcome.is_all
    recorded = lake.open(tmp_path / "lake")
    assert recorded.sql("SELECT status, stop_reason FROM episodes").rows() == [("failed", "proxy_stopped")]
    (error,) = recorded.sql(SPANS)["error"].to_list()
    assert "the proxy was stopped" in wording(error)


@pytest.mark.parametrize("stream", [False, True])
def test_killed_right_after_an_answer_a_durable_proxy_has_its_call(
    engine: Engine, tmp_path: Path, stream: bool
) -> None:
    """Several clients at once; anyone who has the tenth whole answer kills it at that moment."""
    answers: dict[str, str] = {}
    for kill in range(2):
        with proxy(engine, tmp_path, "--durable") as at:
            due = len(answers) + 10

            def work(client: int, at: Proxy = at, kill: int = kill, due: int = due) -> None:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    for number in range(50):
                        task = f"{kill}-{client}-{number}"
                        text = at.post(path_of(task), body("policy", stream=stream, text=task))
                        if not stream or text.endswith("data: [DONE]\n\n"):
                            answers[task] = answer_of(text)
                        if len(answers) >= due:
                            os.kill(at.process.pid, signal.SIGKILL)

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(work, range(4)))
            at.end(signal.SIGKILL)
    with proxy(engine, tmp_path) as at:
        at.end()
    record = Told(at.lake, answers)
    assert len(answers) >= 20
    assert record.actions == {task: [text] for task, text in answers.items()}


def test_an_answer_whose_call_is_not_on_the_disk_is_held_back(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with proxy_here(engine, tmp_path, durable=True) as at:
        at.post(path_of("before"), body("policy"))
        with monkeypatch.context() as patched:
            patched.setattr("lake.live.spool.write_at", full)
            with pytest.raises(urllib.error.HTTPError):
                at.post(path_of("held"), body("policy"))
            # Event by event: the one that says why the answer ended is held back too.
            with pytest.raises(http.client.IncompleteRead) as error:
                at.post(path_of("held"), body("slow-20", stream=True))
            assert b"content" in error.value.partial
            assert (b'"stop"' in error.value.partial, b"[DONE]" in error.value.partial) == (False, False)
        deadline = time.monotonic() + 30
        while at.ask("POST", path_of("after"), json.dumps(body("policy")).encode())[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answer_of(at.post(path_of("after"), body("policy", stream=True, text="again")))
