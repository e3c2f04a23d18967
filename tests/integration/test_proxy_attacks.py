"""The recording proxy under attack: bounded, refused with the reason, and no other client's call is disturbed."""

import gzip
import http.client
import json
import re
import resource
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import lake
from lake.live.proxy.app import RequestLimits
from lake.live.proxy.relay import AnswerBudget
from testkit.engine_server import Engine, engine_server
from testkit.proxy_process import Proxy, proxy, proxy_here

CHAT = "/v1/chat/completions"
MB = 1 << 20
LIMITS = ("--set", "max_body=1", "--set", "spool_size=8", "--set", "max_answer=1")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_server() as running:
        yield running


@pytest.fixture(scope="module")
def at(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy for all tests: what one does to it, the next would notice."""
    folder = tmp_path_factory.mktemp("attacked")
    with proxy(engine, folder, *LIMITS) as running:
        yield running
        log_lines = running.log.read_text().splitlines()
        assert [line for line in log_lines if not line.startswith("calls do not say")] == []


SET = {"temperature": 1.0}
"""What calls say, so that the log stays empty."""


def good(at: Proxy, path: str = CHAT, **fields: Any) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": "find the key"}], **SET} | fields
    return str(json.loads(at.post(path, body))["choices"][0]["message"]["content"])


def raw(at: Proxy, data: bytes, *, then: bytes = b"") -> bytes:
    """What is answered to bytes."""
    with at.connect() as connection:
        connection.settimeout(20)
        connection.sendall(data)
        heard = b""
        try:
            while not is_whole(heard) and (chunk := connection.recv(1 << 16)):
                heard += chunk
                if then and b"100 Continue" in heard:
                    connection.sendall(then)
                    then = b""
        except ConnectionResetError:
            pass
    return heard


def is_whole(heard: bytes) -> bool:
    """Whether these bytes are an answer of a known length; who sent too much waits for the end of the connection."""
    above, _, body = heard.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", above)
    return length is not None and len(body) >= int(length[1])


def head(path: str = CHAT, method: str = "POST", **headers: str) -> bytes:
    lines = {"Host": "127.0.0.1", "Connection": "close"} | {n.replace("_", "-"): v for n, v in headers.items()}
    return (
        f"{method} {path} HTTP/1.1\r\n{''.join(f'{n}: {v}' + chr(13) + chr(10) for n, v in lines.items())}\r\n".encode()
    )


REFUSED: dict[str, tuple[bytes, int, str]] = {
    "a gigabyte": (head(Content_Length=str(1 << 30)), 413, "max_body"),
    "more than it may": (head(Content_Length=str(MB + 1)) + bytes(MB + 1), 413, "max_body"),
    "a body without length and without end": (
        head(Transfer_Encoding="chunked") + (b"10000\r\n" + bytes(1 << 16) + b"\r\n") * 20,
        413,
        "max_body",
    ),
    "a bomb": (
        head(Content_Encoding="gzip", Content_Length=str(len(bomb := gzip.compress(bytes(64 * MB))))) + bomb,
        413,
        "max_body",
    ),
    "no gzip": (head(Content_Encoding="gzip", Content_Length="5") + b"hello", 400, "cannot be read"),
    "an encoding that nobody unpacks": (head(Content_Encoding="snappy", Content_Length="2") + b"{}", 415, "gzip"),
    "dots": (head("/ep/a/v1/../../version"), 400, "leads elsewhere"),
    "packed dots": (head("/ep/a/v1/%2e%2e/%2e%2e/version"), 400, "leads elsewhere"),
    "twice packed dots": (head("/v1/%252e%252e/version"), 400, "%25"),
    "null": (head("/ep/a%00b" + CHAT), 400, "printable"),
    "a line in a name": (head("/ep/a%0d%0aX-Trajlake-Run:%20b" + CHAT), 400, "printable"),
    "a long name": (head("/ep/" + "x" * 5000 + CHAT), 400, "1 to 256"),
    "a very long path": (head("/ep/" + "x" * 100_000 + CHAT), 400, "cannot be read"),
    "a very long header": (head(X_Trajlake_Task="x" * 100_000), 400, "cannot be read"),
    "very many headers": (head(**{f"X_{n}": "x" for n in range(500)}), 400, "cannot be read"),
    "a header of ours that is none": (head(X_Trajlake_Tsk="a"), 400, "X-Trajlake-Task"),
    "a header twice": (head(X_Trajlake_Task="a\r\nX-Trajlake-Task: b"), 400, "twice"),
    "two lengths": (head(Content_Length="2\r\nContent-Length: 3") + b"{}", 400, "cannot be read"),
    "length and chunks": (head(Content_Length="2", Transfer_Encoding="chunked") + b"0\r\n\r\n", 400, "cannot be read"),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "cannot be read"),
    "another address": (head("http://10.0.0.1/v1/models", "GET"), 403, "the host is '10.0.0.1'"),
    "a tunnel": (head("10.0.0.1:443", "CONNECT"), 404, ""),
    "another name of this machine": (head(Host="attacker.example"), 403, "valid without a token"),
    "a page of another site": (head(Origin="https://attacker.example", Content_Type="text/plain"), 403, "the page"),
    "a page without a site": (head(Origin="null"), 403, "the page"),
    "websocket": (
        head("/v1/realtime", "GET", Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Key="x"),
        501,
        "websockets",
    ),
    "an expectation": (head(Expect="a-miracle", Content_Length="2") + b"{}", 417, ""),
    **{
        f"spans at {path}": (head(f"/ep/a{path}"), 404, 'OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1/ep/a"')
        for path in ("/v1/v1/traces", "/v1/v1/logs", "/v1/traces/v1/metrics", "/v1/traces/v1/traces/", "/v1/traces/")
    },
    "the end by GET": (head("/ep/a/v1/end", "GET"), 405, "POST"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_reason_and_reaches_no_engine(at: Proxy, engine: Engine, name: str) -> None:
    request, status, reason = REFUSED[name]
    arrived = len(engine.asked)
    answer = raw(at, request)
    assert f" {status} ".encode() in answer[:20], answer[:300]
    assert reason.encode() in answer
    assert len(engine.asked) == arrived
    assert good(at)


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "no JSON": b'{"messages": ',
    "no UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "deep": b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep text": b'{"messages": [{"role": "user", "content": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}]}",
    "no number": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN, "model": "policy"}',
    "infinite": b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999, "model": "policy"}',
    "huge number": b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 4000 + b', "model": "policy"}',
    "half a character": rb'{"messages": [{"role": "user", "content": "\ud800"}], "model": "policy"}',
    "null character": rb'{"messages": [{"role": "user", "content": "a\u0000b"}], "model": "policy"}',
    "twice": b'{"model": "policy", "messages": [{"role": "user", "content": "a", "content": "b"}], "model": "policy"}',
    "numbers as messages": b'{"messages": 1, "model": "policy"}',
    "many": b'{"messages": [' + b"[]," * 30_000 + b'[]], "model": "policy"}',
    "many tools": b'{"messages": [], "tools": [' + b"{}," * 10_000 + b'{}], "model": "policy"}',
}


@pytest.mark.parametrize("api", ["chat/completions", "completions", "responses", "messages"])
def test_hostile_json_is_the_engines_affair_and_breaks_no_record(at: Proxy, api: str) -> None:
    for name, data in HOSTILE.items():
        status, _, payload = at.ask("POST", f"/ep/{name.replace(' ', '-')}/v1/{api}", data)
        assert status in (200, 400, 500), name
        assert b"trajlake_proxy" not in payload, name
    assert good(at)


def test_what_is_no_call_passes_by(at: Proxy) -> None:
    assert (
        json.loads(raw(at, head("/v1/models", "GET")).partition(b"\r\n\r\n")[2].split(b"\r\n")[1])["object"] == "list"
    )
    assert raw(at, head("/v1/models", "HEAD")).startswith(b"HTTP/1.1 200")
    assert b" 405 " in raw(at, head("/v1/models", "OPTIONS"))[:20]
    assert b" 404 " in raw(at, head("/v1/nothing", "DELETE"))[:20]
    assert b" 200 " in raw(at, head("/v1/models", "GET", Origin="http://localhost:3000"))[:20]


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_packed_body_arrives_unpacked(at: Proxy, engine: Engine, name: str, pack: Any) -> None:
    data = pack(json.dumps({"model": "policy", "messages": [{"role": "user", "content": "packed"}]}).encode())
    status, _, _ = at.ask("POST", f"/ep/{name}{CHAT}", data, **{"Content-Encoding": name})
    assert status == 200
    assert engine.calls[-1].body["messages"][0]["content"] == "packed"


def test_who_asks_whether_to_go_on_is_told_to(at: Proxy) -> None:
    data = json.dumps({"model": "policy", "messages": []}).encode()
    answer = raw(at, head(Expect="100-continue", Content_Length=str(len(data))), then=data)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


def test_numbers_that_no_float_holds_reach_the_engine_as_they_are(at: Proxy, engine: Engine) -> None:
    at.ask("POST", CHAT, HOSTILE["huge number"].replace(b"9" * 4000, b"9" * 40))
    assert engine.calls[-1].body["seed"] == int("9" * 40)
    at.ask("POST", CHAT, HOSTILE["infinite"])
    assert engine.calls[-1].body["temperature"] == float("inf")


@pytest.mark.parametrize(("most", "n_idle"), [(500, 100), pytest.param(10_000, 4096, marks=pytest.mark.slow)])
def test_a_crowd_of_connections_keeps_nobody_out(engine: Engine, tmp_path: Path, most: int, n_idle: int) -> None:
    """Half of them say nothing, half send a body byte by byte; those who came before and after work on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < most + 1000:
        pytest.skip(f"this process may open {hard:,} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most + 1000), hard))
    with proxy(engine, tmp_path, "--set", f"max_connections={n_idle}") as at, ExitStack() as stack:
        done = threading.Event()
        began, texts = threading.Event(), []

        def work() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", at.port, timeout=60)
            while not done.wait(0.05):
                connection.request("POST", "/ep/worker" + CHAT, json.dumps({"model": "policy", "messages": [], **SET}))
                texts.append(connection.getresponse().read())
                began.set()
            connection.close()

        stream = stack.enter_context(at.connect())
        body = json.dumps(
            {"model": "slow-200", "stream": True, "messages": [{"role": "user", "content": "a"}], **SET}
        ).encode()
        stream.sendall(head("/ep/stream" + CHAT, Content_Length=str(len(body))) + body)
        worker = threading.Thread(target=work)
        worker.start()
        assert began.wait(60)
        try:
            for number in range(most):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", at.port), timeout=60))
                if number % 2:
                    connection.sendall(head(Content_Length="1000") + b"{")
            assert good(at, "/ep/after" + CHAT)
        finally:
            done.set()
            worker.join()
        assert len(texts) > 1
        heard = b""
        while chunk := stream.recv(1 << 16):
            heard += chunk
        assert heard.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        at.end()
        assert at.log.read_text() == ""
    counts = lake.open(at.lake).sql("SELECT task_id, num_steps FROM episodes ORDER BY 1").rows()
    assert counts == [("after", 1), ("stream", 1), ("worker", len(texts))]


def test_bodies_of_all_clients_are_bounded_in_time_and_together(engine: Engine, tmp_path: Path) -> None:
    limits = RequestLimits(max_body=MB, max_bodies=3 * MB, body_seconds=1.0)
    with proxy_here(engine, tmp_path, limits=limits) as at, ExitStack() as stack:
        slow = [stack.enter_context(at.connect()) for _ in range(4)]
        for connection in slow:
            connection.sendall(head(Content_Length=str(MB)) + bytes(MB - 1))
        # Together they are too many: one gets that answer at once, the others have to make haste.
        statuses = sorted(connection.recv(1000).split(b" ")[1] for connection in slow)
        assert statuses == [b"408", b"408", b"408", b"503"]
        assert json.loads(at.post(CHAT, {"model": "policy", "messages": [], **SET}))


def test_an_answer_that_takes_the_room_of_all_is_cut_off_and_the_next_call_is_answered(
    engine: Engine, tmp_path: Path
) -> None:
    with proxy_here(engine, tmp_path, limits=RequestLimits(max_answers=MB)) as at:
        body = json.dumps({"model": "endless", "stream": True, "messages": [], **SET}).encode()
        with pytest.raises(http.client.IncompleteRead):
            at.ask("POST", "/ep/endless" + CHAT, body)
        assert json.loads(at.post("/ep/good" + CHAT, {"model": "policy", "messages": [], **SET}))
    with lake.open(at.lake) as recorded:
        (error,) = recorded.sql("SELECT error FROM spans")["error"].to_list()
        statuses = dict(recorded.sql("SELECT task_id, status FROM episodes").rows())
    assert "max_answers" in error
    assert statuses == {"endless": "failed", "good": "completed"}


def test_of_answers_that_are_too_much_together_the_longest_makes_room() -> None:
    cut: list[str] = []
    room = AnswerBudget(100)
    with room.share(lambda: cut.append("small")) as small, room.share(lambda: cut.append("large")) as large:
        large.take(60)
        small.take(40)
        assert cut == []
        small.take(1)
        assert (cut, large.is_cut, small.is_cut) == (["large"], True, False)
        large.take(1000)
        small.take(59)
        assert cut == ["large"]
        small.take(1)
        assert cut == ["large", "small"]
    with room.share(lambda: cut.append("next")) as share:
        share.take(100)
    assert len(cut) == 2
