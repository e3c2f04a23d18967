"""The committer of a machine: a process that commits what the writers of a lake hand to it, round after round.

One loop: take what has come, do all of it in one round, answer, and take what has come meanwhile. So a writer waits for
the round that is at work and for the one with its own batch, whoever else writes, and the more wait the larger are the
commits. Rounds are the work of a thread of their own: however long one takes, the loop tells those who wait that the
committer is alive. Nothing here outlives the process: see `client` for what becomes of batches when it is killed. It
ends when there is no writer left.
"""

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.write.fleet.messages import Answer, Failed, Request, Working, packed, requests, unpacked
from lake.write.fleet.place import Place
from lake.write.fleet.rounds import answered
from lake.write.ledger import Ledger

_LOOK_SECONDS = 2.0
"""How often it looks whether there is a writer left, and whether those who wait have to be told something."""
WORKING_SECONDS = 5.0
"""How long those who wait for a round are told nothing."""
_SEND_SECONDS = 2.0
"""How long it waits for a writer that does not take its answer."""
_BACKLOG = 1024


class Server:
    """The socket of a place, and the rounds of a lake, whose ledger is used by nobody else."""

    def __init__(self, place: Place, ledger: Ledger) -> None:
        self._place = place
        self._ledger = ledger
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[socket.socket, bytearray] = {}
        """Connection -> what came of a message that is not whole yet."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._waiting: list[tuple[socket.socket, Request]] = []
        """What has come, in order, for the next round."""
        self._at_work: list[socket.socket] = []
        """Whose requests are in the round that is at work."""
        self._round: Future[list[Answer]] | None = None
        self._told = 0.0
        self._bell, self._rung = socket.socketpair()
        """Rung by the thread of a round at its end."""

    def run(self) -> None:
        """Serve until there is no writer."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._place.socket)  # noqa: PTH108 - what a dead one left
        self._listener.bind(self._place.socket)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        for heard in (self._listener, self._rung):
            self._selector.register(heard, selectors.EVENT_READ)
        with self._selector, self._listener, self._bell, self._rung, ThreadPoolExecutor(1) as pool:
            is_needed = True
            while is_needed:
                self._hear()
                self._end_round()
                self._begin_round(pool)
                self._tell()
                is_needed = bool(self._round or self._buffers) or not self._place.is_deserted()
        os.unlink(self._place.socket)  # noqa: PTH108

    def _hear(self) -> None:
        """Take what comes, until there is something to do or nothing came for a while."""
        timeout = _LOOK_SECONDS
        while events := self._selector.select(timeout):
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._welcome()
                elif key.fileobj is self._rung:
                    self._rung.recv(1)
                    timeout = 0
                elif (request := self._read(key.fileobj)) is not None:  # type: ignore[arg-type]
                    self._waiting.append((key.fileobj, request))  # type: ignore[arg-type]
                    timeout = 0

    def _begin_round(self, pool: ThreadPoolExecutor) -> None:
        if self._round is None and self._waiting:
            self._at_work = [connection for connection, _ in self._waiting]
            self._round = pool.submit(answered, self._ledger, [request for _, request in self._waiting])
            self._round.add_done_callback(lambda _: self._bell.sendall(b"!"))
            self._waiting = []
            self._told = time.monotonic()

    def _end_round(self) -> None:
        if self._round is not None and self._round.done():
            for connection, answer in zip(self._at_work, self._round.result(), strict=True):
                self._send(connection, answer)
            self._round = None

    def _tell(self) -> None:
        """Let those who wait know that there is a committer, if they have not heard of it for a while."""
        if self._round is not None and time.monotonic() - self._told >= WORKING_SECONDS:
            self._told = time.monotonic()
            for connection in (*self._at_work, *(connection for connection, _ in self._waiting)):
                self._send(connection, Working())

    def _welcome(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._buffers[connection] = bytearray()
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> Request | None:
        """A writer's request, if it is whole; one who has gone, or says what is none, is let go."""
        buffer = self._buffers[connection]
        try:
            piece = connection.recv(1 << 20)
            buffer += piece
            data = unpacked(buffer)
            request = None if data is None else requests.decode(data)
        except BlockingIOError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._send(connection, Failed(f"it does not understand: {error}"))
            self._let_go(connection)
            return None
        if not piece:
            self._let_go(connection)
        return request

    def _send(self, connection: socket.socket, answer: Answer | Working) -> None:
        if connection not in self._buffers:
            return
        try:
            connection.settimeout(_SEND_SECONDS)
            connection.sendall(packed(answer))
            connection.setblocking(False)
        except OSError:
            self._let_go(connection)

    def _let_go(self, connection: socket.socket) -> None:
        if self._buffers.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()


def main(given: dict[str, Any]) -> None:
    """Be the committer; `given` is what `client` passes on: root, options, and the lock as an open file."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    fcntl.flock(given["lock"], fcntl.LOCK_EX | fcntl.LOCK_NB)  # it came with it
    objects = Objects(given["root"], given["options"])
    Server(Place(objects), Ledger(Store(objects))).run()
