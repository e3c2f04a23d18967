"""A chat server on 127.0.0.1 that answers, refuses, dawdles or talks nonsense, as a script says."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[["_Handler", dict[str, Any]], None]


class JudgeServer(ThreadingHTTPServer):
    """Plays its script, one entry a request, then answers with `answer`."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.script: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its address, as a judge's base_url."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            reply = server.script.pop(0) if server.script else chat_reply(None)
        try:
            reply(self, body)
        except (BrokenPipeError, ConnectionResetError):
            """The client has given up waiting."""
        finally:
            with server.lock:
                server.in_flight -= 1

    def do_GET(self) -> None:
        """Anyone who asks whether it is there gets an answer."""
        self.send(200, b'{"object": "list", "data": []}')

    def send(self, status: int, data: bytes, **headers: str) -> None:
        """One whole answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: a test's output is its own."""


def chat_reply(text: str | None, **usage: int) -> Reply:
    """The answer of a chat completion; the server's own where None."""

    def reply(handler: _Handler, body: dict[str, Any]) -> None:
        content = handler.server.answer(body) if text is None else text
        answer = {"choices": [{"message": {"role": "assistant", "content": content}}], "usage": usage or None}
        handler.send(200, json.dumps(answer).encode())

    return reply


def raw(data: bytes, status: int = 200, **headers: str) -> Reply:
    """Any bytes under any status."""
    return lambda handler, _: handler.send(status, data, **headers)


def slow(seconds: float) -> Reply:
    """Silence, then the right answer."""

    def reply(handler: _Handler, body: dict[str, Any]) -> None:
        time.sleep(seconds)
        chat_reply(None)(handler, body)

    return reply


def crowd(size: int, seconds: float = 20.0) -> Reply:
    """The right answer, once so many requests have been in flight together, or no one else came for so long."""

    def reply(handler: _Handler, body: dict[str, Any]) -> None:
        end = time.monotonic() + seconds
        while handler.server.most_in_flight < size and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.05)
        chat_reply(None)(handler, body)

    return reply


def close_connection(handler: _Handler, _: dict[str, Any]) -> None:
    """The connection ends without an answer."""
    handler.close_connection = True
    handler.connection.close()


@contextmanager
def serving(answer: Callable[[dict[str, Any]], str] = lambda _: "7") -> Iterator[JudgeServer]:
    """A server that runs."""
    server = JudgeServer(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
