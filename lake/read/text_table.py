"""Rows for a terminal: a table if it fits, else one line per value.

Ids and numbers are never cut: a reader pastes an id, and a cut number is another number. Only texts are cut, the widest
column first. Control characters of texts never reach the terminal, so models cannot control it.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WIDEST = 500
"""Largest number of characters of a text in a table without a width limit, such as in a pipe."""
_NARROWEST = 8
"""Smallest number of characters to which a text may be cut."""
_GAP = "  "
_CUT = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as plain Python values."""

    names: list[str]
    values: list[tuple[Any, ...]]
    numbers: list[bool]
    """Whether each column holds numbers."""


def format_table(
    names: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[bool], uncut: Sequence[bool], width: int | None
) -> list[str] | None:
    """Format header and rows as lines of at most `width`, with columns `uncut` in full; None if they do not fit."""
    texts = [[format_cell(name) for name in names], *([format_cell(value) for value in row] for row in rows)]
    widths = [max(map(_measure, column)) for column in zip(*texts, strict=True)]
    widths = [most if uncut[column] else min(most, width or WIDEST) for column, most in enumerate(widths)]
    room = None if width is None else width - len(_GAP) * (len(names) - 1)
    while room is not None and sum(widths) > room:
        widest, column = max((0 if uncut[column] else most, column) for column, most in enumerate(widths))
        if widest <= _NARROWEST:
            return None
        widths[column] -= 1
    return [_GAP.join(map(_fit, row, widths, right)).rstrip() for row in texts]


def format_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield each value in full on its own line, with an empty line between rows."""
    longest = max(map(_measure, map(format_cell, names)), default=0)
    for number, row in enumerate(rows):
        if number:
            yield ""
        for name, value in zip(names, row, strict=True):
            yield f"{_fit(format_cell(name), longest, right=True)} = {format_cell(value)}"


def count_noun(number: int, noun: str) -> str:
    """Format a count with its noun: `1 episode`, `2 episodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_count(number: int, noun: str) -> str:
    """Format a count as `count_noun` does, with thousands separators: `2,000 episodes`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_cell(value: Any) -> str:
    """Format a value as text on one line; unknown is a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = " ".join(str(value).split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _fit(text: str, width: int, right: bool) -> str:
    """Cut or pad a text to a width."""
    cells = _measure(text)
    if cells > width:
        text, cells = _cut_text(text, width - 1)
        text, cells = text + _CUT, cells + 1
    padding = " " * (width - cells)
    return padding + text if right else text + padding


def _cut_text(text: str, room: int) -> tuple[str, int]:
    """Return the longest beginning of a text that takes at most `room` terminal cells, and its cells."""
    if text.isascii():
        return text[:room], min(len(text), room)
    used = 0
    for end, char in enumerate(text):
        if used + (cells := _measure_char(char)) > room:
            return text[:end], used
        used += cells
    return text, used


def _measure(text: str) -> int:
    """Return the number of terminal cells that a text takes."""
    if text.isascii():
        return len(text)
    return sum(map(_measure_char, text))


def _measure_char(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
