"""The exact scanner of JSON on bytes that grow: the standard library's decoder, which says where a value ends."""

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from lake import records
from lake.records import excerpt

CHUNK = 1 << 16
"""Bytes asked for at first; then as many as are kept."""
VALUE_LIMIT = 64 << 20
"""Characters of a value; decoding and storing one takes about ten times as much memory."""
_LONGEST_LITERAL = 16
_UNTERMINATED = "Unterminated string"
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)
"""A whole string, a bracket, or the quote of a string without an end."""
_MARK = re.compile(rb'["\[\]{}]')
_BEGUN = re.compile(r"(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|-|\.|[eE][+-]?|\\?u[0-9a-fA-F]{0,3})?\Z")
"""What may stand between the place of an error and the end of a document that was cut."""


class Bytes(Protocol):
    """Bytes of a document, those before the position may be dropped."""

    data: bytes
    position: int

    def grow(self) -> bool:
        """Drop what is before the position, and add what follows; False at the end."""
        ...


class TooLongError(ValueError):
    """A text, a list or an object that is longer than `VALUE_LIMIT`; nothing of it was stepped over."""


class Scanner:
    """Text on bytes that grows when an element needs more; `take` gives at most what it is asked, none at the end."""

    def __init__(self, take: Callable[[int], bytes], chunk: int = CHUNK) -> None:
        self._take = take
        self._chunk = chunk
        self._bytes_to_text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._ended = False
        self._text = ""
        self._position = 0
        self._passed = 0
        self._decode = json.JSONDecoder().raw_decode

    @property
    def consumed(self) -> int:
        """Bytes stepped over so far."""
        return self._passed + _size(self._text[: self._position])

    def peek(self) -> str:
        """The next character that is not white space, or nothing at the end of the file."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in " \t\r\n":
                    return self._text[self._position]
                self._position += 1
            if self._passed > VALUE_LIMIT:
                raise json.JSONDecodeError("there is too much white space", self._text, self._position)
            if not self._more():
                return ""

    def expect(self, char: str) -> None:
        """Step over a character; the empty one stands for the end of the file."""
        found = self.peek()
        if found != char:
            wanted = repr(char) if char else "the end"
            raise json.JSONDecodeError(f"expected {wanted}, found {found or 'the end'!r}", self._text, self._position)
        self._position += len(char)

    def element(self) -> tuple[Any, str, str | None]:
        """The next value, its text (undecodable bytes as lone surrogates), and why it is refused if well-formed.

        Such a one is nested too deeply, or holds a number of too many digits; it has no value. Raises TooLongError.
        """
        self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._position)
            except json.JSONDecodeError as error:
                # It may come from the window's end, not from the document.
                at_end = error.pos >= len(self._text) - _LONGEST_LITERAL or error.msg.startswith(_UNTERMINATED)
                if at_end and self._grown():
                    continue
                raise
            except (RecursionError, ValueError) as error:
                if self.peek() not in "[{":
                    raise json.JSONDecodeError(str(error), self._text, self._position) from error
                return None, self._skip(), str(error)
            if end > len(self._text) - _LONGEST_LITERAL and self._grown():
                continue  # a number at the edge of the window may go on: `1`, then `.` or `e+`, then digits
            self._limit(end)
            return value, self._step_to(end), None

    def unfinished(self, error: json.JSONDecodeError) -> bool:
        """Whether a document that ends here would parse up to here, had it gone on."""
        ahead = error.pos - self._position
        while len(self._text) - self._position - ahead < _LONGEST_LITERAL and self._more():
            pass
        return error.msg.startswith(_UNTERMINATED) or _BEGUN.match(self._text, self._position + ahead) is not None

    def rest(self) -> str:
        """Everything from the position on, for a person to look at."""
        while len(self._text) - self._position <= records.RAW_LIMIT and self._more():
            pass
        return excerpt(self._text[self._position :])

    def _skip(self) -> str:
        """Step over a list or an object by its brackets alone, and return its text."""
        while True:
            depth = 0
            for token in _BRACKET.finditer(self._text, self._position):
                depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
                if token[0] == '"':
                    break  # a string that the window cuts
                if depth == 0:
                    return self._step_to(token.end())
            if not self._grown():
                raise json.JSONDecodeError("expected the end of a value", self._text, len(self._text))

    def _step_to(self, end: int) -> str:
        text = self._text[self._position : end]
        self._position = end
        return text

    def _limit(self, end: int) -> None:
        """Raise what there is to say of a value that goes on up to here."""
        if end - self._position <= VALUE_LIMIT:
            return
        size = f"longer than {VALUE_LIMIT >> 20} MB"
        if self._text[self._position] not in '"[{':
            raise json.JSONDecodeError(f"a number is {size}", self._text, self._position)
        raise TooLongError(f"it is {size}; keep images and other payloads in files and write their paths")

    def _grown(self) -> bool:
        """Grow the window of a value that does not end in it; False at the end of the file."""
        self._limit(len(self._text))
        return self._more()

    def _more(self) -> bool:
        """Grow the window, at least doubling what is kept; False at the end of the file."""
        kept = self._text[self._position :]
        added = ""
        while not added and not self._ended:
            data = self._take(max(self._chunk, len(kept)))
            self._ended = not data
            added = self._bytes_to_text(data, self._ended)
        if added:
            self._passed += _size(self._text[: self._position])
            self._text, self._position = kept + added, 0
        return bool(added)


def _size(text: str) -> int:
    """Bytes that a text was read from."""
    return len(text.encode("utf-8", "surrogateescape"))


def skip_value(window: Bytes) -> bool:
    """Step over a text, list or object by its brackets and quotes alone, keeping nothing; False if it has no end."""
    depth = 0
    while True:
        mark = _MARK.search(window.data, window.position)
        if mark is None:
            window.position = len(window.data)
            if not window.grow():
                return False
            continue
        window.position = mark.end()
        if mark[0] != b'"':
            depth += 1 if mark[0] in b"[{" else -1
        elif not _skip_text(window):
            return False
        if depth == 0:
            return True


def _skip_text(window: Bytes) -> bool:
    """Step over the rest of a text, its quote included; False if it has none."""
    while True:
        quote = window.data.find(b'"', window.position)
        piece = window.data[window.position : quote if quote >= 0 else None]
        is_escaped = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        if quote < 0:
            window.position = len(window.data) - is_escaped
            if not window.grow():
                return False
            continue
        window.position = quote + 1
        if not is_escaped:
            return True
