"""Connections, as many as are allowed: who is one too many is told so, unless another one is idle.

Whoever opens thousands of connections and says nothing, or sends a body byte by byte, must not keep others out. To make
place, a connection on which no call is under way is closed, as a server may at any time: first those that never made
one, oldest first, then the one whose last call is longest ago.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from lake.live.proxy.replies import error_body, refusal

_IDLE_SECONDS = 75.0
"""After which a connection is closed, if nobody needs its place before."""
_LINGERING_SECONDS = 2.0
"""How long a client that was refused may go on sending, so that it comes to read why."""


class Gate:
    """Makes a protocol for each connection, for `loop.create_server`.

    Args:
        most: connections at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._server: web.Server | None = None
        self._silent: dict[RequestHandler, None] = {}
        """Connections that made no call so far, oldest first."""
        self._used: dict[RequestHandler, None] = {}
        """The others that are idle, the one whose last call is longest ago first."""
        self._busy: dict[RequestHandler, None] = {}

    def guard(self, server: web.Server) -> None:
        """Stand before a server."""
        self._server = server

    @contextmanager
    def busy(self, connection: RequestHandler) -> Iterator[None]:
        """While a call is under way on a connection, which makes one at a time."""
        self.forget(connection)
        self._busy[connection] = None
        try:
            yield
        finally:
            if self._busy.pop(connection, connection) is None:  # else it was closed meanwhile
                self._used[connection] = None

    def forget(self, connection: RequestHandler) -> None:
        """A connection is closed."""
        for kind in (self._silent, self._used, self._busy):
            kind.pop(connection, None)

    def admits(self, connection: RequestHandler) -> bool:
        """Whether there is place for a new connection, which may be made."""
        if len(self._silent) + len(self._used) + len(self._busy) >= self.most:
            idle = self._silent or self._used
            if not idle:
                return False
            longest = next(iter(idle))
            del idle[longest]
            longest.force_close()
        self._silent[connection] = None
        return True

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        assert self._server is not None
        return _Connection(self, self._server)


class _Connection(RequestHandler):
    """A connection that tells the gate of its end, and whoever does not speak HTTP so; what he said goes to no log."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=_IDLE_SECONDS, lingering_time=_LINGERING_SECONDS)
        self._gate = gate

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._gate.admits(self):
            super().connection_made(transport)
            return
        assert isinstance(transport, asyncio.Transport)
        self.force_close()
        why = f"{self._gate.most:,} connections are busy (--max-connections); try again"
        body = msgspec.json.encode(error_body(503, why))
        head = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: {len(body)}\r\n"
        transport.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
        transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._gate.forget(self)

    def log_exception(self, *_: Any, **__: Any) -> None:
        """Say nothing: what aiohttp would tell may be of the request, and faults of ours are told by the proxy."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        said = (message or "").partition("\n")[0].strip(" :")
        response = refusal(status, f"the request cannot be read: {said or type(exc).__name__}")
        response.force_close()
        return response
