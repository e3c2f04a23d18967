"""What user code returned as plain JSON data, or why it is none; and what to tell of its exceptions. In the worker."""

import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from pipelines.score.sandbox import frames

_PLAIN = (str, type(None))


class NoResultError(ValueError):
    """The function returned what is no JSON data."""


def plain(value: Any, mode: str) -> Any:
    """Numbers, text, None, lists and dicts with text keys, from whatever stands for them.

    Structs (EvaluateResult), dataclasses, pydantic models and numpy values are converted; a number on its own, whatever
    its type, becomes a float. In the modes batch and group the value must be a list. NoResultError if it is not, or
    cannot be converted.
    """
    if mode == "pointwise":
        if type(value) is float or isinstance(value, _PLAIN):
            return value
        if hasattr(value, "__float__"):
            return _number(value)
    found = _builtins(value)
    if mode != "pointwise" and not isinstance(found, list | tuple):
        msg = f"a {mode} function returns a list with one result per rollout; it returned {_named(value)}"
        raise NoResultError(msg)
    return found


def _number(value: Any) -> float:
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError) as error:
        msg = f"it returned {_named(value)}, which is no single number: {error}"
        raise NoResultError(msg) from None


def _builtins(value: Any) -> Any:
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_converted)
    except RecursionError:
        msg = f"it returned {_named(value)}, which contains itself or is nested too deeply"
        raise NoResultError(msg) from None
    except (TypeError, ValueError, OverflowError) as error:
        msg = f"it returned {_named(value)}, which is no JSON data: {str(error)[:200]}"
        raise NoResultError(msg) from None


def _converted(value: Any) -> Any:
    for method in ("model_dump", "tolist", "to_dict"):
        if callable(convert := getattr(value, method, None)):
            return convert()
    msg = f"{_named(value)} inside it; return numbers, text, lists, dicts or EvaluateResult"
    raise TypeError(msg)


def _named(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


Failure = tuple[str, str]
"""Kind of outcome, and what is said of it."""
NO_NETWORK = (
    "; the sandbox has no network: declare @reward_function(requires_network=True), and allow it with --allow-network"
)
_OF_NETWORK = ("gaierror", "JudgeError")
"""Exceptions that nothing but a network raises; named, as importing them takes time that most workers do not need."""
_OURS = (str(Path(__file__).parents[2]), str(Path(__file__).parents[3] / "lake"))
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_DEEPEST = 100
"""Frames, and exceptions behind each other, that are looked at."""


def failure(error: BaseException, *, locked: bool) -> Failure:
    """An exception's type, its text, and the innermost line of the user's own that it passed."""
    if isinstance(error, NoResultError):
        return "invalid", str(error)[: frames.TEXT]
    if isinstance(error, MemoryError):
        return "memory", "it needs more memory than a worker has (memory_mb)"
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # __str__ is user code too
        text = type(error).__name__
    place = ""
    for file, line in _passed(error.__traceback__):
        # The user's code: neither ours, nor installed, nor of the standard library.
        if file.endswith(".py") and not file.startswith((*_OURS, *_INSTALLED)):
            place = f" ({Path(file).name}, line {line})"
    if locked and _wanted_network(error):
        place += NO_NETWORK
    text = text[: frames.TEXT - len(place)].encode("utf-8", "backslashreplace").decode()
    return "exception", text + place


def _passed(trace: TracebackType | None) -> list[tuple[str, int]]:
    """File and line of the frames that an exception passed, the innermost last."""
    found: list[tuple[str, int]] = []
    while trace is not None and len(found) < _DEEPEST:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _wanted_network(error: BaseException) -> bool:
    """Whether a socket was refused, a host's name not found, or a judge not reached, somewhere behind an exception."""
    left, seen = [error], 0
    while left and seen < _DEEPEST:
        one, seen = left.pop(), seen + 1
        files = [Path(file).name for file, _ in _passed(one.__traceback__)]
        if type(one).__name__ in _OF_NETWORK or (isinstance(one, PermissionError) and files[-1:] == ["socket.py"]):
            return True
        # urllib keeps what happened in `reason`, and nowhere else.
        behind = (one.__cause__, one.__context__, vars(one).get("reason"))
        left += [each for each in behind if isinstance(each, BaseException)]
    return False
