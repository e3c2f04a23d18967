"""The recording proxy as its own process, before an engine: `trajlake record` on a free port of 127.0.0.1."""

import asyncio
import json
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import patch

from lake.live.proxy.serve import Options, ProxyReport, serve
from testkit.commands import Command
from testkit.engine_server import Engine
from testkit.processes import environment


def command(engine: Engine, folder: Path, *options: str) -> list[str]:
    """The command line of a proxy whose lake and spool are below a folder, unless an option says otherwise."""
    ours = ["--upstream", engine.url, "--port", "0", "--spool", str(folder / "spool")]
    lake_option = [] if "--lake" in options else ["--lake", str(folder / "lake")]
    return ["record", *ours, *lake_option, *options]


class Client:
    """A client of a proxy.

    Args:
        base: the proxy's address, without /v1.
        lake: where it records, unless an option says otherwise.
    """

    def __init__(self, base: str, lake: str) -> None:
        self.base, self.lake = base, lake

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def post(self, path: str, body: dict[str, Any], **headers: str) -> str:
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode())

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of what it answers, no matter what it is."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """A connection, for what no client library sends."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


class Proxy(Client):
    """A proxy in its own process.

    Attributes:
        log: file that its stderr goes to.
    """

    def __init__(self, engine: Engine, folder: Path, *options: str, **variables: str) -> None:
        self.log = folder / "log"
        with self.log.open("a") as log:
            self.process = Command(
                command(engine, folder, *options),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(**variables),
            )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words, self.log.read_text()
        super().__init__(words[1].removesuffix("/v1"), str(folder / "lake"))

    def end(self, number: int = signal.SIGINT) -> str:
        """End it; what it printed behind its first line."""
        self.process.send_signal(number)
        patience = threading.Timer(120, self.process.kill)
        patience.start()
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            printed = pipe.read()  # `communicate` loses what came together with the first line
        self.process.wait()
        patience.cancel()
        return str(printed)


@contextmanager
def proxy(engine: Engine, folder: Path, *options: str, **variables: str) -> Iterator[Proxy]:
    """A running proxy, whose lake, spool and log are below `folder`.

    Args:
        options: further ones of the command; one that is there twice counts as said last.
        variables: of its environment.
    """
    started = Proxy(engine, folder, *options, **variables)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGKILL)


class ProxyHere(Client):
    """A proxy in a thread of this process, for what no option of the command says, and what a test changes in it.

    Args:
        engine: before which it is.
        folder: its lake and its spool are below it.
        options: further ones of `Options`.
    """

    def __init__(self, engine: Engine, folder: Path, **options: Any) -> None:
        super().__init__("", str(folder / "lake"))
        about: dict[str, Any] = {"run": "live", "port": 0, "spool": folder / "spool"}
        self._options = Options(upstream=engine.url, lake_uri=self.lake, **about | options)
        self._ready: Queue[str] = Queue()
        self._stops: dict[int, Callable[[], object]] = {}
        self._outcome: Future[ProxyReport] = Future()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        # Signals are heard by main threads alone.
        with patch.object(asyncio.SelectorEventLoop, "add_signal_handler", self._handle):
            self._thread.start()
            self.base = self._ready.get(timeout=60).removesuffix("/v1")
        assert self.base, self._outcome.result()

    def _handle(self, number: int, stop: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        self._stops[number] = lambda: loop.call_soon_threadsafe(stop)

    def _serve(self) -> None:
        try:
            self._outcome.set_result(serve(self._options, ready=self._ready.put, say=lambda _: None))
        except BaseException as error:
            self._outcome.set_exception(error)
        self._ready.put("")

    def end(self) -> ProxyReport:
        """End it as a signal does; the outcome of its calls."""
        if not self._outcome.done():
            self._stops[signal.SIGTERM]()
        outcome = self._outcome.result(120)
        self._thread.join()
        return outcome


@contextmanager
def proxy_here(engine: Engine, folder: Path, **options: Any) -> Iterator[ProxyHere]:
    """A running proxy in this process; see `ProxyHere`."""
    started = ProxyHere(engine, folder, **options)
    try:
        yield started
    finally:
        started.end()
