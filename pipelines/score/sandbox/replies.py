"""What a worker sends, read as if an enemy had sent it.

A function runs in the worker's process and can write whatever it likes to the parent, so a reply is held to what was
asked: its sequence, its place, its number of outcomes, its size, and values that are plain JSON data with finite
numbers. Whatever breaks that ends the worker.
"""

from math import isfinite
from typing import Any

import msgspec

from pipelines.score.sandbox import frames
from pipelines.score.sandbox.contract import Kind, Mode, Outcome

DEPTH = 64
"""Lists and dicts inside each other that a value may have."""
ITEMS = 1_000_000
"""Values that a value may hold in all."""
_KINDS = frozenset(("ok", "exception", "memory", "invalid"))
"""What a worker may report; the parent alone knows of the others."""
_SCALARS = frozenset((bool, int, str))
_CONTROLS = {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {ord("\t"), ord("\n")}
_SPELLED_OUT = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS}


class ForgedReplyError(ValueError):
    """A worker sent what is no reply to what it was asked."""


class UnusableValueError(ValueError):
    """A function returned data that no score can be made of."""


class Facts(msgspec.Struct, frozen=True):
    """What a worker says of its function: the reply to its orders."""

    mode: Mode = "pointwise"
    is_async: bool = False
    parameters: list[str] = []
    accepts_any: bool = False
    requires_network: bool = False
    declared: dict[str, Any] = {}
    kind: Kind = "ok"
    error: str | None = None


_facts = msgspec.json.Decoder(Facts)
_outcomes = msgspec.msgpack.Decoder(list[tuple[str, Any, str | None, float]])


def printable(text: str) -> str:
    """Text of a function for a person's terminal: control characters, which could command it, are spelled out."""
    return text.translate(_SPELLED_OUT)


def facts(body: bytes) -> Facts:
    """The reply to a worker's orders; ForgedReplyError if it is none."""
    try:
        found = _facts.decode(body)
        _check(found.declared)
    except (msgspec.MsgspecError, RecursionError, UnusableValueError) as error:
        msg = f"its worker did not say what the function is: {error}"
        raise ForgedReplyError(msg) from None
    return found


def body_length(header: bytes, sequence: int, first: int, most: int) -> tuple[int, int, bool]:
    """Outcomes and bytes that follow the header of a reply, and whether the worker wants to be replaced after them.

    `first` is the place of the first of the calls, `most` of them, without an outcome yet. ForgedReplyError if it is no
    reply to this request, or longer than one may be.
    """
    answered, place, count, length = frames.REPLY.unpack(header)
    worn, count = bool(count & frames.WORN), count & ~frames.WORN
    if answered != sequence or place != first or not 1 <= count <= most:
        msg = "its worker sent bytes that are no reply to the request"
        raise ForgedReplyError(msg)
    if length > frames.REPLY_BYTES:
        msg = f"its worker announced a reply of {length:,} bytes; none has more than {frames.REPLY_BYTES:,}"
        raise ForgedReplyError(msg)
    return count, length, worn


def hello_length(header: bytes, sequence: int) -> int:
    """Bytes of the reply to a worker's orders; ForgedReplyError if it is none, or longer than one may be."""
    answered, place, count, length = frames.REPLY.unpack(header)
    if answered != sequence or place or count or length > frames.REPLY_BYTES:
        msg = "its worker sent bytes that do not say what the function is"
        raise ForgedReplyError(msg)
    return int(length)


def outcomes(body: bytes | bytearray, count: int, mode: Mode) -> list[Outcome]:
    """The outcomes in a reply; ForgedReplyError if the bytes are none, or not so many."""
    try:
        found = _outcomes.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        msg = f"its worker sent what is no list of outcomes: {error}"
        raise ForgedReplyError(msg) from None
    if len(found) != count:
        msg = f"its worker sent {len(found)} outcomes where it said {count}"
        raise ForgedReplyError(msg)
    return [_outcome(*each, mode) for each in found]


def _outcome(kind: str, value: Any, error: str | None, seconds: float, mode: Mode) -> Outcome:
    seconds = seconds if isfinite(seconds) and seconds >= 0 else 0.0
    if kind == "ok" and error is None:
        if type(value) is float and mode == "pointwise" and isfinite(value):
            return Outcome(value, None, "ok", seconds)
        try:
            _check(value)
        except UnusableValueError as reason:
            return Outcome(None, f"it returned {reason}", "invalid", seconds)
        if mode == "pointwise" or type(value) is list:
            return Outcome(value, None, "ok", seconds)
    elif kind in _KINDS and value is None and error is not None and len(error) <= 2 * frames.TEXT:
        return Outcome(None, printable(error), kind, seconds)  # type: ignore[arg-type]
    msg = "its worker sent an outcome that contradicts itself"
    raise ForgedReplyError(msg)


def _check(value: Any) -> None:
    """Walk a value without recursion: an enemy chooses how deep it is."""
    left: list[tuple[Any, Any, int]] = [(value, None, 0)]
    seen = 0
    while left:
        item, key, depth = left.pop()
        kind = type(item)
        if kind is float:
            if not isfinite(item):
                msg = f"{item}{'' if key is None else f' as {key!r:.100}'}; a number must be finite"
                raise UnusableValueError(msg)
        elif kind is dict or kind is list:
            seen += len(item)
            if depth == DEPTH or seen > ITEMS:
                msg = f"data nested deeper than {DEPTH} levels, or of more than {ITEMS:,} values"
                raise UnusableValueError(msg)
            pairs = item.items() if kind is dict else enumerate(item)
            left += [(inner, name, depth + 1) for name, inner in pairs]
            if kind is dict and not all(type(name) is str for name in item):
                msg = "a dict with keys that are no text"
                raise UnusableValueError(msg)
        elif item is not None and kind not in _SCALARS:
            msg = f"{kind.__name__}, which is no JSON data"
            raise UnusableValueError(msg)
