"""Claims: the right of one process to do something to a lake, where processes of several machines reach it.

A claim is a small JSON object under `_trajlake/claims/`, named by a number. Whoever comes first writes number 0; it is
renewed while its holder lives, and once it has expired whoever writes the next number has it, which only one can. The
highest number holds. Clocks of machines may differ by less than a claim lasts; where they differ by more, or a holder
slept for so long, it finds a higher number than its own at its next renewal and knows that it lost the claim.
"""

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Self

import msgspec

from lake import ids
from lake.documents import Moment, decode_document
from lake.errors import LakeAccessError, TrajlakeError, UsageError
from lake.storage.store import Store

CLAIM = timedelta(minutes=2)
"""How long a claim outlives a holder that was killed."""
_CLAIMS = "_trajlake/claims"
_LOOKING_SECONDS = 30.0
"""How long a store may list entries that are gone, or leave out those that are there."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
"""Seconds between two looks."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the lake."""

    what: str
    holder: str
    """For people."""
    place: str
    """Where else nobody can be at work: who comes from there takes over at once."""
    token: str
    """Of this process alone."""
    expires_at: Moment


class Claim:
    """A claim that is held while the context is; a thread renews it four times in its duration.

    Args:
        what: is claimed, in words: `run 'r' is being collected into this lake`.
        place: tells the machine, or the folder of one, in which a lock lets one process at a time make this claim.
        duration: how long it outlives a holder that is killed.

    Raises:
        UsageError: on entering it, a process elsewhere holds the claim.
        LakeAccessError: likewise, the store does not list what was written to it.
    """

    def __init__(self, store: Store, what: str, place: str, duration: timedelta = CLAIM) -> None:
        self._store, self._what, self._place, self._duration = store, what, place, duration
        self._holder, self._token = f"process {os.getpid()} on {socket.gethostname()}", ids.to_text(ids.fresh_id())
        self._folder = f"{_CLAIMS}/{ids.to_text(ids.text_hash(what))}"
        self._number = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="trajlake-claim", daemon=True)
        self.lost: str | None = None
        """Who has it by now, in a sentence; None: it is ours."""

    def __enter__(self) -> Self:
        deadline, pause = time.monotonic() + _LOOKING_SECONDS, _SHORTEST_PAUSE
        while not self._taken():  # look again who it was
            if time.monotonic() > deadline:
                raise LakeAccessError(
                    f"{self._store.objects.uri(self._folder)} lists other entries than there are, for "
                    f"{_LOOKING_SECONDS:.0f} s by now; try again once its store lists what was written"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self.lost is None:
            self._store.objects.delete([self._path(self._number)])

    def _taken(self) -> bool:
        """Write the next number; False: somebody was quicker. Raises UsageError: the highest one is alive elsewhere."""
        objects, numbers = self._store.objects, self._numbers()
        if numbers:
            last, now = self._read(numbers[-1]), self._store.clock()
            if last is None:
                return False
            if last.place != self._place and last.expires_at > now:
                seconds = (last.expires_at - now).total_seconds()
                raise UsageError(
                    f"{self._what} by {last.holder}; wait for it. If it was killed, the same command goes on there at "
                    f"once, and anywhere in {seconds:.0f} s"
                )
        self._number = numbers[-1] + 1 if numbers else 0
        if not objects.create(self._path(self._number), self._entry()):
            return False
        if self._numbers()[-1:] != [self._number]:  # the first look fell between another's new entry and its old one
            objects.delete([self._path(self._number)])
            return False
        objects.delete([self._path(number) for number in numbers])
        return True

    def _renew(self) -> None:
        while not self._ended.wait(self._duration.total_seconds() / 4):
            try:
                highest = self._numbers()[-1:]
                last = self._read(highest[0]) if highest else None
                if last is None or last.token != self._token:
                    by = "was ended elsewhere" if last is None else f"was taken over by {last.holder}"
                    self.lost = f"{self._what}, and this process was not heard of for too long: it {by}"
                    return
                self._store.objects.put(self._path(self._number), self._entry())
            except TrajlakeError:
                continue  # it lasts on, and the next renewal may succeed

    def _entry(self) -> bytes:
        return msgspec.json.encode(
            _Entry(
                what=self._what,
                holder=self._holder,
                place=self._place,
                token=self._token,
                expires_at=self._store.clock() + self._duration,
            )
        )

    def _read(self, number: int) -> _Entry | None:
        """An entry; None: it is gone. Raises LakeAccessError: it is damaged."""
        data = self._store.objects.get(self._path(number))
        if data is None:
            return None
        where = self._store.objects.uri(self._path(number))
        return decode_document(data, _Entry, where, "delete it to give its claim up")

    def _numbers(self) -> list[int]:
        names = (
            found.path.rpartition("/")[2].removesuffix(".json") for found in self._store.objects.list(self._folder)
        )
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number}.json"
