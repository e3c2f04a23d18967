"""Client side of group commit: hand a batch to this machine's committer, or commit it locally.

Where many processes of a machine write to a lake, one process, the committer, commits their batches together
(`server`). Writers start a committer, or find the running one, after a lost race or if there are many of them. A writer
commits locally if it is the only one, or one of a few without a lost race. It also does so if it cannot reach a
committer. Both ways are correct together: a committer is one more writer that looks episodes up before it commits.

Nothing of a batch is on disk but its data files. The writer keeps the batch until it has an answer, and its caller
waits for that answer. If the committer dies or stops responding, the writer looks at the lake. If its attempt was not
accepted, it writes the batch under a new write_id. The attempt that comes second is abandoned, because the episodes are
in the lake by then.
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

from lake.storage.locks import is_only_holder
from lake.storage.objects import Objects
from lake.write.group_commit.protocol import (
    REPLY_DECODER,
    AttemptReply,
    AttemptRequest,
    FailureReply,
    LookupReply,
    LookupRequest,
    MeetingPoint,
    Reply,
    Request,
    WorkingReply,
    pack,
    receive,
)
from lake.write.ledger import Attempt, EpisodeLookup

CONTENDED_SECONDS = 60.0
"""Time after a lost race during which writers use a committer."""
START_SECONDS = 20.0
"""Timeout for the start of a committer; batches wait for it."""
ANSWER_SECONDS = 30.0
"""Timeout for any message of a committer; a silent one is taken to be stopped."""
PAUSE_SECONDS = 60.0
"""Time for which a writer commits locally after a committer failed to answer twice."""
_FAILURES = 2
_POLL_SECONDS = 0.02
_Reply = TypeVar("_Reply", LookupReply, AttemptReply)
_log = logging.getLogger("trajlake")

# The committer forks before it imports anything, so that the process that starts it need not wait for its end.
_PROGRAM = """
import os, sys
os.fork() and os._exit(0)
import json
settings = json.load(sys.stdin)
sys.path[:] = settings["path"]
from lake.write.group_commit.server import main
main(settings)
"""


class CommitterGoneError(Exception):
    """No answer: the committer has ended, or the request failed."""


class Committer:
    """A connection to the committer, for one batch."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def look_up(self, episode_ids: Collection[int], group_ids: Collection[int]) -> EpisodeLookup:
        """Look episodes up; see `Ledger.look_up`. Raises CommitterGoneError."""
        return self._request(LookupRequest(list(episode_ids), list(group_ids)), LookupReply).lookup

    def accept(self, attempt: Attempt) -> bool:
        """Return whether an attempt was accepted. Raises CommitterGoneError: it may have been, or may still be."""
        return self._request(AttemptRequest.from_attempt(attempt), AttemptReply).is_accepted

    def _request(self, request: Request, kind: type[_Reply]) -> _Reply:
        try:
            self._connection.sendall(pack(request))
            reply: Reply | WorkingReply = WorkingReply()
            while isinstance(reply, WorkingReply):
                message = receive(self._connection, self._buffer)
                reply = FailureReply("it has ended") if message is None else REPLY_DECODER.decode(message)
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise CommitterGoneError(str(error)) from error
        if not isinstance(reply, kind):
            raise CommitterGoneError(reply.message if isinstance(reply, FailureReply) else f"unexpected answer {reply}")
        return reply


class GroupCommit:
    """A writer's access to group commit on this machine. Not thread-safe."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._meeting_point: MeetingPoint | None = None
        self._alive_lock = self._seat = -1
        self._owner_pid = 0
        self._lost_races = 0
        self._contended_until = self._alone_until = 0.0
        self._failures = 0
        self._has_warned = False

    def __del__(self) -> None:
        self._leave()

    @contextmanager
    def connect(self, lost_races: int) -> Iterator[Committer | None]:
        """Yield the committer for one batch; None if this process should, or must, commit locally.

        A batch without an answer ends the context, which suppresses the `CommitterGoneError`. The caller then has to
        look its episodes up again.

        Args:
            lost_races: how often this writer has lost a race for a commit.
        """
        connection = None
        try:
            connection = self._open_connection(lost_races)
        except OSError as error:
            self._pause(f"{error}")
        if connection is None:
            yield None
            return
        with connection:
            try:
                yield Committer(connection)
            except CommitterGoneError as error:
                # A committer was running, so writers had lost races.
                self._contended_until = time.monotonic() + CONTENDED_SECONDS
                self._failures += 1
                if self._failures >= _FAILURES:
                    self._pause(f"the committer of this machine does not answer ({error})")
            else:
                self._failures = 0

    def _open_connection(self, lost_races: int) -> socket.socket | None:
        now = time.monotonic()
        if lost_races > self._lost_races:
            self._lost_races, self._contended_until = lost_races, now + CONTENDED_SECONDS
        if now < self._alone_until:
            return None
        # A forked process is a separate writer.
        if self._meeting_point is None or self._owner_pid != os.getpid():
            self._leave()
            self._meeting_point = self._meeting_point or MeetingPoint(self._objects)
            self._alive_lock, self._owner_pid = self._meeting_point.register_writer(), os.getpid()
        if is_only_holder(self._alive_lock):
            return None
        if (connection := self._try_connect(self._meeting_point)) is not None:
            return connection
        if now >= self._contended_until:
            if self._seat < 0:
                seat = self._meeting_point.take_seat()
                self._seat = -1 if seat is None else seat
            if self._seat >= 0:
                return None  # one of a few writers
        while time.monotonic() < now + START_SECONDS:
            if (lock := self._meeting_point.lock_committer()) is not None:
                try:
                    self._start(self._meeting_point, lock)
                finally:
                    os.close(lock)
            time.sleep(_POLL_SECONDS)
            if (connection := self._try_connect(self._meeting_point)) is not None:
                return connection
        self._pause(f"no committer began within {START_SECONDS:g} s; see {self._meeting_point.log}")
        return None

    def _leave(self) -> None:
        for file in (self._alive_lock, self._seat):
            if file >= 0:
                os.close(file)
        self._alive_lock = self._seat = -1

    @staticmethod
    def _try_connect(meeting_point: MeetingPoint) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(meeting_point.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except OSError:
            connection.close()
            raise
        return connection

    def _start(self, meeting_point: MeetingPoint, lock: int) -> None:
        settings = {
            "path": [os.path.abspath(path) for path in sys.path],  # noqa: PTH100 - as the import system does
            "root": self._objects.root,
            "options": self._objects.options,
        }
        with open(meeting_point.log, "wb") as log:  # noqa: PTH123
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
            process.stdin.write(json.dumps(settings).encode())
        process.wait()

    def _pause(self, reason: str) -> None:
        """Commit locally for a while, and warn once."""
        self._alone_until, self._failures = time.monotonic() + PAUSE_SECONDS, 0
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s: this process commits its batches locally: %s", self._objects.root, reason)
