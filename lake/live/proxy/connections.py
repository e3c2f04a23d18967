"""Connections, as many as are allowed: who is one too many is told so, unless another one is idle.

Whoever opens thousands of connections and says nothing must not keep others out: to make place, the connection without
a request under way that has been open for longest is closed, as a server may at any time.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from lake.live.proxy.replies import error_body

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gate:
    """Makes a protocol for each connection, for `loop.create_server`; its `middleware` tells it who is busy.

    Args:
        most: connections at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._server: web.Server | None = None
        self._open: dict[RequestHandler, None] = {}
        """Oldest first; also some that are closed by now."""
        self._busy: dict[object, int] = {}
        """Connections with requests under way, and how many."""

    def guard(self, server: web.Server) -> None:
        """Stand before a server."""
        self._server = server

    @property
    def middleware(self) -> Callable[[web.Request, _Handler], Awaitable[web.StreamResponse]]:
        """What has to be around the handler of requests."""

        @web.middleware
        async def count(request: web.Request, handler: _Handler) -> web.StreamResponse:
            connection = request.protocol
            self._busy[connection] = self._busy.get(connection, 0) + 1
            try:
                return await handler(request)
            finally:
                self._busy[connection] -= 1
                if not self._busy[connection]:
                    del self._busy[connection]

        return count

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        assert self._server is not None
        if len(self._open) >= self._most:
            alive = set(self._server.connections)
            self._open = {connection: None for connection in self._open if connection in alive}
        if len(self._open) >= self._most:
            idle = next((connection for connection in self._open if connection not in self._busy), None)
            if idle is None:
                return _Refusal(self._most)
            del self._open[idle]
            idle.force_close()
        connection = self._server()
        self._open[connection] = None
        return connection


class _Refusal(asyncio.Protocol):
    """A connection that is told that there are too many, and closed."""

    def __init__(self, most: int) -> None:
        self._most = most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = msgspec.json.encode(
            error_body(503, f"{self._most:,} connections are busy (--max-connections); try again")
        )
        head = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: {len(body)}\r\n"
        transport.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
        transport.close()
