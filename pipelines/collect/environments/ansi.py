"""Drawings for terminals as plain text.

Where the player stands is often said by a colour alone (gymnasium's FrozenLake and Taxi), so escape sequences cannot
just be dropped: what is highlighted is put in brackets, and coloured letters are listed below by colour.
"""

import re

_ESCAPE = re.compile(r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
"""Of ECMA-48: a control sequence with its parameters and its final letter, a title, or one of the short ones."""
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def plain(drawing: str) -> str:
    """The text without escape sequences: `\\x1b[41mS\\x1b[0mF` is `[S]F`. Blank lines around it are left out."""
    drawn: list[str] = []
    coloured: dict[str, list[str]] = {}
    codes: set[int] = set()
    is_open = False
    at = 0
    for escape in (*_ESCAPE.finditer(drawing), None):
        for letter in drawing[at : escape.start() if escape else None]:
            is_marked = any(40 <= code <= 47 or 100 <= code <= 107 for code in codes)
            drawn.append(("[" if is_marked and not is_open else "]" if is_open and not is_marked else "") + letter)
            is_open = is_marked
            for code in codes:
                if 30 <= code <= 37 and letter.strip():
                    coloured.setdefault(_COLOURS[code - 30], []).append(letter)
        if escape is None:
            break
        at = escape.end()
        if escape[2] == "m":
            codes = _after(codes, escape[1])
    text = "".join(drawn) + ("]" if is_open else "")
    legend = "; ".join(f"{colour}: {''.join(coloured[colour])}" for colour in _COLOURS if colour in coloured)
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return "\n".join([*lines, *([legend] if legend else [])])


def _after(codes: set[int], sequence: str) -> set[int]:
    """The graphic codes in force after one more sequence.

    0, which an empty one means, ends all; 39 and 49 end the colours of letters and of what is behind them.
    """
    for text in re.split("[;:]", sequence):
        code = int(text) if text.isdigit() else 0
        ended = {0: range(108), 39: range(30, 38), 49: range(40, 108)}.get(code, range(0))
        codes = (codes | {code}) - set(ended)
    return codes
