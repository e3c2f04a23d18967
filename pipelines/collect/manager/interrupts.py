"""Ctrl-C, as often as it comes: let rollouts finish, leave them open, end at once.

The handler is Python's own and not the event loop's: a rollout whose environment blocks the loop, or swallows its
cancellation, would otherwise keep the process for ever.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from pipelines.collect.manager.scheduler import Scheduler

INTERRUPTED = "Ctrl-C"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAID = (
    "stopping: rollouts that run may finish; Ctrl-C again leaves them, to be gone on with later",
    "leaving what runs, to be gone on with later; Ctrl-C once more ends this process at once",
    "ended at once; what is on the disk can be gone on with",
)


class Interrupts:
    """A context in which Ctrl-C and SIGTERM stop a scheduler; before it has one they are KeyboardInterrupt.

    In a thread of somebody's own program it does nothing: signals are its own affair.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._count = 0
        self._scheduler: Scheduler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._came) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reach(self, scheduler: Scheduler) -> None:
        """Stop this scheduler, of the loop that runs, from now on."""
        self._scheduler, self._loop = scheduler, asyncio.get_running_loop()

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self._scheduler is None or self._loop is None:
            raise KeyboardInterrupt
        self._count += 1
        with suppress(RuntimeError):  # it came while a line was being written
            self._say(_SAID[min(self._count, len(_SAID)) - 1])
        if self._count == len(_SAID):
            os._exit(128 + number)
        with suppress(RuntimeError):  # the loop has ended by now
            if self._count == 1:
                self._loop.call_soon_threadsafe(self._scheduler.stop, INTERRUPTED)
            else:
                self._loop.call_soon_threadsafe(self._scheduler.abort)
