"""The viewer as a real process: `trajlake view`, started, awaited, ended."""

import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from testkit.commands import Command

_PATIENCE = 120
"""Seconds a start may take on a busy machine."""
_ADDRESS = re.compile(r"http://\S+")


def free_port() -> int:
    """A port that no one listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Viewer:
    """A running viewer."""

    process: "subprocess.Popen[str]"
    address: str
    said: list[str] = field(default_factory=list)
    """What it wrote so far, both streams."""


@contextmanager
def viewer(lake_uri: str, *options: str) -> Iterator[Viewer]:
    """A viewer that has printed its address; it is ended when the block is left."""
    command = ["view", "--lake", lake_uri, "--no-browser", "--port", str(free_port()), *options]
    process = Command(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    lines: list[str] = []
    printed = threading.Event()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if _ADDRESS.search(line):
                printed.set()
        printed.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        assert printed.wait(_PATIENCE), "".join(lines)
        match = _ADDRESS.search("".join(lines))
        assert match, f"no address was printed: {''.join(lines)}"
        yield Viewer(process, match.group(), lines)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        listener.join(30)
        assert process.stdout is not None
        process.stdout.close()
