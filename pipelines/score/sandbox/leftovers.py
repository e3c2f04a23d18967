"""What a call has left behind in its worker, put back before the next call begins. Runs in the worker.

A timer that goes off later raises in whatever row is scored then. So timers, signal handlers, blocked signals and trace
functions are as they were when the module was loaded, at the end of every call. A thread cannot be taken back: its
worker is replaced. Everything else that a process shares (modules, globals, caches) is the function's own to keep.
"""

import _thread
import sys
from _signal import getsignal  # type: ignore[import-not-found]  # `signal` makes enums: 40 times as slow
from signal import (
    ITIMER_PROF,
    ITIMER_REAL,
    ITIMER_VIRTUAL,
    SIG_SETMASK,
    pthread_sigmask,
    setitimer,
    signal,
    valid_signals,
)

_TIMERS = (ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF)
_REAL_TIME = 32
"""Signals from here on are sent on purpose only, by nobody who is still there."""


class Leftovers:
    """How things are now: what is found otherwise later was left behind by a call."""

    def __init__(self) -> None:
        self._numbers = sorted(number for number in valid_signals() if number < _REAL_TIME)
        self._mask = pthread_sigmask(SIG_SETMASK, ())
        pthread_sigmask(SIG_SETMASK, self._mask)
        self._handlers = [getsignal(number) for number in self._numbers]
        self._threads = _thread._count()
        self._stop_timers()

    @property
    def threads(self) -> bool:
        """Whether threads of Python run that did not then; one without `threading` counts once it has begun."""
        return _thread._count() > self._threads

    def clear(self) -> bool:
        """Put everything back.

        Returns:
            Whether that worked: else only a fresh worker is without what was left behind.

        Raises:
            BaseException: what a handler of the call's own raises, for the last time.
        """
        self._stop_timers()
        pthread_sigmask(SIG_SETMASK, self._mask)
        now = [getsignal(number) for number in self._numbers]
        if now != self._handlers and not self._restore(now):
            return False
        if sys.gettrace() is not None or sys.getprofile() is not None:
            sys.settrace(None)
            sys.setprofile(None)
        return not self.threads

    def _stop_timers(self) -> None:
        for timer in _TIMERS:
            setitimer(timer, 0)
        if (faulthandler := sys.modules.get("faulthandler")) is not None:
            faulthandler.cancel_dump_traceback_later()

    def _restore(self, now: list[object]) -> bool:
        for number, handler, before in zip(self._numbers, now, self._handlers, strict=True):
            if handler is not before:
                if before is None:  # not one of Python's: nothing here can bring it back
                    return False
                signal(number, before)
        return True
