"""The worker: one user function, called again and again, in a process that is locked in before this file runs.

What it sends is believed by nobody. It is written to keep honest functions apart from accidents (prints, exceptions,
changed arguments, exits), not to stop hostile ones: those are stopped by the lock around the process and by the parent.

A timer that goes off later raises in whatever row is scored then. So timers, signal handlers, blocked signals and trace
functions are put back at the end of every call, as they were when the module was loaded. A thread cannot be taken back:
its worker is replaced. All else that a process shares (modules, globals, caches) is the function's own to keep.
"""

import _thread
import fcntl
import importlib.util
import inspect
import json
import os
import random
import resource
import sys
import time
from _signal import getsignal  # type: ignore[import-not-found]  # `signal` makes enums: 40 times as slow
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
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
from types import ModuleType
from typing import Any, NamedTuple, cast

import msgspec

from pipelines.score.sandbox import frames
from pipelines.score.sandbox.plain import failure, plain

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
        """Put everything back; false if only a fresh worker will do. Raises what a handler of the call's own raises."""
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


_clock = time.perf_counter
_Outcome = tuple[str, Any, str | None, float]
_encode = msgspec.msgpack.Encoder().encode
_from_json = msgspec.json.Decoder(dict[str, Any]).decode
_from_msgpack = msgspec.msgpack.Decoder(dict[str, Any]).decode
_FIRST_MAP = 0x80
"""A MessagePack map begins with a byte from here on; JSON never does."""


class _User(NamedTuple):
    """The function, and how it is called."""

    call: Callable[..., Any]
    mode: str
    locked: bool
    leftovers: Leftovers


def main() -> None:
    """Load the function that the orders name, say what it is, and answer calls until the parent hangs up."""
    requests, replies = _hidden_streams()
    sequence, (packed,) = frames.read_request(requests)
    orders = json.loads(bytes(packed))
    frames.write_all(replies, frames.REPLY.pack(sequence, 0, 0, 0))
    if orders["locked"]:
        _offer_event_loops()
    try:
        function = _function(orders["path"], orders["name"])
        if orders["adapter"]:
            module, _, name = orders["adapter"].partition(":")
            function = getattr(importlib.import_module(module), name)(function)
        hello = _facts(function)
    except BaseException as error:  # user code ran: whatever it raised is told
        kind, text = failure(error, locked=orders["locked"])
        hello = {"kind": kind, "error": text}
    body = json.dumps(hello).encode()
    frames.write_all(replies, frames.REPLY.pack(sequence, 0, 0, len(body)) + body)
    if "error" not in hello:
        user = _User(function, orders["mode"], orders["locked"], Leftovers())
        with suppress(EOFError):
            while _answer(user, requests, replies):
                pass
    # No clean-up: the process holds nothing that needs it, and the function's threads and exit handlers may hang.
    os._exit(0)


def _hidden_streams() -> tuple[int, int]:
    """Handles to read requests from and to write replies to; stdin is empty and stdout is stderr from here on."""
    # Somewhere: who closes or writes to handles he does not know hits them less often.
    places = random.sample(range(64, min(900, resource.getrlimit(resource.RLIMIT_NOFILE)[0])), 2)
    requests = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, places[0])
    replies = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, places[1])
    empty, end = os.pipe()
    os.close(end)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    return requests, replies


class _PipeEnd:
    """As much of a socket as an event loop needs to wake itself."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def fileno(self) -> int:
        return self._handle

    def setblocking(self, flag: bool) -> None:
        os.set_blocking(self._handle, flag)

    def recv(self, length: int) -> bytes:
        return os.read(self._handle, length)

    def send(self, data: bytes) -> int:
        return os.write(self._handle, data)

    def close(self) -> None:
        os.close(self._handle)


def _offer_event_loops() -> None:
    """Let asyncio work without sockets: its event loop makes a pair of them, to wake itself from other threads."""
    import socket

    def pair(*_: object, **__: object) -> tuple[Any, Any]:
        return tuple(map(_PipeEnd, os.pipe()))  # type: ignore[return-value]

    socket.socketpair = pair


def _function(path: str, name: str) -> Callable[..., Any]:
    module = _module(Path(path))
    found = getattr(module, name, None)
    if callable(found):
        return cast("Callable[..., Any]", found)
    there = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
    what = "is no function" if found is not None else "does not exist"
    msg = f"`{name}` {what} in {path}; functions there: {', '.join(sorted(there)) or 'none'}"
    raise LookupError(msg)


def _module(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    # A module called like one that others need must not take its place.
    name = f"_reward_{path.stem}" if path.stem in sys.stdlib_module_names or path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        msg = f"{path} is no Python module; its name must end in .py"
        raise ImportError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _facts(function: Callable[..., Any]) -> dict[str, Any]:
    """What the parent may know about the function: JSON data only."""
    declared = getattr(function, "__trajlake_reward__", {})
    declared = msgspec.to_builtins(dict(declared), str_keys=True, enc_hook=str)
    inner = inspect.unwrap(function)
    is_async = any(inspect.iscoroutinefunction(each) for each in (function, inner, type(function).__call__))
    parameters = inspect.signature(function).parameters.values()
    return {
        "mode": declared.get("mode", "pointwise"),
        "is_async": is_async,
        "parameters": [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)],
        "accepts_any": any(each.kind is each.VAR_KEYWORD for each in parameters),
        "requires_network": bool(declared.get("requires_network", False)),
        "declared": declared,
    }


class _Loop:
    """One event loop for all calls, whose tasks and threads end with the call that started them."""

    def __init__(self) -> None:
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._all_tasks, self._gather, self._executor_type = asyncio.all_tasks, asyncio.gather, ThreadPoolExecutor
        self._renew_executor()

    def result(self, value: Any, leftovers: Leftovers) -> Any:
        """What an awaitable comes to."""
        try:
            return self._loop.run_until_complete(_awaited(value))
        finally:
            if tasks := self._all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(self._gather(*tasks, return_exceptions=True))
            if leftovers.threads:
                self._executor.shutdown()
                self._renew_executor()

    def _renew_executor(self) -> None:
        self._executor = self._executor_type()
        self._loop.set_default_executor(self._executor)


_loop = cache(_Loop)


async def _awaited(value: Any) -> Any:
    return await value


def _answer(user: _User, requests: int, replies: int) -> bool:
    """Answer the calls of one request in order; false after one that left something behind for good."""
    sequence, rows = frames.read_request(requests)
    ready: list[bytes] = []
    sent = size = 0
    reported = _clock()
    worn = False
    for row in rows:
        began = _clock()
        if ready and (began - reported > frames.REPORT_SECONDS or size > frames.FLUSH_BYTES):
            _reply(replies, sequence, sent, ready)
            sent += len(ready)
            ready, size, reported = [], 0, _clock()
        outcome, clean = _outcome(user, row, began)
        packed = _packed(outcome)
        size += len(packed)
        ready.append(packed)
        if worn := not clean:
            break
    _reply(replies, sequence, sent, ready, worn)
    return not worn


def _reply(replies: int, sequence: int, first: int, ready: list[bytes], worn: bool = False) -> None:
    body = b"".join((b"\xdc", len(ready).to_bytes(2, "big"), *ready))
    count = len(ready) | (frames.WORN if worn else 0)
    frames.write_all(replies, frames.REPLY.pack(sequence, first, count, len(body)) + body)


def _outcome(user: _User, row: memoryview, began: float) -> tuple[_Outcome, bool]:
    """What came of a call, and whether nothing is left of it."""
    try:
        arguments = _from_msgpack(row) if row and row[0] >= _FIRST_MAP else _from_json(row)
    except (msgspec.MsgspecError, RecursionError) as error:
        return ("invalid", None, f"the arguments of this call are no JSON object: {error}", 0.0), True
    clean = False
    try:
        try:
            value = user.call(**arguments)
            if hasattr(value, "__await__"):
                value = _loop().result(value, user.leftovers)
            value = plain(value, user.mode)
        finally:
            # What a timer of this call raises at the last moment is this call's, too.
            clean = user.leftovers.clear()
        return ("ok", value, None, _clock() - began), clean
    except BaseException as error:  # user code ran: whatever it raised is its outcome
        kind, text = failure(error, locked=user.locked)
        return (kind, None, text, _clock() - began), clean


def _packed(outcome: _Outcome) -> bytes:
    try:
        packed = _encode(outcome)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        return _encode(("invalid", None, f"it returned what is no JSON data: {error}"[: frames.TEXT], outcome[3]))
    if len(packed) <= frames.RESULT_BYTES:
        return packed
    text = f"it returned {len(packed):,} bytes; a result may have {frames.RESULT_BYTES:,}"
    return _encode(("invalid", None, text, outcome[3]))


if __name__ == "__main__":
    main()
