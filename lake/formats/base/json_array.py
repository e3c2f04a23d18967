"""A JSON array of records, read in windows of bytes, at the speed of the decoder and in bounded memory.

A window is cut at an element's end and decoded as a list at once. Where the elements end is guessed: at the last place
that looks like the boundary behind the element before (its last brackets, comma, white space, the next one's first
key). The guess needs no trust: text that starts at an element and decodes as whole elements is those elements, because
no proper prefix of a bracketed value is a value. What does not decode is taken piece by piece, and a piece that does
not decode goes to the exact scanner: the standard library's, which says where a value ends
and takes what it can of NaN, lone surrogates, bytes that are not UTF-8, and nesting that is too deep.

Elements that are complete are kept even if the document is damaged further on; what comes from the damage to the end
is handed back as one piece of text. An element in which an object has a key twice has no value, only this problem.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from lake.formats.base.json_faults import Rewriter, repeated_key
from lake.formats.base.json_scanner import CHUNK, Scanner, TooLongError, skip_value
from lake.formats.base.source import Meter, Source
from lake.records import excerpt

_CHUNK = 1 << 21
"""Bytes of a window; an element that does not fit makes it grow."""
_WIDEST = 16
"""Windows without a boundary before the scanner is asked where the element ends."""
_MOST_DOUBLINGS = 6
"""Of the number of elements that are scanned before a boundary is looked for again."""
_GAP = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*(?=[^ \t\r\n])")
_FIRST_KEY = re.compile(rb'\{[ \t\r\n]*"[^"\\]*"|.', re.DOTALL)
_LAST_BRACKETS = re.compile(rb"[ \t\r\n]*[}\]]\Z")
_SPACE = b" \t\r\n"
_RAW_OF_LONG = 64 << 10
_VALUES = msgspec.json.Decoder(list)
_TEXTS = msgspec.json.Decoder(list[msgspec.Raw])
_NOT_DECODED = (msgspec.MsgspecError, ValueError, RecursionError)


class _Part:
    """An array of neighbouring elements; where each ends is found out only if somebody asks."""

    def __init__(self, array: bytes) -> None:
        self._array = array

    @cached_property
    def texts(self) -> list[msgspec.Raw]:
        """The text of each element."""
        return _TEXTS.decode(self._array)


class Element(msgspec.Struct):
    """One element: its index from 0 and its value."""

    index: int
    value: Any
    problem: str | None = None
    """Why an element that is well-formed cannot be taken: nested too deeply, a number of too many digits, a key that
    is there twice."""
    is_plain: bool = False
    """UTF-8 throughout and not nested deeply: it can be stored as JSON."""
    source: str | bytes | tuple[_Part, int] | None = ""
    """What its text is made of when somebody asks; None if its file has no text, and it is written as JSON."""

    @property
    def raw(self) -> str:
        """Its text, at most 16 MB of it, undecodable bytes escaped."""
        if self.source is None:
            return excerpt(written(self.value))
        if isinstance(self.source, bytes):
            return excerpt(self.source.decode("utf-8", errors="backslashreplace").rstrip("\n"))
        if isinstance(self.source, str):
            return excerpt(self.source)
        part, place = self.source
        return excerpt(bytes(part.texts[place]).decode())


def written(value: Any) -> str:
    """A value as JSON; text that is no UTF-8 as escapes."""
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, OverflowError, TypeError):
        return json.dumps(value, default=str)
    except RecursionError:
        return "(it is nested too deeply to be shown)"


class Member(msgspec.Struct):
    """One member of an object that is not read element by element."""

    key: str
    value: Any


class Damage(msgspec.Struct):
    """From here on the document does not parse."""

    index: int
    """Index of the first element that could not be read."""
    message: str
    raw: str
    """What was not read, at most 16 MB of it."""
    at_end: bool
    """The document ends too early (as opposed to a fault inside it)."""


def read_array(path: Path, meter: Meter | None = None) -> Iterator[Element | Damage]:
    """Elements of a JSON array; last, if the document is damaged, the damage."""
    with Source(path) as file:
        yield from _Reader(_Window(file), meter or Meter()).items()


def read_members(path: Path, names: Collection[str], meter: Meter | None = None) -> Iterator[Member | Element | Damage]:
    """The members of a JSON object in order; of arrays called one of `names`, the elements, each array from index 0.

    Last, if the document is damaged, the damage. An array of another name comes whole, and must fit into memory.
    """
    meter = meter or Meter()
    with Source(path) as file:
        window = _Window(file)
        is_first = True
        while True:
            scanner = Scanner(window.taker(), min(CHUNK, _CHUNK))
            try:
                if is_first:
                    scanner.expect("{")
                if scanner.peek() == "}":
                    scanner.expect("}")
                    scanner.expect("")
                    meter.done = window.passed + window.position + scanner.consumed
                    if file.fault:
                        yield Damage(0, file.fault, "", file.is_cut)
                    return
                if not is_first:
                    scanner.expect(",")
                is_first = False
                key, _, _ = scanner.element()
                scanner.expect(":")
                is_array = key in names and scanner.peek() == "["
                value = None if is_array else scanner.element()[0]
            except json.JSONDecodeError as error:
                at_end = file.is_cut if file.fault else scanner.unfinished(error)
                yield Damage(0, file.fault or f"the document does not parse: {error.msg}", scanner.rest(), at_end)
                return
            except TooLongError as error:
                raw, has_end = window.skip(scanner.consumed)
                message = f"a member of the document is left out: {error}"
                yield Damage(0, message if has_end else file.fault or message, raw, not has_end)
                if has_end:
                    continue
                return
            window.position += scanner.consumed
            if is_array:
                reader = _Reader(window, meter, is_inside=True)
                yield from reader.items()
                if reader.is_damaged:
                    return
            elif isinstance(key, str):
                yield Member(key, value)
            meter.done = window.passed + window.position


class _Window:
    """The bytes of a file from some place on."""

    def __init__(self, file: Source) -> None:
        self.file = file
        head = file.read(3)
        self.data = head.removeprefix(b"\xef\xbb\xbf")
        self.position = 0
        self.passed = len(head) - len(self.data)
        """Bytes of the file before the window."""

    def grow(self) -> bool:
        """Drop what is before the position and at least double what is kept; False at the end of the file."""
        added = self.file.read(max(_CHUNK, len(self.data) - self.position))
        if added:
            self.passed += self.position
            self.data = b"".join((memoryview(self.data)[self.position :], added))
            self.position = 0
        return bool(added)

    def skip(self, start: int) -> tuple[str, bool]:
        """Step over the text, list or object that starts some bytes behind the position, keeping nothing of it.

        Returns:
            how it begins, and whether it has an end.
        """
        self.position += start
        raw = self.data[self.position : self.position + _RAW_OF_LONG].decode("utf-8", errors="backslashreplace")
        return raw, skip_value(self)

    def taker(self) -> Callable[[int], bytes]:
        """A function that gives the bytes from the position on, some at a time; the position stays."""
        taken = 0

        def take(size: int) -> bytes:
            nonlocal taken
            if len(self.data) - self.position == taken and not self.grow():
                return b""
            start = self.position + taken
            data = self.data[start : start + size]
            taken += len(data)
            return data

        return take


class _Reader:
    """The state between elements: the window's position is behind the last element that was taken."""

    def __init__(self, window: _Window, meter: Meter, *, is_inside: bool = False) -> None:
        self._window = window
        self._is_inside = is_inside
        """The array is not the whole document."""
        self.is_damaged = False
        self._meter = meter
        self._rewriter = Rewriter()
        self._index = 0
        self._opened = False
        self._closed = False
        self._boundary = b""
        """What stands between two elements, from the last brackets of one to the first key of the other."""
        self._brackets = 0
        """Length of those brackets."""
        self._careful_until = 0
        """Bytes of the file up to where elements are taken one by one."""
        self._misses = 0
        """Looks for a boundary in a row that came to nothing."""
        self._pause = 0
        """Elements to scan before the next look, twice as many after every miss."""

    def items(self) -> Iterator[Element | Damage]:
        """Elements, then the damage if there is any."""
        while not self._closed:
            elements = self._looked_for() or self._scanned()
            self._meter.done = self._window.passed + self._window.position
            yield from elements

    def _looked_for(self) -> list[Element | Damage]:
        """What is decoded, unless that failed too often: a look goes through the window, however far it reaches."""
        if self._pause:
            self._pause -= 1
            return []
        elements = self._decoded()
        self._misses = 0 if elements else min(self._misses + 1, _MOST_DOUBLINGS)
        self._pause = 2**self._misses - 2 if self._misses else 0
        return elements

    def _decoded(self) -> list[Element | Damage]:
        """The elements of a part of the window, or none if it does not decode."""
        start = self._next_start()
        if start is None:
            return []
        end = self._next_end(start)
        if end is None:
            return []
        window = self._window
        array = b"".join((b"[", memoryview(window.data)[window.position + start : window.position + end], b"]"))
        try:
            values = _VALUES.decode(array)
        except _NOT_DECODED:
            values = []
        is_plain, may_repeat = self._rewriter.compared(array, values)
        stop = window.passed + window.position + end
        careful = stop <= self._careful_until
        if not values or not ((is_plain and not may_repeat) or careful):
            self._careful_until = max(self._careful_until, stop)
            return [] if careful else self._decoded()
        window.position += end
        first, part = self._index, _Part(array)
        self._index += len(values)
        problems = [repeated_key(bytes(text)) for text in part.texts] if may_repeat else [None] * len(values)
        return [
            Element(index=first + place, value=value, problem=problem, is_plain=is_plain, source=(part, place))
            for place, (value, problem) in enumerate(zip(values, problems, strict=True))
        ]

    def _next_start(self) -> int | None:
        """Where the next element starts, from the position on; None if that is not plain to see."""
        if not self._boundary:
            return None
        window = self._window
        while not (gap := _GAP.match(window.data, window.position)):
            if len(window.data) - window.position > len(self._boundary) or not window.grow():
                return None
        return gap.end() - window.position

    def _next_end(self, start: int) -> int | None:
        """Where a part of whole elements may end, from the position on."""
        window = self._window
        while True:
            first = window.position + start
            careful = window.passed + first < self._careful_until
            search = window.data.find if careful else window.data.rfind
            found = search(self._boundary, first)
            if found >= 0:
                return found + self._brackets - window.position
            if len(window.data) - window.position > _WIDEST * _CHUNK:
                return None
            if not window.grow():
                break
        whole = window.data.rstrip(_SPACE)
        return len(whole[:-1].rstrip(_SPACE)) - window.position if whole.endswith(b"]") else None

    def _scanned(self) -> list[Element | Damage]:
        """One element by the exact scanner, or the end of the document, or its damage."""
        window = self._window
        scanner = Scanner(window.taker(), min(CHUNK, _CHUNK))
        try:
            if not self._opened:
                scanner.expect("[")
            if scanner.peek() == "]":
                scanner.expect("]")
                self._closed = True
                if self._is_inside:
                    window.position += scanner.consumed
                    return []
                scanner.expect("")
                window.position += scanner.consumed
                fault = window.file.fault
                return [Damage(self._index, fault, "", window.file.is_cut)] if fault else []
            if self._index:
                scanner.expect(",")
            value, text, problem = scanner.element()
        except json.JSONDecodeError as error:
            self._closed = self.is_damaged = True
            return [self._damage(scanner, error)]
        except TooLongError as error:
            return [self._too_long(scanner, str(error))]
        self._opened = True
        window.position += scanner.consumed
        self._learn()
        element = Element(index=self._index, value=value, problem=problem or repeated_key(text), source=text)
        self._index += 1
        return [element]

    def _too_long(self, scanner: Scanner, problem: str) -> Element | Damage:
        window, index = self._window, self._index
        raw, has_end = window.skip(scanner.consumed)
        if not has_end:
            self._closed = self.is_damaged = True
            fault = window.file.fault
            return Damage(index, fault or f"{problem}; it has no end", raw, window.file.is_cut if fault else True)
        self._opened = True
        self._index += 1
        self._learn()
        return Element(index, None, problem, source=raw)

    def _damage(self, scanner: Scanner, error: json.JSONDecodeError) -> Damage:
        where = f"after element {self._index - 1}" if self._index else "from its start"
        at_end = scanner.unfinished(error)
        file = self._window.file
        message = file.fault or f"the document does not parse {where}: {error.msg}"
        at_end = file.is_cut if file.fault else at_end
        return Damage(index=self._index, message=message, at_end=at_end, raw=scanner.rest())

    def _learn(self) -> None:
        """Take what stands around the position, an element's end, as the boundary of all elements."""
        window = self._window
        before = _LAST_BRACKETS.search(window.data, max(0, window.position - 64), window.position)
        gap = _GAP.match(window.data, window.position)
        key = gap and _FIRST_KEY.match(window.data, gap.end())
        if before and gap and key:
            self._boundary = before[0] + gap[0] + key[0]
            self._brackets = len(before[0])
