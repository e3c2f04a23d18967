"""What user code returned, as plain JSON data; and why it is none. Runs in the worker."""

from typing import Any

import msgspec

_PLAIN = (str, type(None))


class NoResultError(ValueError):
    """The function returned what is no JSON data."""


def plain(value: Any, mode: str) -> Any:
    """Numbers, text, None, lists and dicts with text keys, from whatever stands for them.

    Structs (EvaluateResult), dataclasses, pydantic models and numpy values are converted; a number on its own, whatever
    its type, becomes a float.

    Args:
        value: what the function returned.
        mode: pointwise, batch or group; the latter two return a list.

    Raises:
        NoResultError: it cannot be converted, or it is no list where there must be one.
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
    """A value of a type that is not known here."""
    for method in ("model_dump", "tolist", "to_dict"):
        if callable(convert := getattr(value, method, None)):
            return convert()
    msg = f"{_named(value)} inside it; return numbers, text, lists, dicts or EvaluateResult"
    raise TypeError(msg)


def _named(value: Any) -> str:
    return f"an object of type {type(value).__name__}"
