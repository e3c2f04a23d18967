r"""Mathematics in a model's text: TeX between `$`, `$$`, `\(` or `\[`, as MathML of elements and attributes known here.

TeX of a model is foreign, and so is what a library makes of it: what leaves this file is a tree of the names listed
below and of texts, from which the page makes elements. A formula that is too long or too deep, or has something in it
that is not known, stays as it was written.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from html import unescape
from typing import Any

from viewer import plain

LONGEST, DEEPEST, MOST = 600, 24, 200
"""Characters and levels of a formula, and formulas of a text, at most."""
Tree = list[Any]
"""A tag, its attributes, and its children: trees and texts."""

# Dollars as pandoc reads them: no space inside, no digit behind, so that $5 and $6 are money. Code is passed over.
_PLACES = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})[\s\S]*?(?:^ {0,3}(?P=fence)|\Z)|(?P<ticks>`+)[^`](?:[\s\S]*?[^`])?(?P=ticks)(?!`)"
    r"|\$\$(?P<block>(?:[^$\\]|\\.)+?)\$\$|\\\[(?P<square>[\s\S]+?)\\\]|\\\((?P<round>[\s\S]+?)\\\)"
    r"|(?<![\\$])\$(?![\s$])(?P<inline>(?:[^$\\]|\\[\s\S])+)(?<!\s)\$(?![\d$])",
    re.MULTILINE,
)
_TAGS = frozenset(
    (
        *("math", "mrow", "mi", "mo", "mn", "ms", "mtext", "mspace", "mfrac", "msqrt", "mroot", "mstyle", "mpadded"),
        *("msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "none"),
        *("mtable", "mtr", "mtd", "mphantom", "menclose"),
    )
)
_WORDS = re.compile("[a-z][a-z -]{0,39}")
_LENGTHS = re.compile(r"-?\d{0,2}(?:\.\d{1,4})?(?:em|ex|pt|mu)?(?: \d{0,2}(?:\.\d{1,3})?(?:em|ex|pt)?){0,9}")
_NAMED = (
    *("mathvariant", "stretchy", "fence", "form", "displaystyle", "columnalign", "accent", "accentunder", "separator"),
    *("movablelimits", "symmetric", "notation", "largeop"),
)
_MEASURED = ("rowspacing", "columnspacing", "linethickness", "width", "minsize", "maxsize", "lspace", "rspace")
_ATTRIBUTES = dict.fromkeys(_NAMED, _WORDS) | dict.fromkeys(_MEASURED, _LENGTHS)


def formulas(text: str) -> dict[str, Tree]:
    """The formulas of a text that can be drawn, by how they are written there, delimiters included."""
    if "$" not in text and "\\(" not in text and "\\[" not in text:
        return {}
    found: dict[str, Tree] = {}
    for written, tex, is_block in _places(text):
        tree = _drawn(tex, is_block)
        if tree is not None:
            found[written] = tree
        if len(found) >= MOST:
            break
    return found


def _places(text: str) -> Iterator[tuple[str, str, bool]]:
    """What stands where, delimiters included; the TeX in it; and whether it has a line of its own."""
    for place in _PLACES.finditer(text):
        tex = next((place[name] for name in ("block", "square", "round", "inline") if place[name]), None)
        if tex and len(tex) <= LONGEST and "\n\n" not in tex:
            yield place[0], tex, bool(place["block"] or place["square"])


@lru_cache(maxsize=2000)
def _drawn(tex: str, is_block: bool) -> Tree | None:
    """A formula as a tree; None if it cannot be drawn, or has something in it that is not known here."""
    # Only a reader of mathematics waits for it.
    from latex2mathml.converter import convert_to_element

    try:
        return _known(convert_to_element(tex, display="block" if is_block else "inline"), DEEPEST)
    except Exception:  # whatever a library makes of a hostile formula: the text is there to be shown
        return None


def _known(element: Any, depth: int) -> Tree:
    """The tree of an element. Raises ValueError: it is too deep, or has a name or a command that is not known."""
    said = plain.visible(unescape(element.text or ""))
    if depth == 0 or element.tag not in _TAGS or (said.startswith("\\") and len(said) > 1):
        raise ValueError
    attributes = {
        name: value
        for name, value in element.attrib.items()
        if name in _ATTRIBUTES and _ATTRIBUTES[name].fullmatch(value)
    }
    if element.tag == "math" and element.attrib.get("display") == "block":
        attributes["display"] = "block"
    children = [_known(child, depth - 1) for child in element]
    return [element.tag, attributes, [said, *children] if said else children]
