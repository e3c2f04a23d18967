"""Documents that are one episode each: those that end too early, and the files that stand beside them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lake.errors import FormatError
from lake.formats.base.json_array import Element, Member
from lake.formats.base.look import look
from lake.formats.base.rows import members, values
from lake.formats.base.source import Input, Source
from lake.records import Reject, shown

_FIRST_BYTES = 64
"""Of a file, which mostly tell that it is no array."""
_COMPANION_BYTES = 256 << 20
"""A companion that is longer than this is none."""


def is_array(path: Path) -> bool:
    """Whether a file looks like a JSON array."""
    try:
        with Source(path) as source:
            begins = source.read(_FIRST_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        return begins[:1] in (b"[", b"") and look(path).kind == "array"
    except (FormatError, OSError):
        return False


def with_parts(file: Input, *arrays: str) -> Iterator[tuple[Element | Reject, bool]]:
    """The values of a file, and whether it ends inside one.

    A document that ends too early comes twice: as what it held until then, and as a reject. Of the first of `arrays`
    that it has an element of, the part holds the whole elements; what is cut elsewhere is no part of it.
    """
    for item in values(file):
        # Lines are numbered from 1: only what fills the file can be read as a part of it.
        if isinstance(item, Reject) and item.reason == "truncated" and item.position == 0:
            part = next((part for name in arrays if (part := _part(file, name)).get(name)), None)
            if part is not None:
                yield Element(0, part, source=item.raw), True
        yield item, False


def _part(file: Input, array: str) -> dict[str, Any]:
    part: dict[str, Any] = {array: []}
    for item in members(Input(file.path, file.run_id), array):
        if isinstance(item, Member):
            part[item.key] = item.value
        elif isinstance(item, Element) and item.problem is None:
            part[array].append(item.value)
    return part


def companion(path: Path) -> tuple[Any, str | None]:
    """The JSON value of a file beside another, and why there is none; neither where there is no such file."""
    try:
        if not path.is_file():
            return None, None
        with Source(path) as source:
            data = source.read(_COMPANION_BYTES + 1)
            fault = source.fault
    except OSError as error:
        return None, f"{path.name} cannot be read: {error.strerror}"
    if fault is not None:
        return None, fault
    try:
        return msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf")), None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return None, f"{path.name} is not JSON: {error}"


def problem_of(element: Element) -> str | None:
    """Why one of several values that make an episode cannot be part of it; None if it can."""
    if element.problem is None and not element.is_plain:
        try:
            msgspec.json.encode(element.value)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            return f"it cannot be stored as UTF-8 JSON: {error}"
    return element.problem


def gathered(value: Any) -> Element:
    """What was put together of the values of a file, as one value; its text is for a person."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        text = shown(value)
    return Element(0, value, source=text)
