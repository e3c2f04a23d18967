"""A port of this machine forwarded to a server, which a test closes and opens again."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PortForward:
    """Passes connections on to a server while it is open."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._server = host, int(port)
        self._port = 0
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self.open()

    @property
    def endpoint(self) -> str:
        """http://127.0.0.1:PORT, the same for its whole life."""
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Take connections."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        """Break all connections and refuse new ones."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._server)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        self._connections.add(source)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        self._connections.discard(source)
        source.close()


@contextmanager
def forward_port(endpoint: str) -> Iterator[PortForward]:
    """Forward a port to a server until the block ends."""
    forward = PortForward(endpoint)
    try:
        yield forward
    finally:
        forward.shut()
