"""Reading JSON records in windows of bytes, at the speed of the decoder and in bounded memory.

A window is cut at an element's end and decoded as a list at once. The cut is a guess: the last place that looks like
the boundary behind the previous element (its last brackets, comma, white space, the first key of the next one). The
guess needs no trust, because no proper prefix of a bracketed value is a value. A window that does not decode is decoded
in smaller pieces. A piece that does not decode goes to the exact scanner. It uses the decoder of the standard library,
which returns where a value ends and takes what it can of NaN, lone surrogates, bytes that are not UTF-8, and nesting
that is too deep. The text from damage to the end of the document is one reject.

The fast decoder silently keeps the last of two values of a key. Seeing the first would take half of the speed, so keys
are counted instead: a decoded value that is encoded again has as many colons as its text, unless a key was lost. Only a
text whose count differs is read a second time, slowly. A lost key stays hidden if the same text writes a colon as an
escape or, in a typed record, a time zone without its colon.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lake import records
from lake.formats.base.source import Meter, Source
from lake.records import DEPTH_KEPT, Reject, excerpt

# ---------------------------------------------------------------- repeated keys, NaN, nesting

_LEVELS = DEPTH_KEPT + 8
"""Spare levels of nesting: a record has a few levels more than its text."""
_LARGEST_BUFFER = 16 << 20
_SHORT_BYTES = 1 << 12
"""Length of a text up to which counting its brackets is faster than nesting it."""
_FEW_BRACKETS = 256
"""Number of brackets that is too small to nest anything deeply."""
_NOT_DECODED = (msgspec.MsgspecError, ValueError, RecursionError)


class Rewriter:
    """Encodes decoded values again, to compare them with their text."""

    def __init__(self) -> None:
        encoder = msgspec.json.Encoder()
        self._encode, self._encode_into = encoder.encode, encoder.encode_into
        self._buffer = bytearray()
        self._slot: list[Any] = [None]
        self._nested = self._slot
        for _ in range(_LEVELS):
            self._nested = [self._nested]

    def compare(self, text: bytes, decoded_value: Any) -> tuple[bool, bool]:
        """Return whether a value can be stored as JSON with levels of nesting to spare, and whether it may lack a key.

        The second is also true for a text that writes a colon as an escape.
        """
        if len(text) <= _SHORT_BYTES and text.count(b"[") + text.count(b"{") <= _FEW_BRACKETS:
            try:
                encoded = self._encode(decoded_value)
            except _NOT_DECODED:
                return False, True
            return True, encoded != text.rstrip() and encoded.count(b":") != text.count(b":")
        self._slot[0] = decoded_value
        try:
            self._encode_into(self._nested, self._buffer)
        except _NOT_DECODED:
            return False, True
        finally:
            self._slot[0] = None
        # A text that msgspec wrote comes back byte for byte: nothing to count.
        may_repeat = False
        if self._buffer[_LEVELS:-_LEVELS] != text.rstrip():
            counts = [np.count_nonzero(np.frombuffer(t, np.uint8) == ord(":")) for t in (text, self._buffer)]
            may_repeat = counts[0] != counts[1]
        if len(self._buffer) > _LARGEST_BUFFER:
            self._buffer = bytearray()
        return True, may_repeat


class _ObjectWithRepeatedKey(dict[str, Any]):
    key = ""


class _Constant(str):
    """NaN, Infinity or -Infinity."""

    __slots__ = ()


def find_repeated_key(text: str | bytes) -> str | None:
    """Return a sentence about the first key that an object in a well-formed text has twice; None if no key repeats."""
    repeated = ((path, node.key) for path, node in _walk_nodes(text) if isinstance(node, _ObjectWithRepeatedKey))
    return next((f"the object at `{path}` has the key {key!r} twice; valid: once" for path, key in repeated), None)


def find_not_a_number(text: str | bytes) -> str | None:
    """Return a sentence about the first NaN or infinity in an otherwise well-formed text; None without one."""
    valid = "valid: a finite number, or null if unknown"
    constants = ((path, node) for path, node in _walk_nodes(text) if isinstance(node, _Constant))
    return next((f"`{path}` is {node}, which JSON does not have; {valid}" for path, node in constants), None)


def _walk_nodes(text: str | bytes) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every node in a text, in order; nothing if the standard library cannot read it."""

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            unique = repeated = _ObjectWithRepeatedKey(unique)
            keys = [key for key, _ in pairs]
            repeated.key = next(key for index, key in enumerate(keys) if key in keys[:index])
        return unique

    try:
        root = json.loads(text, object_pairs_hook=build_object, parse_constant=_Constant)
    except (ValueError, RecursionError):
        return
    stack = [("$", root)]
    while stack:
        path, node = stack.pop()
        yield path, node
        if isinstance(node, dict):
            stack += [(f"{path}.{key}", inner) for key, inner in reversed(node.items())]
        elif isinstance(node, list):
            stack += [(f"{path}[{index}]", inner) for index, inner in reversed(list(enumerate(node)))]


# ---------------------------------------------------------------- the exact scanner

CHUNK = 1 << 16
"""Bytes of the scanner's first read; later reads are as long as the text that it keeps."""
VALUE_LIMIT = 64 << 20
"""Characters of a value; decoding and storing one takes about ten times as much memory."""
_LONGEST_LITERAL = 16
_UNTERMINATED = "Unterminated string"
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)
"""A complete string, a bracket, or the quote of a string without an end."""
_CUT_LITERAL = re.compile(r"(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|-|\.|[eE][+-]?|\\?u[0-9a-fA-F]{0,3})?\Z")
"""Text that may stand between an error and the end of a document that was cut."""


class TooLongError(ValueError):
    """A text, a list or an object longer than `VALUE_LIMIT`; the scanner stays in front of it."""


class Scanner:
    """Text on growing bytes. `take` returns at most as many bytes as requested, and none at the end of the file."""

    def __init__(self, take: Callable[[int], bytes], chunk: int = CHUNK) -> None:
        self._take = take
        self._chunk = chunk
        self._bytes_to_text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._has_ended = False
        self._text = ""
        self._position = 0
        self._passed_bytes = 0
        self._decode = json.JSONDecoder().raw_decode

    @property
    def consumed(self) -> int:
        """Bytes before the position."""
        return self._passed_bytes + len(self._text[: self._position].encode("utf-8", "surrogateescape"))

    def peek(self) -> str:
        """Return the next character that is not white space; an empty text at the end of the file."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in " \t\r\n":
                    return self._text[self._position]
                self._position += 1
            if self._passed_bytes > VALUE_LIMIT:
                raise json.JSONDecodeError("there is too much white space", self._text, self._position)
            if not self._grow():
                return ""

    def expect(self, char: str) -> None:
        """Step over a character; an empty `char` expects the end of the file."""
        if (peeked := self.peek()) != char:
            message = f"expected {repr(char) if char else 'the end'}, found {peeked or 'the end'!r}"
            raise json.JSONDecodeError(message, self._text, self._position)
        self._position += len(char)

    def read_element(self) -> tuple[Any, str, str | None]:
        """Read the next value, its text (undecodable bytes as lone surrogates), and why a well-formed one is refused.

        The value of a refused one is null: it is nested too deeply, or a number in it has too many digits.
        Raises TooLongError: the value is longer than `VALUE_LIMIT`.
        """
        self.peek()
        problem = None
        while True:
            try:
                decoded_value, end = self._decode(self._text, self._position)
            except json.JSONDecodeError as error:
                # It may come from the window's end, not from the document.
                at_end = error.pos >= len(self._text) - _LONGEST_LITERAL or error.msg.startswith(_UNTERMINATED)
                if at_end and self._grow_within_limit():
                    continue
                raise
            except (RecursionError, ValueError) as error:
                if self.peek() not in "[{":
                    raise json.JSONDecodeError(str(error), self._text, self._position) from error
                decoded_value, end, problem = None, self._find_closing_bracket(), str(error)
                break
            if end > len(self._text) - _LONGEST_LITERAL and self._grow_within_limit():
                continue  # a number at the edge of the window may be longer: `1`, then `.` or `e+`, then digits
            self._check_length(end)
            break
        text, self._position = self._text[self._position : end], end
        return decoded_value, text, problem

    def is_cut_by_end(self, error: json.JSONDecodeError) -> bool:
        """Return whether the document only fails to parse because it ends here."""
        ahead = error.pos - self._position
        while len(self._text) - self._position - ahead < _LONGEST_LITERAL and self._grow():
            pass
        return error.msg.startswith(_UNTERMINATED) or _CUT_LITERAL.match(self._text, self._position + ahead) is not None

    def read_rest(self) -> str:
        """Return the text from the position on, shortened for a person to look at."""
        while len(self._text) - self._position <= records.RAW_LIMIT and self._grow():
            pass
        return excerpt(self._text[self._position :])

    def _find_closing_bracket(self) -> int:
        """Return the end of the list or object at the position, by its brackets alone."""
        while True:
            depth = 0
            for token in _BRACKET.finditer(self._text, self._position):
                depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
                if token[0] == '"':
                    break  # a string that the window cuts
                if depth == 0:
                    return token.end()
            if not self._grow_within_limit():
                raise json.JSONDecodeError("expected the end of a value", self._text, len(self._text))

    def _check_length(self, end: int) -> None:
        """Raise an error if a value that reaches to `end` is too long."""
        if end - self._position <= VALUE_LIMIT:
            return
        size = f"longer than {VALUE_LIMIT >> 20} MB"
        if self._text[self._position] not in '"[{':
            raise json.JSONDecodeError(f"a number is {size}", self._text, self._position)
        raise TooLongError(f"it is {size}; keep images and other payloads in files and write their paths")

    def _grow_within_limit(self) -> bool:
        self._check_length(len(self._text))
        return self._grow()

    def _grow(self) -> bool:
        """Drop the text before the position and at least double the remaining text; False at the end of the file."""
        remaining = self._text[self._position :]
        added = ""
        while not added and not self._has_ended:
            piece = self._take(max(self._chunk, len(remaining)))
            self._has_ended = not piece
            added = self._bytes_to_text(piece, self._has_ended)
        if added:
            self._passed_bytes = self.consumed
            self._text, self._position = remaining + added, 0
        return bool(added)


# ---------------------------------------------------------------- arrays and members

_CHUNK = 1 << 21
"""Bytes of a window; it grows for an element that does not fit."""
_WIDEST = 16
"""Windows without a boundary before the scanner has to find where the element ends."""
_MOST_DOUBLINGS = 6
"""Doublings of the number of elements that are scanned before the next search for a boundary."""
_GAP = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*(?=[^ \t\r\n])")
_FIRST_KEY = re.compile(rb'\{[ \t\r\n]*"[^"\\]*"|.', re.DOTALL)
_LAST_BRACKETS = re.compile(rb"[ \t\r\n]*[}\]]\Z")
_MARK = re.compile(rb'["\[\]{}]')
_SPACE = b" \t\r\n"
_RAW_OF_LONG = 64 << 10
_ELEMENTS = msgspec.json.Decoder(list)
_TEXTS = msgspec.json.Decoder(list[msgspec.Raw])


class _ElementBatch:
    """An array of neighbouring elements; their texts are separated on first use."""

    def __init__(self, array: bytes) -> None:
        self._array = array

    @cached_property
    def texts(self) -> list[msgspec.Raw]:
        return _TEXTS.decode(self._array)


class Element(msgspec.Struct):
    """One element: its index from 0 and its value."""

    index: int
    value: Any
    problem: str | None = None
    """The reason why a well-formed element is refused: it is nested too deeply, a number in it has too many digits, or
    an object has a key twice."""
    is_plain: bool = False
    """Whether the value can be stored as JSON: it is UTF-8 throughout and not nested deeply."""
    source: str | bytes | tuple[_ElementBatch, int] | None = ""
    """Source of its text; None if its file is not text, so that its value is encoded as JSON."""

    @property
    def raw(self) -> str:
        """The text, at most 16 MB of it, with undecodable bytes escaped."""
        if self.source is None:
            return excerpt(to_json_text(self.value))
        if isinstance(self.source, bytes):
            return excerpt(self.source.decode("utf-8", errors="backslashreplace").rstrip("\n"))
        if isinstance(self.source, str):
            return excerpt(self.source)
        batch, index = self.source
        return excerpt(bytes(batch.texts[index]).decode())


def to_json_text(python_value: Any) -> str:
    """Return a value as JSON; text that is not valid UTF-8 is escaped."""
    try:
        return msgspec.json.encode(python_value).decode()
    except (UnicodeEncodeError, OverflowError, TypeError):
        return json.dumps(python_value, default=str)
    except RecursionError:
        return "(it is nested too deeply to be shown)"


class ObjectMember(msgspec.Struct):
    """One member of an object that is not read element by element."""

    key: str
    value: Any


def _reject(index: int, message: str, raw: str, *, at_end: bool) -> Reject:
    """Return the reject of the unread text; `at_end` says whether the document ends too early."""
    return Reject(position=index, reason="truncated" if at_end else "malformed", message=message, raw=raw)


def read_array(path: Path, meter: Meter | None = None) -> Iterator[Element | Reject]:
    """Read the elements of a JSON array; a damaged document ends with a reject."""
    with Source(path) as file:
        yield from _ArrayReader(_ByteWindow(file), meter or Meter()).read()


def read_members(path: Path, names: Collection[str], meter: Meter) -> Iterator[ObjectMember | Element | Reject]:
    """Read the members of a JSON object in order, and the elements of the arrays in `names`, each array from index 0.

    A damaged document ends with a reject. An array with another name is one value and must fit into memory.
    """
    with Source(path) as file:
        window = _ByteWindow(file)
        is_first = True
        while True:
            scanner = Scanner(window.make_take(), min(CHUNK, _CHUNK))
            try:
                if is_first:
                    scanner.expect("{")
                if scanner.peek() == "}":
                    scanner.expect("}")
                    scanner.expect("")
                    meter.done = window.passed_bytes + window.position + scanner.consumed
                    if file.fault:
                        yield _reject(0, file.fault, "", at_end=file.is_cut)
                    return
                if not is_first:
                    scanner.expect(",")
                is_first = False
                key, _, _ = scanner.read_element()
                scanner.expect(":")
                is_array = key in names and scanner.peek() == "["
                member_value = None if is_array else scanner.read_element()[0]
            except json.JSONDecodeError as error:
                at_end = file.is_cut if file.fault else scanner.is_cut_by_end(error)
                message = file.fault or f"the document does not parse: {error.msg}"
                yield _reject(0, message, scanner.read_rest(), at_end=at_end)
                return
            except TooLongError as error:
                raw, has_end = window.skip(scanner.consumed)
                message = f"a member of the document is left out: {error}"
                yield _reject(0, message if has_end else file.fault or message, raw, at_end=not has_end)
                if has_end:
                    continue
                return
            window.position += scanner.consumed
            if is_array:
                reader = _ArrayReader(window, meter, is_inside=True)
                yield from reader.read()
                if reader.is_damaged:
                    return
            elif isinstance(key, str):
                yield ObjectMember(key, member_value)
            meter.done = window.passed_bytes + window.position


class _ByteWindow:
    def __init__(self, file: Source) -> None:
        self.file = file
        head = file.read(3)
        self.content = head.removeprefix(b"\xef\xbb\xbf")
        self.position = 0
        self.passed_bytes = len(head) - len(self.content)
        """Bytes of the file before the window."""

    def grow(self) -> bool:
        """Drop the bytes before the position and at least double the rest; False at the end of the file."""
        added = self.file.read(max(_CHUNK, len(self.content) - self.position))
        if added:
            self.passed_bytes += self.position
            self.content = b"".join((memoryview(self.content)[self.position :], added))
            self.position = 0
        return bool(added)

    def skip(self, start: int) -> tuple[str, bool]:
        """Step over the text, list or object that starts `start` bytes behind the position, without keeping it.

        Returns the text at its start, and whether it has an end.
        """
        self.position += start
        raw = self.content[self.position : self.position + _RAW_OF_LONG].decode("utf-8", errors="backslashreplace")
        depth = 0
        while True:
            mark = _MARK.search(self.content, self.position)
            if mark is None:
                self.position = len(self.content)
                if not self.grow():
                    return raw, False
                continue
            self.position = mark.end()
            if mark[0] != b'"':
                depth += 1 if mark[0] in b"[{" else -1
            elif not self._skip_string():
                return raw, False
            if depth == 0:
                return raw, True

    def _skip_string(self) -> bool:
        """Step behind the closing quote of a string; False if it has no end."""
        while True:
            quote = self.content.find(b'"', self.position)
            piece = self.content[self.position : quote if quote >= 0 else None]
            is_escaped = (len(piece) - len(piece.rstrip(b"\\"))) % 2
            if quote < 0:
                self.position = len(self.content) - is_escaped
                if not self.grow():
                    return False
                continue
            self.position = quote + 1
            if not is_escaped:
                return True

    def make_take(self) -> Callable[[int], bytes]:
        """Return a function that returns the bytes from the position on piece by piece; the position stays."""
        offset = 0

        def take(size: int) -> bytes:
            nonlocal offset
            if len(self.content) - self.position == offset and not self.grow():
                return b""
            start = self.position + offset
            piece = self.content[start : start + size]
            offset += len(piece)
            return piece

        return take


class _ArrayReader:
    """The state between elements: the window's position is behind the last element that was read."""

    def __init__(self, window: _ByteWindow, meter: Meter, *, is_inside: bool = False) -> None:
        self._window = window
        self._is_inside = is_inside
        """Whether the array is only a part of the document."""
        self.is_damaged = False
        self._meter = meter
        self._rewriter = Rewriter()
        self._index = 0
        self._is_open = False
        self._is_closed = False
        self._boundary = b""
        """The bytes between two elements, from the last brackets of one to the first key of the other."""
        self._bracket_bytes = 0
        self._careful_until = 0
        """Bytes of the file up to which elements are decoded one by one."""
        self._misses = 0
        """Consecutive searches for a boundary without success."""
        self._pause = 0
        """Elements to scan before the next search, twice as many after every miss."""

    def read(self) -> Iterator[Element | Reject]:
        """Read the elements, then a reject if the array is damaged."""
        while not self._is_closed:
            elements: list[Element | Reject] = []
            if self._pause:  # a search may read through the window, so it is not repeated after every failure
                self._pause -= 1
            else:
                elements = self._decode_batch()
                self._misses = 0 if elements else min(self._misses + 1, _MOST_DOUBLINGS)
                self._pause = 2**self._misses - 2 if self._misses else 0
            elements = elements or self._scan_next()
            self._meter.done = self._window.passed_bytes + self._window.position
            yield from elements

    def _decode_batch(self) -> list[Element | Reject]:
        """Decode the elements of a part of the window; empty if it does not decode."""
        start = self._find_start()
        end = None if start is None else self._find_end(start)
        if start is None or end is None:
            return []
        window = self._window
        array = b"".join((b"[", memoryview(window.content)[window.position + start : window.position + end], b"]"))
        try:
            decoded_values = _ELEMENTS.decode(array)
        except _NOT_DECODED:
            decoded_values = []
        is_plain, may_repeat = self._rewriter.compare(array, decoded_values)
        stop = window.passed_bytes + window.position + end
        is_careful = stop <= self._careful_until
        if not decoded_values or not ((is_plain and not may_repeat) or is_careful):
            self._careful_until = max(self._careful_until, stop)
            return [] if is_careful else self._decode_batch()
        window.position += end
        first, batch = self._index, _ElementBatch(array)
        self._index += len(decoded_values)
        texts = batch.texts if may_repeat else [None] * len(decoded_values)
        problems = [None if text is None else find_repeated_key(bytes(text)) for text in texts]
        return [
            Element(first + offset, decoded_value, problem, is_plain, (batch, offset))
            for offset, (decoded_value, problem) in enumerate(zip(decoded_values, problems, strict=True))
        ]

    def _find_start(self) -> int | None:
        """Return where the next element starts, relative to the position; None if the boundary does not match."""
        if not self._boundary:
            return None
        window = self._window
        while not (gap := _GAP.match(window.content, window.position)):
            if len(window.content) - window.position > len(self._boundary) or not window.grow():
                return None
        return gap.end() - window.position

    def _find_end(self, start: int) -> int | None:
        """Return where a sequence of complete elements may end, relative to the position."""
        window = self._window
        while True:
            first = window.position + start
            is_careful = window.passed_bytes + first < self._careful_until
            search = window.content.find if is_careful else window.content.rfind
            boundary = search(self._boundary, first)
            if boundary >= 0:
                return boundary + self._bracket_bytes - window.position
            if len(window.content) - window.position > _WIDEST * _CHUNK:
                return None
            if not window.grow():
                break
        stripped = window.content.rstrip(_SPACE)
        return len(stripped[:-1].rstrip(_SPACE)) - window.position if stripped.endswith(b"]") else None

    def _scan_next(self) -> list[Element | Reject]:
        """Read one element with the exact scanner, or the end of the document, or its damage."""
        window, index = self._window, self._index
        scanner = Scanner(window.make_take(), min(CHUNK, _CHUNK))
        try:
            if not self._is_open:
                scanner.expect("[")
            if scanner.peek() == "]":
                scanner.expect("]")
                self._is_closed = True
                if self._is_inside:
                    window.position += scanner.consumed
                    return []
                scanner.expect("")
                window.position += scanner.consumed
                fault = window.file.fault
                return [_reject(index, fault, "", at_end=window.file.is_cut)] if fault else []
            if index:
                scanner.expect(",")
            decoded_value, text, problem = scanner.read_element()
        except json.JSONDecodeError as error:
            self._is_closed = self.is_damaged = True
            where = f"after element {index - 1}" if index else "from its start"
            at_end, fault = scanner.is_cut_by_end(error), window.file.fault
            message = fault or f"the document does not parse {where}: {error.msg}"
            return [_reject(index, message, scanner.read_rest(), at_end=window.file.is_cut if fault else at_end)]
        except TooLongError as error:
            raw, has_end = window.skip(scanner.consumed)
            if not has_end:
                self._is_closed = self.is_damaged = True
                fault = window.file.fault
                return [_reject(index, fault or f"{error}; it has no end", raw, at_end=window.file.is_cut or not fault)]
            element = Element(index, None, str(error), source=raw)
        else:
            window.position += scanner.consumed
            element = Element(index, decoded_value, problem or find_repeated_key(text), source=text)
        self._is_open = True
        self._index += 1
        self._learn_boundary()
        return [element]

    def _learn_boundary(self) -> None:
        """Use the bytes around the position, the end of an element, as the boundary of all elements."""
        window = self._window
        before = _LAST_BRACKETS.search(window.content, max(0, window.position - 64), window.position)
        gap = _GAP.match(window.content, window.position)
        key = gap and _FIRST_KEY.match(window.content, gap.end())
        if before and gap and key:
            self._boundary = before[0] + gap[0] + key[0]
            self._bracket_bytes = len(before[0])
