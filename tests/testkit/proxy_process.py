"""The recording proxy as a process of its own, before an engine: `trajlake record` on a free port of 127.0.0.1."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testkit.engine_server import Engine

MAIN = "from lake.cli import main; main()"


class Proxy:
    """A proxy in a process of its own."""

    def __init__(self, engine: Engine, folder: Path, *options: str) -> None:
        self.lake = str(folder / "lake")
        command = [sys.executable, "-c", MAIN, "record", "--upstream", engine.url, "--lake", self.lake, "--port", "0"]
        command += ["--spool", str(folder / "spool"), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.base = self.process.stdout.readline().split()[1].removesuffix("/v1")

    def post(self, path: str, body: dict[str, Any], **headers: str) -> str:
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode())

    def end(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=120)


@contextmanager
def proxy(engine: Engine, folder: Path, *options: str) -> Iterator[Proxy]:
    """A running proxy, whose lake and spool are below `folder`; `options` are further ones of the command."""
    started = Proxy(engine, folder, *options)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGKILL)
