"""Rows for a terminal: a table where it fits, else a line per value.

Ids and numbers are never cut: an id is there to be pasted, and a number that is cut is another number. What is cut is
text, the widest column first. What a model wrote must not steer the terminal, so no control character gets there.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WIDEST = 500
"""Characters of a text in a table that no terminal limits: a pipe takes what there is, within reason."""
_NARROWEST = 8
"""Characters to which a text may be cut to make a table fit."""
_GAP = "  "
_CUT = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as plain Python values."""

    names: list[str]
    values: list[tuple[Any, ...]]
    numbers: list[bool]
    """Columns of numbers."""


def table(
    names: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[bool], whole: Sequence[bool], width: int | None
) -> list[str] | None:
    """Header and rows as lines, no wider than `width`, columns `whole` uncut; None if they do not fit."""
    texts = [[cell(name) for name in names], *([cell(value) for value in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*texts, strict=True)]
    widths = [most if whole[place] else min(most, width or WIDEST) for place, most in enumerate(widths)]
    room = None if width is None else width - len(_GAP) * (len(names) - 1)
    while room is not None and sum(widths) > room:
        widest, place = max((0 if whole[place] else most, place) for place, most in enumerate(widths))
        if widest <= _NARROWEST:
            return None
        widths[place] -= 1
    return [_GAP.join(map(_fitted, row, widths, right)).rstrip() for row in texts]


def lines(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Every value in full on a line of its own, an empty line between rows."""
    longest = max(map(_width, map(cell, names)), default=0)
    for number, row in enumerate(rows):
        if number:
            yield ""
        for name, value in zip(names, row, strict=True):
            yield f"{_fitted(cell(name), longest, right=True)} = {cell(value)}"


def counted(number: int, noun: str) -> str:
    """A number of things in words: `1 episode`, `2 episodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cell(value: Any) -> str:
    """A value as text on one line; unknown is a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = " ".join(str(value).split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _fitted(text: str, width: int, right: bool) -> str:
    """A text cut or padded to a width."""
    takes = _width(text)
    if takes > width:
        text, takes = _cut(text, width - 1)
        text, takes = text + _CUT, takes + 1
    padding = " " * (width - takes)
    return padding + text if right else text + padding


def _cut(text: str, room: int) -> tuple[str, int]:
    """The longest beginning of a text that takes no more than so many cells, and the cells that it takes."""
    if text.isascii():
        return text[:room], min(len(text), room)
    taken = 0
    for place, char in enumerate(text):
        if taken + (cells := _cells(char)) > room:
            return text[:place], taken
        taken += cells
    return text, taken


def _width(text: str) -> int:
    """Cells of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(map(_cells, text))


def _cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
