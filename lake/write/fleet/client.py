"""A writer's way to the committer of its machine, and out of it.

A lake in which many processes of a machine write sees one of them: the committer, which takes what waits and commits it
in one go (`server`). It is found, or started, by writers that get in each other's way, or are so many that they would.
One that is alone, or is one of a few and has not lost a race for a commit, goes on by itself, and so does every writer
that cannot reach a committer, because none could be started, or it does not answer. That is always right: a committer
is one more writer that looks before it commits.

Nothing is on the disk but the files of the batch itself. Until it has an answer, the writer has the batch, and whoever
called it has not been told that it is recorded. Where the committer dies, is stopped or cannot go on, the writer looks
at the lake and, if its attempt was not accepted, brings what it has under a new write_id: whichever of the two comes
first, the other finds its episodes there and is abandoned.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from lake.storage.objects import Objects
from lake.write.fleet.messages import (
    Answer,
    Bring,
    Done,
    Failed,
    Found,
    Look,
    Request,
    Working,
    answers,
    packed,
    receive,
)
from lake.write.fleet.place import Place, is_alone
from lake.write.index import Known
from lake.write.ledger import Attempt

CONTENDED_SECONDS = 60.0
"""How long after a lost race writers are taken to be in each other's way."""
START_SECONDS = 20.0
"""How long a committer may take to begin; batches wait for it."""
ANSWER_SECONDS = 30.0
"""How long a committer may say nothing, not even that it is at work: then it has been stopped."""
PAUSE_SECONDS = 60.0
"""How long a writer goes on by itself after it got no answer from a committer twice."""
_FAILURES = 2
_LOOK_SECONDS = 0.02
_Answer = TypeVar("_Answer", Found, Done)
_log = logging.getLogger("trajlake")

# It leaves the process that starts it before it imports anything: whoever that is need not wait for its end.
_PROGRAM = """
import os, sys
os.fork() and os._exit(0)
import json
given = json.load(sys.stdin)
sys.path[:] = given["path"]
from lake.write.fleet.server import main
main(given)
"""


class CommitterGoneError(Exception):
    """No answer: the committer has ended, or cannot do what it was asked."""


class Committer:
    """A connection to the committer, for one batch."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def look(self, episode_ids: Collection[int], group_ids: Collection[int]) -> Known:
        """As `Ledger.look`. Raises CommitterGoneError."""
        return self._asked(Look(list(episode_ids), list(group_ids)), Found).known

    def accept(self, attempt: Attempt) -> bool:
        """Whether an attempt was accepted. Raises CommitterGoneError: it may have been, or may still be."""
        return self._asked(Bring.of(attempt), Done).is_accepted

    def _asked(self, request: Request, kind: type[_Answer]) -> _Answer:
        try:
            self._connection.sendall(packed(request))
            answer: Answer | Working = Working()
            while isinstance(answer, Working):
                data = receive(self._connection, self._buffer)
                answer = Failed("it has ended") if data is None else answers.decode(data)
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise CommitterGoneError(str(error)) from error
        if not isinstance(answer, kind):
            raise CommitterGoneError(answer.message if isinstance(answer, Failed) else f"it said {answer}")
        return answer


class Fleet:
    """The writers of this machine, as one of them sees them. Not thread-safe."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._place: Place | None = None
        self._present = self._seat = -1
        self._owner = 0
        self._lost = 0
        self._contended_until = self._alone_until = 0.0
        self._failures = 0
        self._was_told = False

    def __del__(self) -> None:
        self._leave()

    @contextmanager
    def committer(self, lost: int) -> Iterator[Committer | None]:
        """The committer, to hand a batch to; None where this process does better, or has to do, without.

        A batch that gets no answer ends the context, where `CommitterGoneError` stays: it has to be looked at again.

        Args:
            lost: how often this writer was too late so far.
        """
        connection = None
        try:
            connection = self._connected(lost)
        except OSError as error:
            self._tell(f"{error}")
        if connection is None:
            yield None
            return
        with connection:
            try:
                yield Committer(connection)
            except CommitterGoneError as error:
                # Where there was one, writers were in each other's way.
                self._contended_until = time.monotonic() + CONTENDED_SECONDS
                self._failures += 1
                if self._failures >= _FAILURES:
                    self._tell(f"the committer of this machine does not answer ({error})")
            else:
                self._failures = 0

    def _connected(self, lost: int) -> socket.socket | None:
        now = time.monotonic()
        if lost > self._lost:
            self._lost, self._contended_until = lost, now + CONTENDED_SECONDS
        if now < self._alone_until or self._is_alone():
            return None
        if (found := self._try()) is not None or not (now < self._contended_until or self._is_one_of_many()):
            return found
        assert self._place is not None
        while time.monotonic() < now + START_SECONDS:
            if (lock := self._place.elected()) is not None:
                try:
                    self._start(self._place, lock)
                finally:
                    os.close(lock)
            time.sleep(_LOOK_SECONDS)
            if (found := self._try()) is not None:
                return found
        self._tell(f"no committer began within {START_SECONDS:g} s; see {self._place.log}")
        return None

    def _is_alone(self) -> bool:
        # A forked process is a writer of its own.
        if self._place is None or self._owner != os.getpid():
            self._leave()
            self._place = self._place or Place(self._objects)
            self._present, self._owner = self._place.present(), os.getpid()
        return is_alone(self._present)

    def _leave(self) -> None:
        for file in (self._present, self._seat):
            if file >= 0:
                os.close(file)
        self._present = self._seat = -1

    def _is_one_of_many(self) -> bool:
        assert self._place is not None
        if self._seat < 0:
            seat = self._place.seat()
            self._seat = -1 if seat is None else seat
        return self._seat < 0

    def _try(self) -> socket.socket | None:
        assert self._place is not None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(self._place.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except OSError:
            connection.close()
            raise
        return connection

    def _start(self, place: Place, lock: int) -> None:
        given = {
            "path": [os.path.abspath(path) for path in sys.path],  # noqa: PTH100 - as the import system does
            "root": self._objects.root,
            "options": self._objects.options,
        }
        with open(place.log, "wb") as log:  # noqa: PTH123
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,
                cwd="/",
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(given | {"lock": lock}).encode())
        process.wait()

    def _tell(self, why: str) -> None:
        """Go on without a committer for a while, and say so once."""
        self._alone_until, self._failures = time.monotonic() + PAUSE_SECONDS, 0
        if not self._was_told:
            self._was_told = True
            _log.warning("%s: this process commits its batches by itself: %s", self._objects.root, why)
