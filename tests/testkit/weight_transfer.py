"""Both sides of vLLM's weight transfer, without tensors, since NCCL and CUDA IPC want GPUs.

`weight_transfer_server` has the four routes and what else a push calls, and notes what was asked, in order. `stand_in`
puts a trainer's side in the place of vLLM's that makes the calls of 0.32.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class TrainerSide:
    """A round of vLLM's trainer engines, and their factory: the calls, and no tensors."""

    made: list["TrainerSide"]

    def __init__(self, init_info: Any, *, client: Any, source: Any) -> None:
        self.init_info, self.client, self.source = init_info, client, source
        request = {"packed": init_info.packed}
        if self.is_group:
            request |= {"master_address": init_info.master_address, "master_port": init_info.master_port}
            request |= {"world_size": init_info.world_size, "rank_offset": 1}
        client.init_weight_transfer_engine(request)
        TrainerSide.made.append(self)

    @property
    def is_group(self) -> bool:
        """NCCL, and not CUDA IPC."""
        return hasattr(self.init_info, "world_size")

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any) -> "TrainerSide":
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        names = [name for name, _ in self.source.named_parameters()]
        self.client.start_weight_update()
        handles = {} if self.is_group else {"ipc_handles": {"GPU-0": (b"address", 4)}, "ipc_handles_pickled": None}
        self.client.update_weights({"names": names} | handles)
        self.client.finish_weight_update()


def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[TrainerSide]:
    """Put the trainer's side in the place of vLLM's package."""
    TrainerSide.made = []
    package = ModuleType("vllm.distributed.weight_transfer")
    package.WeightTransferTrainerFactory = TrainerSide  # type: ignore[attr-defined]
    package.ModuleSource = lambda module: module  # type: ignore[attr-defined]
    modules = {
        "vllm": ModuleType("vllm"),
        "vllm.distributed": ModuleType("vllm.distributed"),
        package.__name__: package,
    }
    for backend in ("nccl", "ipc"):
        module = ModuleType(f"{package.__name__}.{backend}_engine")
        setattr(module, f"{backend.upper()}TrainerInitInfo", SimpleNamespace)
        modules[module.__name__] = module
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return TrainerSide


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
