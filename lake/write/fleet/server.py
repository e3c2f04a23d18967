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
from dataclasses import dataclass, field
from typing import Any

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
_GATHERING_SECONDS = 0.05
"""How long requests that keep coming are gathered at most before they are looked at."""
_BACKLOG = 1024


class Server:
    """The socket of a place, and the rounds of a lake, whose ledger is used by nobody else.

    No writer keeps it from serving the others: nothing waits for one that does not read, and whatever one says that
    cannot be read is answered with what is wrong with it.
    """

    def __init__(self, place: Place, ledger: Ledger) -> None:
        self._place = place
        self._ledger = ledger
        self._selector = selectors.DefaultSelector()
        self._writers: dict[socket.socket, _Writer] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._waiting: list[tuple[_Writer, Request]] = []
        """What has come, in order, for the next round."""
        self._at_work: list[_Writer] = []
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
                is_needed = bool(self._round or self._writers) or not self._place.is_deserted()
        os.unlink(self._place.socket)  # noqa: PTH108

    def _hear(self) -> None:
        """Take what comes, until there is something to do or nothing came for a while."""
        timeout, until = _LOOK_SECONDS, None
        while events := self._selector.select(timeout):
            for key, mask in events:
                if key.fileobj is self._listener:
                    self._welcome()
                elif key.fileobj is self._rung:
                    self._rung.recv(1)
                    timeout = 0
                elif mask & selectors.EVENT_WRITE:
                    self._push(key.data)
                elif (request := self._read(key.data)) is not None:
                    self._waiting.append((key.data, request))
                    timeout = 0
            until = until or time.monotonic() + _GATHERING_SECONDS
            if time.monotonic() > until:
                return

    def _begin_round(self, pool: ThreadPoolExecutor) -> None:
        if self._round is None and self._waiting:
            self._at_work = [writer for writer, _ in self._waiting]
            self._round = pool.submit(answered, self._ledger, [request for _, request in self._waiting])
            self._round.add_done_callback(lambda _: self._bell.sendall(b"!"))
            self._waiting = []
            self._told = time.monotonic()

    def _end_round(self) -> None:
        if self._round is not None and self._round.done():
            for writer, answer in zip(self._at_work, self._round.result(), strict=True):
                self._send(writer, answer)
            self._round = None

    def _tell(self) -> None:
        """Let those who wait know that there is a committer, if they have not heard of it for a while."""
        if self._round is not None and time.monotonic() - self._told >= WORKING_SECONDS:
            self._told = time.monotonic()
            for writer in (*self._at_work, *(writer for writer, _ in self._waiting)):
                if not writer.outgoing:  # else it does not read what it was told before
                    self._send(writer, Working())

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # No more files: those who wait are welcomed when one of the others has left.
            if self._writers:
                self._selector.unregister(self._listener)
            return
        connection.setblocking(False)
        self._writers[connection] = writer = _Writer(connection)
        self._selector.register(connection, selectors.EVENT_READ, writer)

    def _read(self, writer: "_Writer") -> Request | None:
        """A writer's request, if it is whole; one who has gone, or says what is none, is let go."""
        try:
            piece = writer.connection.recv(1 << 20)
            writer.incoming += piece
            data = unpacked(writer.incoming)
            request = None if data is None else requests.decode(data)
        except BlockingIOError:
            return None
        except Exception as error:  # whatever a decoder makes of bytes of anybody
            self._send(writer, Failed(f"it does not understand: {error}"))
            self._let_go(writer)
            return None
        if not piece:
            self._let_go(writer)
            return None
        if request is not None:
            writer.waits = True
            self._listen(writer)
        return request

    def _send(self, writer: "_Writer", answer: Answer | Working) -> None:
        """Give a writer an answer: what it does not take now goes when it does."""
        writer.waits &= isinstance(answer, Working)
        writer.outgoing += packed(answer)
        self._push(writer)

    def _push(self, writer: "_Writer") -> None:
        """Send as much of a writer's answer as it takes now."""
        if writer.connection not in self._writers:
            return
        try:
            if writer.outgoing:
                del writer.outgoing[: writer.connection.send(writer.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._let_go(writer)
            return
        self._listen(writer)

    def _listen(self, writer: "_Writer") -> None:
        """Wait for what is next of a writer: that it takes its answer, else its request, of which it has one at a time.

        So each has one answer that it has not taken at most, and nothing is read of those who do not read.
        """
        wanted = selectors.EVENT_WRITE if writer.outgoing else 0 if writer.waits else selectors.EVENT_READ
        registered = self._selector.get_map().get(writer.connection)
        if registered is not None and not wanted:
            self._selector.unregister(writer.connection)
        elif registered is None and wanted:
            self._selector.register(writer.connection, wanted, writer)
        elif registered is not None and registered.events != wanted:
            self._selector.modify(writer.connection, wanted, writer)

    def _let_go(self, writer: "_Writer") -> None:
        if self._writers.pop(writer.connection, None) is not None:
            if writer.connection in self._selector.get_map():
                self._selector.unregister(writer.connection)
            writer.connection.close()
            if self._listener not in self._selector.get_map():
                self._selector.register(self._listener, selectors.EVENT_READ)


@dataclass(slots=True, eq=False)
class _Writer:
    """A connection, with what of a message came or has to go."""

    connection: socket.socket
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    waits: bool = False
    """It has asked for something that it has no answer to."""


def main(given: dict[str, Any]) -> None:
    """Be the committer; `given` is what `client` passes on: root, options, and the lock as an open file."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    fcntl.flock(given["lock"], fcntl.LOCK_EX | fcntl.LOCK_NB)  # it came with it
    objects = Objects(given["root"], given["options"])
    Server(Place(objects), Ledger(Store(objects))).run()
