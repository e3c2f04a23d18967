"""The worker: call one user function repeatedly, in a process that is locked before this file runs.

The parent does not trust its replies. The worker keeps honest functions apart from accidents (prints, exceptions,
changed arguments, exits). The lock around the process and the parent stop hostile functions.

A timer that fires later would raise in another row. So timers, signal handlers, blocked signals and trace functions are
restored at the end of every call to their state after the module was loaded. A thread cannot be undone: its worker is
replaced. All other process state (modules, globals, caches) belongs to the function.
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
import sysconfig
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
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, cast

import msgspec

from pipelines.score.sandbox import frames

_PLAIN = (str, type(None))


class NoResultError(ValueError):
    """The function returned something that is not JSON data."""


def convert_result(returned: Any, mode: str) -> Any:
    """Convert a result to numbers, text, None, lists and dicts with text keys.

    It converts structs (EvaluateResult), dataclasses, pydantic models and numpy values. A single number of any type
    becomes a float. In the modes batch and group the result must be a list. NoResultError if it is not, or cannot be
    converted.
    """
    if mode == "pointwise":
        if type(returned) is float or isinstance(returned, _PLAIN):
            return returned
        if hasattr(returned, "__float__"):
            try:
                return float(returned)
            except (OverflowError, TypeError, ValueError) as error:
                msg = f"it returned {_describe_type(returned)}, which is not a single number: {error}"
                raise NoResultError(msg) from None
    try:
        document = msgspec.to_builtins(returned, str_keys=True, enc_hook=_convert)
    except RecursionError:
        msg = f"it returned {_describe_type(returned)}, which contains itself or is nested too deeply"
        raise NoResultError(msg) from None
    except (TypeError, ValueError, OverflowError) as error:
        msg = f"it returned {_describe_type(returned)}, which is not JSON data: {str(error)[:200]}"
        raise NoResultError(msg) from None
    if mode != "pointwise" and not isinstance(document, list | tuple):
        msg = f"a {mode} function returns a list with one result per rollout; it returned {_describe_type(returned)}"
        raise NoResultError(msg)
    return document


def _convert(returned: Any) -> Any:
    for method in ("model_dump", "tolist", "to_dict"):
        if callable(convert := getattr(returned, method, None)):
            return convert()
    msg = f"{_describe_type(returned)} inside it; return numbers, text, lists, dicts or EvaluateResult"
    raise TypeError(msg)


def _describe_type(returned: Any) -> str:
    return f"an object of type {type(returned).__name__}"


Failure = tuple[str, str]
"""Kind of outcome, and its text."""
NO_NETWORK = (
    "; the sandbox has no network: declare @reward_function(requires_network=True), and allow it with --allow-network"
)
_OF_NETWORK = ("gaierror", "JudgeError")
"""Exceptions that only network access raises, by name: most workers do not need their modules, which import slowly."""
_OURS = (str(Path(__file__).parents[2]), str(Path(__file__).parents[3] / "lake"))
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_DEEPEST = 100
"""Maximum frames, and chained exceptions, to examine."""


def describe_failure(error: BaseException, *, locked: bool) -> Failure:
    """Return an exception's kind and text, with the innermost line of the user's code in its traceback."""
    if isinstance(error, NoResultError):
        return "invalid", str(error)[: frames.TEXT]
    if isinstance(error, MemoryError):
        return "memory", "it needs more memory than a worker has (memory_mb)"
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # __str__ is user code too
        text = type(error).__name__
    ending = ""
    for file, line in _list_frames(error.__traceback__):
        # User code is outside this project, the installed packages and the standard library.
        if file.endswith(".py") and not file.startswith((*_OURS, *_INSTALLED)):
            ending = f" ({Path(file).name}, line {line})"
    if locked and _needs_network(error):
        ending += NO_NETWORK
    text = text[: frames.TEXT - len(ending)].encode("utf-8", "backslashreplace").decode()
    return "exception", text + ending


def _list_frames(trace: TracebackType | None) -> list[tuple[str, int]]:
    """Return file and line of a traceback's frames, the innermost last."""
    lines: list[tuple[str, int]] = []
    while trace is not None and len(lines) < _DEEPEST:
        lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return lines


def _needs_network(error: BaseException) -> bool:
    """Return whether a chain of exceptions has a refused socket, an unknown host name, or an unreachable judge."""
    queue, count = [error], 0
    while queue and count < _DEEPEST:
        link, count = queue.pop(), count + 1
        files = [Path(file).name for file, _ in _list_frames(link.__traceback__)]
        if type(link).__name__ in _OF_NETWORK or (isinstance(link, PermissionError) and files[-1:] == ["socket.py"]):
            return True
        # urllib stores the cause only in `reason`.
        causes = (link.__cause__, link.__context__, vars(link).get("reason"))
        queue += [cause for cause in causes if isinstance(cause, BaseException)]
    return False


_TIMERS = (ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF)
_REAL_TIME = 32
"""The first real-time signal. Those are only sent on purpose, and their senders have ended."""


class Leftovers:
    """The process state before a call; a later difference is a leftover of the call."""

    def __init__(self) -> None:
        self._numbers = sorted(number for number in valid_signals() if number < _REAL_TIME)
        self._mask = pthread_sigmask(SIG_SETMASK, ())
        pthread_sigmask(SIG_SETMASK, self._mask)
        self._handlers = [getsignal(number) for number in self._numbers]
        self._threads = _thread._count()
        self._stop_timers()

    @property
    def threads(self) -> bool:
        """Whether more Python threads run; a thread without `threading` counts once it has started."""
        return _thread._count() > self._threads

    def clear(self) -> bool:
        """Restore the state; return false if only a new worker has it. Raises what the call's signal handlers raise."""
        self._stop_timers()
        pthread_sigmask(SIG_SETMASK, self._mask)
        handlers = [getsignal(number) for number in self._numbers]
        if handlers != self._handlers:
            for number, handler, before in zip(self._numbers, handlers, self._handlers, strict=True):
                if handler is not before:
                    if before is None:  # not a handler of Python: it cannot be restored from here
                        return False
                    signal(number, before)
        if sys.gettrace() is not None or sys.getprofile() is not None:
            sys.settrace(None)
            sys.setprofile(None)
        return not self.threads

    def _stop_timers(self) -> None:
        for timer in _TIMERS:
            setitimer(timer, 0)
        if (faulthandler := sys.modules.get("faulthandler")) is not None:
            faulthandler.cancel_dump_traceback_later()


_clock = time.perf_counter
_PackedOutcome = tuple[str, Any, str | None, float]
_encode = msgspec.msgpack.Encoder().encode
_from_json = msgspec.json.Decoder(dict[str, Any]).decode
_from_msgpack = msgspec.msgpack.Decoder(dict[str, Any]).decode
_FIRST_MAP = 0x80
"""The first byte of a MessagePack map is at least this; of JSON it is below."""


class _LoadedFunction(NamedTuple):
    """The function, and how to call it."""

    call: Callable[..., Any]
    mode: str
    locked: bool
    leftovers: Leftovers


def main() -> None:
    """Load the function of the orders, describe it, and answer calls until the parent closes the pipe."""
    requests, replies = _hide_streams()
    sequence, (packed,) = frames.read_request(requests)
    orders = json.loads(bytes(packed))
    frames.write_all(replies, frames.REPLY.pack(sequence, 0, 0, 0))
    if orders["locked"]:
        _allow_event_loops()
    try:
        function = _load_function(orders["path"], orders["name"])
        if orders["adapter"]:
            module, _, name = orders["adapter"].partition(":")
            function = getattr(importlib.import_module(module), name)(function)
        hello = _describe_function(function)
    except BaseException as error:  # user code ran: report any exception
        kind, text = describe_failure(error, locked=orders["locked"])
        hello = {"kind": kind, "error": text}
    body = json.dumps(hello).encode()
    frames.write_all(replies, frames.REPLY.pack(sequence, 0, 0, len(body)) + body)
    if "error" not in hello:
        loaded = _LoadedFunction(function, orders["mode"], orders["locked"], Leftovers())
        with suppress(EOFError):
            while _answer_request(loaded, requests, replies):
                pass
    # Skip clean-up: the process holds nothing that needs it, and the function's threads and exit handlers may hang.
    os._exit(0)


def _hide_streams() -> tuple[int, int]:
    """Return handles to read requests and to write replies. From here on stdin is empty and stdout is stderr."""
    # Random numbers: code that closes or writes to unknown handles hits them less often.
    handles = random.sample(range(64, min(900, resource.getrlimit(resource.RLIMIT_NOFILE)[0])), 2)
    requests = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, handles[0])
    replies = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, handles[1])
    empty, end = os.pipe()
    os.close(end)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    return requests, replies


class _PipeEnd:
    """A pipe with the socket methods that an event loop needs to wake itself."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def fileno(self) -> int:
        return self._handle

    def setblocking(self, flag: bool) -> None:
        os.set_blocking(self._handle, flag)

    def recv(self, length: int) -> bytes:
        return os.read(self._handle, length)

    def send(self, message: bytes) -> int:
        return os.write(self._handle, message)

    def close(self) -> None:
        os.close(self._handle)


def _allow_event_loops() -> None:
    """Let asyncio work without sockets: its event loop makes a pair of them, to wake itself from other threads."""
    import socket

    def pair(*_: object, **__: object) -> tuple[Any, Any]:
        return tuple(map(_PipeEnd, os.pipe()))  # type: ignore[return-value]

    socket.socketpair = pair


def _load_function(file: str, name: str) -> Callable[..., Any]:
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    # A module must not replace another module of the same name that others import.
    is_taken = path.stem in sys.stdlib_module_names or path.stem in sys.modules
    module_name = f"_reward_{path.stem}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        msg = f"{path} is not a Python module; its name must end in .py"
        raise ImportError(msg)
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    attribute = getattr(module, name, None)
    if callable(attribute):
        return cast("Callable[..., Any]", attribute)
    functions = [key for key, each in vars(module).items() if inspect.isfunction(each) and not key.startswith("_")]
    fault = "is not a function" if attribute is not None else "does not exist"
    msg = f"`{name}` {fault} in {file}; functions there: {', '.join(sorted(functions)) or 'none'}"
    raise LookupError(msg)


def _describe_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function's description for the parent: JSON data only."""
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


class _EventLoop:
    """One event loop for all calls, whose tasks and threads end with the call that started them."""

    def __init__(self) -> None:
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._all_tasks, self._gather, self._executor_type = asyncio.all_tasks, asyncio.gather, ThreadPoolExecutor
        self._renew_executor()

    def run(self, awaitable: Any, leftovers: Leftovers) -> Any:
        """Return the result of an awaitable."""

        async def await_result() -> Any:
            return await awaitable

        try:
            return self._loop.run_until_complete(await_result())
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


_get_loop = cache(_EventLoop)


def _answer_request(function: _LoadedFunction, requests: int, replies: int) -> bool:
    """Answer the calls of one request in order; return false after a call that left something behind permanently."""
    sequence, rows = frames.read_request(requests)
    ready: list[bytes] = []
    sent = size = 0
    reported = _clock()
    worn = False
    for row in rows:
        start = _clock()
        if ready and (start - reported > frames.REPORT_SECONDS or size > frames.FLUSH_BYTES):
            _send_reply(replies, sequence, sent, ready)
            sent += len(ready)
            ready, size, reported = [], 0, _clock()
        outcome, clean = _run_call(function, row, start)
        packed = _pack_outcome(outcome)
        size += len(packed)
        ready.append(packed)
        if worn := not clean:
            break
    _send_reply(replies, sequence, sent, ready, worn)
    return not worn


def _send_reply(replies: int, sequence: int, first: int, ready: list[bytes], worn: bool = False) -> None:
    body = b"".join((b"\xdc", len(ready).to_bytes(2, "big"), *ready))
    count = len(ready) | (frames.WORN if worn else 0)
    frames.write_all(replies, frames.REPLY.pack(sequence, first, count, len(body)) + body)


def _run_call(function: _LoadedFunction, row: memoryview, start: float) -> tuple[_PackedOutcome, bool]:
    """Return the outcome of a call, and whether it left nothing behind."""
    try:
        arguments = _from_msgpack(row) if row and row[0] >= _FIRST_MAP else _from_json(row)
    except (msgspec.MsgspecError, RecursionError) as error:
        return ("invalid", None, f"the arguments of this call are not a JSON object: {error}", 0.0), True
    clean = False
    try:
        try:
            returned = function.call(**arguments)
            if hasattr(returned, "__await__"):
                returned = _get_loop().run(returned, function.leftovers)
            document = convert_result(returned, function.mode)
        finally:
            # An exception of this call's timer at the last moment belongs to this call too.
            clean = function.leftovers.clear()
        return ("ok", document, None, _clock() - start), clean
    except BaseException as error:  # user code ran: any exception is its outcome
        kind, text = describe_failure(error, locked=function.locked)
        return (kind, None, text, _clock() - start), clean


def _pack_outcome(outcome: _PackedOutcome) -> bytes:
    try:
        packed = _encode(outcome)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        return _encode(("invalid", None, f"it returned no JSON data: {error}"[: frames.TEXT], outcome[3]))
    if len(packed) <= frames.RESULT_BYTES:
        return packed
    text = f"it returned {len(packed):,} bytes; a result may have {frames.RESULT_BYTES:,}"
    return _encode(("invalid", None, text, outcome[3]))


if __name__ == "__main__":
    main()
