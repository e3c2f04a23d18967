"""Reward functions no one would wish for: they cheat, break things, hang, and die, as their message says.

The tests copy them into another folder, so that nothing here is importable next to them.
"""

import _thread
import asyncio
import builtins
import ctypes
import faulthandler
import json
import os
import re
import resource
import signal
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

HOARD: list[bytearray] = []
COUNT = [0]


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


class _Number:
    def __float__(self) -> float:
        raise RuntimeError("not today")


def _swallow() -> None:
    while True:
        try:
            while True:
                time.sleep(0.01)
        except BaseException:
            continue


def _write_everywhere(data: bytes) -> float:
    for handle in range(1024):
        try:
            os.write(handle, data)
        except OSError:
            continue
    return 9.0


def _stolen() -> dict[str, Any]:
    """The worker's own variables: the sequence of the request and where replies go."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if "sequence" in frame.f_locals and "replies" in frame.f_locals:
            return dict(frame.f_locals)
    raise LookupError


def _forge(rows: int, body: bytes, length: int | None = None) -> float:
    """A reply with the right sequence and place."""
    at = _stolen()
    head = struct.pack("=QIII", at["sequence"], at["sent"], rows, len(body) if length is None else length)
    os.write(at["replies"], head + body)
    time.sleep(60)
    return 9.0


def _deep(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


def _cyclic() -> dict[str, Any]:
    reply: dict[str, Any] = {"score": 1.0}
    reply["self"] = reply
    return reply


def _recurse(depth: int) -> int:
    return 1 + _recurse(depth + 1)


def _fill_the_stack(depth: int) -> int:
    block = bytearray(10_000)
    return len(block) + _fill_the_stack(depth + 1)


def _recurse_without_limit() -> int:
    sys.setrecursionlimit(1 << 30)
    return _fill_the_stack(0)


def _replace_builtins() -> float:
    for name in ("len", "isinstance", "range", "type", "dict", "BaseException", "tuple"):
        setattr(builtins, name, None)
    json.dumps = json.loads = None  # type: ignore[assignment]
    return 5.0


def _patch_the_worker() -> float:
    module = sys.modules["__main__"]
    for name, value in vars(module).items():
        if callable(value) and not name.startswith("__"):
            setattr(module, name, lambda *_, **__: 1.0)
    return 5.0


def _close_everything() -> float:
    os.closerange(0, 1024)
    return 5.0


def _close_three() -> float:
    for handle in (0, 1, 2):
        os.close(handle)
    return 5.0


def _go_on_after_return() -> float:
    def work() -> None:
        while True:
            time.sleep(0.001)
            COUNT[0] += 1
            print("still here")

    threading.Thread(target=work, daemon=True).start()
    return 5.0


def _limits() -> float:
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    return 9.0


def _die_by_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(60)


def _raise(error: BaseException) -> None:
    raise error


def _hoard() -> float:
    HOARD.append(bytearray(b"x") * (40 << 20))
    return 5.0


class _LateError(Exception):
    """What a call has left behind raises in the next call."""


def _raise_late(*_: Any) -> None:
    raise _LateError


def _by_timer(kind: int, number: int, handler: Any = _raise_late, interval: float = 0.0) -> float:
    signal.signal(number, handler)
    signal.setitimer(kind, 0.02, interval)
    return 5.0


def _by_blocked_timer() -> float:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    _by_timer(signal.ITIMER_REAL, signal.SIGALRM)
    time.sleep(0.05)
    return 5.0


def _by_thread(deed: Any) -> float:
    def work() -> None:
        time.sleep(0.02)
        deed()

    threading.Thread(target=work, daemon=True).start()
    return 5.0


def _raise_in_main() -> None:
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(_LateError))


def _signal_to_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def _by_signal_from_a_thread() -> float:
    signal.signal(signal.SIGUSR1, _raise_late)
    return _by_thread(_signal_to_main)


def _after(deed: Any, *arguments: Any) -> float:
    deed(*arguments)
    return 5.0


async def _by_task() -> float:
    async def later() -> None:
        await asyncio.sleep(0.01)
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    _TASKS.append(asyncio.create_task(later()))
    return 5.0


async def _by_executor_of_the_loop() -> float:
    _TASKS.append(asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.02))
    return 5.0


def _by_executor() -> float:
    pool = ThreadPoolExecutor(1)
    _TASKS.append(pool)
    pool.submit(time.sleep, 0.02)
    return 5.0


_TASKS: list[Any] = []
LEFT_BEHIND = {
    "alarm": lambda: _by_timer(signal.ITIMER_REAL, signal.SIGALRM),
    "alarm without a handler": lambda: _by_timer(signal.ITIMER_REAL, signal.SIGALRM, signal.SIG_DFL),
    "repeated alarm": lambda: _by_timer(signal.ITIMER_REAL, signal.SIGALRM, interval=0.001),
    "timer of processor time": lambda: _by_timer(signal.ITIMER_VIRTUAL, signal.SIGVTALRM),
    "timer of a profiler": lambda: _by_timer(signal.ITIMER_PROF, signal.SIGPROF),
    "handler": lambda: _after(signal.signal, signal.SIGALRM, _raise_late),
    "ignored alarm": lambda: _after(signal.signal, signal.SIGALRM, signal.SIG_IGN),
    "blocked signals": lambda: _after(signal.pthread_sigmask, signal.SIG_BLOCK, signal.valid_signals()),
    "thread that raises": lambda: _by_thread(_raise_in_main),
    "thread that interrupts": lambda: _by_thread(_thread.interrupt_main),
    "thread that signals": _by_signal_from_a_thread,
    "thread that sleeps": lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start() or 5.0,
    "timer thread": lambda: threading.Timer(0.02, _raise_in_main).start() or 5.0,
    "executor": _by_executor,
    "executor of the loop": _by_executor_of_the_loop,
    "task": _by_task,
    "watchdog": lambda: _after(faulthandler.dump_traceback_later, 0.02),
}
"""What a call can leave behind that would spoil others: it is worth 5.0, and no later call notices anything."""
OWN_FAULT = {
    "blocked alarm": _by_blocked_timer,
    "trace function": lambda: _after(sys.settrace, _raise_late),
    "profile function": lambda: _after(sys.setprofile, _raise_late),
    "raise after the return": lambda: _after(_raise_in_main),
}
"""The same, found out before the call is over."""


def _is_clean() -> bool:
    """Whether a call finds its process as the first call found it."""
    handlers = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGPROF)]
    timers = [signal.getitimer(kind) for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]
    idle = not signal.pthread_sigmask(signal.SIG_BLOCK, ()) and threading.active_count() == 1
    return idle and set(handlers) == {signal.SIG_DFL} and set(timers) == {(0.0, 0.0)} and sys.gettrace() is None


DEEDS = {
    "swallow": _swallow,
    "exit": lambda: sys.exit(3),
    "hard exit": lambda: os._exit(4),
    "exit like a shell": lambda: os._exit(137),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "unprintable": lambda: _raise(_Unprintable()),
    "long text": lambda: _raise(ValueError("x" * 10_000_000)),
    "odd text": lambda: _raise(ValueError("\ud800 \x00 \x1b[31m \n")),
    "crash": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "death by alarm": _die_by_alarm,
    "memory": lambda: len(bytearray(5 << 30)),
    "hoard": _hoard,
    "print": lambda: print("x" * 5_000_000) or 5.0,
    "garbage on stdout": lambda: os.write(1, os.urandom(100_000)) and 5.0,
    "garbage everywhere": lambda: _write_everywhere(os.urandom(4096)),
    "zeros everywhere": lambda: _write_everywhere(bytes(4096)),
    "forged nan": lambda: _forge(1, b"\xdc\x00\x01\x94\xa2ok\xcb\x7f\xf8" + bytes(6) + b"\xc0\xcb" + bytes(8)),
    "forged kind": lambda: _forge(1, b"\xdc\x00\x01\x94\xa7timeout\xc0\xa1x\xcb" + bytes(8)),
    "forged contradiction": lambda: _forge(1, b"\xdc\x00\x01\x94\xa2ok\x01\xa1x\xcb" + bytes(8)),
    "forged count": lambda: _forge(60_000, b"\xdc\x00\x00"),
    "forged shortage": lambda: _forge(1, b"\xdc\x00\x00"),
    "forged size": lambda: _forge(1, b"", length=(1 << 31)),
    "forged delay": lambda: _forge(1, b"\xdc", length=1000),
    "forged depth": lambda: _forge(1, b"\xdc\x00\x01\x94\xa2ok" + b"\x91" * 100_000 + b"\xc0" * 3),
    "nan": lambda: float("nan"),
    "infinity": lambda: {"score": 1.0, "metrics": {"m": {"score": -float("inf")}}},
    "huge text": lambda: "x" * (50 << 20),
    "huge list": lambda: {"score": 1.0, "metrics": [0] * 3_000_000},
    "many values": lambda: {"score": 1.0, "metrics": [[1] * 3] * 400_000},
    "deep": lambda: {"score": 1.0, "metrics": _deep(200)},
    "very deep": lambda: _deep(100_000),
    "cyclic": _cyclic,
    "object": object,
    "function": lambda: print,
    "generator": lambda: (i for i in "ab"),
    "no number": _Number,
    "huge number": lambda: 10**400,
    "huge number inside": lambda: {"score": 10**30},
    "recursion": lambda: _recurse(0),
    "recursion without limit": _recurse_without_limit,
    "builtins": _replace_builtins,
    "patch": _patch_the_worker,
    "close three": _close_three,
    "close everything": _close_everything,
    "thread": _go_on_after_return,
    "limits": _limits,
}


def hostile(messages: list[dict[str, str]], **arguments: Any) -> Any:
    """Does what the message says, and spoils its arguments; `good 0.5` is worth 0.5."""
    text = messages[0]["content"]
    messages.clear()
    arguments.clear()
    if match := re.fullmatch(r"good (\S+)", text):
        return float(match[1])
    if match := re.fullmatch(r"patient (\S+)", text):
        clean, until = _is_clean(), time.perf_counter() + 0.04
        while time.perf_counter() < until:
            pass
        return float(match[1]) if clean else -1.0
    return (DEEDS | LEFT_BEHIND | OWN_FAULT)[text]()
