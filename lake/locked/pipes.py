"""The pipes of a child process, written and read without ever waiting for the child alone.

A child may print while it should read, or never read at all: who writes to it first and reads it later waits for ever.
So its stdin, stdout and stderr are served together, a moment at a time, and the caller keeps the clock.
"""

import os
import selectors
import subprocess
from contextlib import suppress
from typing import Literal

Stream = Literal["stdout", "stderr"]
_READ_BYTES = 1 << 18


class ChildPipes:
    """The pipes of a process started with `subprocess.PIPE` for all three, which nothing else may use from here on."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._selector = selectors.DefaultSelector()
        self._outbox = memoryview(b"")
        self._hangs_up = False
        # Raw handles: Python's buffered pipes would block.
        self._to = process.stdin.fileno()
        self._streams: dict[int, Stream] = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr"}
        for handle in (self._to, *self._streams):
            os.set_blocking(handle, False)
        for handle in self._streams:
            self._selector.register(handle, selectors.EVENT_READ)

    @property
    def is_unsent(self) -> bool:
        """Whether some of what was posted still waits for the child to read."""
        return bool(self._outbox)

    @property
    def is_open(self) -> bool:
        """Whether the child may still take or say something."""
        return bool(self._selector.get_map())

    def post(self, data: bytes, *, last: bool = False) -> None:
        """Hand data (at least a byte) over while `turn` is called; `last` closes the child's stdin after it."""
        self._outbox = memoryview(data)
        self._hangs_up = last
        self._selector.register(self._to, selectors.EVENT_WRITE)

    def turn(self, seconds: float) -> list[tuple[Stream, bytes]]:
        """Write and read what can be, waiting at most so many seconds for the first; no bytes end a stream."""
        found: list[tuple[Stream, bytes]] = []
        for key, _ in self._selector.select(seconds):
            if key.fd == self._to:
                self._send()
            elif (data := self._read(key.fd)) is not None:
                found.append((self._streams[key.fd], data))
                if not data:
                    self._selector.unregister(key.fd)
        return found

    def rest(self, stream: Stream, most: int) -> bytes:
        """What the child has said on a stream by now: so many bytes of it, without waiting."""
        (handle,) = (handle for handle, name in self._streams.items() if name == stream)
        found = b""
        while len(found) < most and (data := self._read(handle)):
            found += data
        return found

    def close(self) -> None:
        """Close all three; may be called twice."""
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _send(self) -> None:
        with suppress(BlockingIOError):
            try:
                self._outbox = self._outbox[os.write(self._to, self._outbox) :]
            except BrokenPipeError:
                self._outbox = memoryview(b"")  # its end is noticed where it is read
        if not self._outbox:
            self._selector.unregister(self._to)
            if self._hangs_up and self._process.stdin is not None:
                self._process.stdin.close()

    def _read(self, handle: int) -> bytes | None:
        """Some bytes; none at the end, None if there is nothing now."""
        try:
            return os.read(handle, _READ_BYTES)
        except BlockingIOError:
            return None
