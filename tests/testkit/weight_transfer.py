"""The four routes of vLLM's weight transfer, and what else a push calls, on 127.0.0.1: what was asked, in order.

A stand-in, since NCCL wants GPUs: it notes requests, and receives no tensors.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WeightTransferServer:
    """One server of so many workers."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.asked: list[tuple[str, Any]] = []
        """Path and body of every request but those for the world size."""
        self.fails_at: str | None = None
        """Path that is answered with HTTP 500."""
        self.url = ""

    @property
    def paths(self) -> list[str]:
        """Paths in the order in which they were asked for."""
        return [path for path, _ in self.asked]


@contextmanager
def weight_transfer_server(workers: int = 1) -> Iterator[WeightTransferServer]:
    """A running one."""
    state = WeightTransferServer(workers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"world_size": state.workers})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state.asked.append((self.path, json.loads(data) if data else None))
            failed = self.path == state.fails_at
            self._answer(500 if failed else 200, {"error": {"message": "out of memory"}} if failed else {})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
