"""Committers: finding and starting the one of a lake, and one that dies at a chosen line of what it does."""

import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.write.group_commit import protocol, server
from lake.write.group_commit.client import CommitterGoneError, GroupCommit
from lake.write.group_commit.protocol import AttemptReply, AttemptRequest, LookupReply, LookupRequest, MeetingPoint
from lake.write.ledger import Attempt, EpisodeLookup, Ledger

_TIMEOUT = 60.0


def committer_of(objects: Objects) -> int | None:
    """The process id of a lake's committer; None if no committer listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(MeetingPoint(objects).socket)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])


def start_committer(objects: Objects) -> int:
    """Start a lake's committer, as a writer does that needs one, and wait until it listens; its process id.

    It ends within seconds of the last writer.
    """
    meeting_point = MeetingPoint(objects)
    if (lock := meeting_point.lock_committer()) is not None:
        GroupCommit(objects)._start(meeting_point, lock)
        os.close(lock)
    deadline = time.monotonic() + _TIMEOUT
    while (pid := committer_of(objects)) is None:
        assert time.monotonic() < deadline, "no committer"
        time.sleep(0.02)
    return pid


class _Killed(BaseException):
    """Stands for a SIGKILL: nothing in the committer's code can catch it."""


class DyingCommitter:
    """A fleet whose committer is in this process, commits what it gets with another batch, and dies at a line.

    It stands for a committer that is killed: its code stops in the middle, and of all it knew the lake alone is left.
    The next one begins with nothing.

    Args:
        next to: another writer's request, for the same round as the first one of this writer.
        line: at which it dies in its first round, counted over all lines of `server`, `ledger` and what they call in
            `lake.storage`; 0: never.
    """

    def __init__(self, objects: Objects, beside: AttemptRequest | None = None, line: int = 0) -> None:
        self._objects = objects
        self._beside = beside
        self._line = line
        self.lines = 0
        """How many it came through."""
        self.died = False

    @contextmanager
    def connect(self, lost_races: int) -> Iterator[Any]:
        """As that of `GroupCommit`."""
        del lost_races
        try:
            yield self
        except CommitterGoneError:
            self.died = True

    def look_up(self, episode_ids: set[int], group_ids: set[int]) -> EpisodeLookup:
        """Look at the lake, at which it does not die."""
        (answer,) = server.answer_requests(
            Ledger(Store(self._objects)), [LookupRequest(list(episode_ids), list(group_ids))]
        )
        assert isinstance(answer, LookupReply)
        return answer.lookup

    def accept(self, attempt: Attempt) -> bool:
        """A round with the attempt in it, and the other one if it is the first."""
        requests = [protocol.REQUEST_DECODER.decode(protocol.pack(AttemptRequest.from_attempt(attempt))[4:])]
        if self._beside is not None:
            requests.append(self._beside)
            self._beside = None
            sys.settrace(self._traced)
        try:
            answer = server.answer_requests(Ledger(Store(self._objects)), requests)[0]
        except _Killed as killed:
            raise CommitterGoneError from killed
        finally:
            sys.settrace(None)
        assert isinstance(answer, AttemptReply)
        return answer.is_accepted

    def _traced(self, frame: FrameType, event: str, arg: object) -> Any:
        del arg
        name = frame.f_code.co_filename
        if not name.endswith(("write/ledger.py", "group_commit/server.py", "storage/store.py", "storage/commits.py")):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                raise _Killed
        return self._traced


def killing(objects: Objects, kills: int, done: threading.Event, rng: random.Random) -> int:
    """Kill the committers of a lake at random moments, as often as asked or until its writers are done; how often."""
    killed = 0
    while killed < kills and not done.is_set():
        if (pid := committer_of(objects)) is None:
            time.sleep(0.01)
            continue
        time.sleep(rng.random() * 0.5)
        if not done.is_set() and committer_of(objects) == pid:
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed
