"""What wakes the thread behind a recorder, and one limit for all waits of who waits for it.

An agent may record anywhere: in the handler of a signal, in a destructor. It then interrupts itself, perhaps in the
middle of waking that thread, and a lock that is not reentrant, as `threading.Event` has one, would hang it for good.
"""

import queue
import threading
import time
from contextlib import suppress


class Bell:
    """Rung by any thread, heard by one; rings that nobody waited for are heard by the next wait, as one."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[bool] = queue.SimpleQueue()  # the one queue whose `put` is reentrant

    def ring(self, *, is_urgent: bool = False) -> None:
        """Wake the thread; `is_urgent`: it gathers no further rings first."""
        self._rings.put(is_urgent)

    def wait(self, seconds: float) -> None:
        """Wait until it is rung, for so many seconds at most."""
        with suppress(queue.Empty):
            self._rings.get(timeout=seconds)
        self._forget()

    def gather(self, seconds: float) -> None:
        """Wait until it is rung, and so many seconds more for others, unless it is urgent."""
        is_urgent, until = self._rings.get(), time.monotonic() + seconds
        while not is_urgent and (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                is_urgent = self._rings.get(timeout=left)
        self._forget()

    def _forget(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._rings.get_nowait()


class TimeLimit:
    """A limit over several waits, one after the other.

    Args:
        seconds: for all of them together; None is no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds for the next wait."""
        return threading.TIMEOUT_MAX if self._until is None else max(self._until - time.monotonic(), 0.0)
