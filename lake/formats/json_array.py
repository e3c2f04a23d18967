"""A JSON array of records, read element by element in bounded memory.

Elements that are complete are kept even if the document is damaged further on; what comes from the damage to the end
is handed back as one piece of text. The standard library's scanner is used because it says where an element ends.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from lake.records import printable

_CHUNK = 1 << 20
_RAW_LIMIT = 16 << 20
_LONGEST_LITERAL = 16
_UNTERMINATED = "Unterminated string"
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)
"""A whole string, a bracket, or the quote of a string without an end."""
_BEGUN = re.compile(r"(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|-|\.|[eE][+-]?|\\?u[0-9a-fA-F]{0,3})?\Z")
"""What may stand between the place of an error and the end of a document that was cut."""


class Element(msgspec.Struct):
    """One element: its index from 0, its value, and its text (undecodable bytes escaped)."""

    index: int
    value: Any
    raw: str
    problem: str | None = None
    """Why an element that is well-formed has no value: nested too deeply, or a number of too many digits."""


class Damage(msgspec.Struct):
    """From here on the document does not parse."""

    index: int
    """Index of the first element that could not be read."""
    message: str
    raw: str
    """What was not read, at most 16 MB of it."""
    at_end: bool
    """The document ends too early (as opposed to a fault inside it)."""


def read_array(path: Path) -> Iterator[Element | Damage]:
    """Elements of a JSON array; last, if the document is damaged, the damage."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        source = _Source(file)
        index = 0
        try:
            source.expect("[")
            while source.peek() != "]":
                if index:
                    source.expect(",")
                value, raw, problem = source.element()
                yield Element(index=index, value=value, raw=raw, problem=problem)
                index += 1
            source.expect("]")
            source.expect("")
        except json.JSONDecodeError as error:
            where = f"after element {index - 1}" if index else "from its start"
            message = f"the document does not parse {where}: {error.msg}"
            yield Damage(index=index, message=message, at_end=source.unfinished(error), raw=source.rest())


class _Source:
    """A window on a text file that grows when an element needs more of it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._position = 0
        self._decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next character that is not white space, or nothing at the end of the file."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in " \t\r\n":
                    return self._text[self._position]
                self._position += 1
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
        """The next value, its text, and why it could not be taken although it is well-formed."""
        self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self.cut(error) and self._more():
                    continue
                raise
            except (RecursionError, ValueError) as error:
                if self.peek() not in "[{":
                    raise json.JSONDecodeError(str(error), self._text, self._position) from error
                return None, self._skip(), str(error)
            if end > len(self._text) - _LONGEST_LITERAL and self._more():
                continue  # a number at the edge of the window may go on: `1`, then `.` or `e+`, then digits
            return value, self._step_to(end), None

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
            if not self._more():
                raise json.JSONDecodeError("expected the end of a value", self._text, len(self._text))

    def _step_to(self, end: int) -> str:
        raw = printable(self._text[self._position : end])
        self._position = end
        return raw

    def cut(self, error: json.JSONDecodeError) -> bool:
        """Whether an error may come from the window's end, not from the document."""
        return error.pos >= len(self._text) - _LONGEST_LITERAL or error.msg.startswith(_UNTERMINATED)

    def unfinished(self, error: json.JSONDecodeError) -> bool:
        """Whether a document that ends here would parse up to here, had it gone on."""
        ahead = error.pos - self._position
        while len(self._text) - self._position - ahead < _LONGEST_LITERAL and self._more():
            pass
        return error.msg.startswith(_UNTERMINATED) or _BEGUN.match(self._text, self._position + ahead) is not None

    def rest(self) -> str:
        """Everything from the position on, for a person to look at."""
        text = printable(self._text[self._position :] + self._file.read(_RAW_LIMIT))
        return text if len(text) <= _RAW_LIMIT else text[:_RAW_LIMIT] + " ... [cut at 16 MB]"

    def _more(self) -> bool:
        """Grow the window, at least doubling what is kept; False at the end of the file."""
        kept = self._text[self._position :]
        added = self._file.read(max(_CHUNK, len(kept)))
        if added:
            self._text, self._position = kept + added, 0
        return bool(added)
