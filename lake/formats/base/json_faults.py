"""What a JSON decoder does not tell: a key that an object has twice, where a NaN is, and nesting that is too deep.

The fast decoder keeps the last of two values without a word. Seeing the first would take a parser of our own and half
of the speed, so keys are counted instead: a decoded value that is written again has as many colons as its text, unless
a key was lost. Only a text whose count differs is read a second time, slowly. What could hide a lost key is a colon
that is written as an escape in the same text, or, of a typed record, a time zone written without its colon.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from lake.records import DEPTH_KEPT

_LEVELS = DEPTH_KEPT + 8
"""Of nesting to spare: a record has a few levels more than its text."""
_LARGEST_BUFFER = 16 << 20
_SHORT = 1 << 12
"""Bytes of a text whose brackets are counted faster than it is nested."""
_FEW = 256
"""Brackets, which nest nothing deeply however they stand."""
_COLON = ord(":")


class Rewriter:
    """Writes decoded values again, to compare them with their text."""

    def __init__(self) -> None:
        encoder = msgspec.json.Encoder()
        self._encode, self._encode_into = encoder.encode, encoder.encode_into
        self._place: list[Any] = [None]
        self._buffer = bytearray()

    @cached_property
    def _nested(self) -> list[Any]:
        """The place of a value, below levels of nesting."""
        nested = self._place
        for _ in range(_LEVELS):
            nested = [nested]
        return nested

    def compared(self, text: bytes, value: Any) -> tuple[bool, bool]:
        """Whether a value can be stored as JSON with levels of nesting to spare, and whether it may have lost a key.

        Returns:
            is_plain, may_repeat. The second is also true of a text that spells a colon as an escape.
        """
        if len(text) <= _SHORT and text.count(b"[") + text.count(b"{") <= _FEW:
            try:
                written = self._encode(value)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                return False, True
            return True, written != text.rstrip() and written.count(b":") != text.count(b":")
        self._place[0] = value
        try:
            self._encode_into(self._nested, self._buffer)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False, True
        finally:
            self._place[0] = None
        # A text that msgspec wrote comes back byte for byte: nothing to count.
        same = self._buffer[_LEVELS:-_LEVELS] == text.rstrip()
        may_repeat = not same and _colons(text) != _colons(self._buffer)
        if len(self._buffer) > _LARGEST_BUFFER:
            self._buffer = bytearray()
        return True, may_repeat


def repeated_key(text: str | bytes) -> str | None:
    """The first key that an object in a well-formed text has twice, as a sentence; None if there is none."""
    for place, node in _nodes(text):
        if isinstance(node, _Repeated):
            return f"the object at `{place}` has the key {node.key!r} twice; valid: once"
    return None


def not_a_number(text: str | bytes) -> str | None:
    """The first NaN or infinity in a text that is well-formed but for it, as a sentence; None if there is none."""
    for place, node in _nodes(text):
        if isinstance(node, _Constant):
            return f"`{place}` is {node}, which JSON does not have; valid: a finite number, or null if unknown"
    return None


class _Repeated(dict[str, Any]):
    """An object with a key twice."""

    key = ""


class _Constant(str):
    """NaN, Infinity or -Infinity."""

    __slots__ = ()


def _colons(text: bytes | bytearray) -> int:
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _COLON))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeated = _Repeated(found)
    keys = [key for key, _ in pairs]
    repeated.key = next(key for place, key in enumerate(keys) if key in keys[:place])
    return repeated


def _nodes(text: str | bytes) -> Iterator[tuple[str, Any]]:
    """Every value inside a text with its place, in order; nothing if the standard library cannot read it either."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_Constant)
    except (ValueError, RecursionError):
        return
    waiting = [("$", value)]
    while waiting:
        place, node = waiting.pop()
        yield place, node
        if isinstance(node, dict):
            waiting += [(f"{place}.{key}", inner) for key, inner in reversed(node.items())]
        elif isinstance(node, list):
            waiting += [(f"{place}[{index}]", inner) for index, inner in reversed(list(enumerate(node)))]
