"""Texts as readers see them, the words in them, and what a search asks of them.

A JSON document is read as its contents: keys that only say how messages are built, roles and types are left out, names
and arguments of tool calls are not. A word is a run of letters, digits and underscores, in lower case.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from lake.errors import UsageError

LONGEST = 256
"""Characters of a word that are kept: longer ones are data, not language."""
_WORD = r"\w+"
_ESCAPES = r"\\+[nrt]"
"""Line breaks inside arguments, which are JSON in a string."""
_TERM = re.compile(r'"([^"]+)"?|([^\s"]+)')
_STRUCTURE = frozenset({"role", "type", "id", "tool_call_id", "index", "object"})
"""Keys whose values nobody searches for."""
_WRAPPERS = frozenset(
    {"content", "text", "parts", "function", "tool_calls", "name", "arguments", "reasoning", "reasoning_content"}
    | {"thinking", "refusal", "input", "output"}
)
"""Keys that belong to a message, not to what it says."""


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that a step must hold, whatever the case.

    Args:
        text: in lower case, white space as single blanks.
        words: the words in it, in order.
    """

    text: str
    words: tuple[str, ...]

    @property
    def is_word(self) -> bool:
        """Whether it is one word and nothing else: the index then knows the answer without looking at texts."""
        return self.words == (self.text,)

    def needles(self) -> list[bytes]:
        """What to look for among words that each stand between line breaks: one text for each of its words.

        At its ends the term may go on, as the search is for a part of a text; a single letter stands for itself, for
        it is a part of nearly everything.
        """
        if len(self.text) == 1 and self.text.isascii():
            return [f"\n{self.text}\n".encode()]
        last = len(self.words) - 1
        found = []
        for place, word in enumerate(self.words):
            begins = "" if place == 0 and self.text.startswith(word) else "\n"
            ends = "" if place == last and self.text.endswith(word) else "\n"
            found.append(f"{begins}{word}{ends}".encode())
        return found


def terms(query: str) -> tuple[Term, ...]:
    """What a query asks for: words or parts of words, all in one step; a text in quotes as it stands.

    Raises:
        UsageError: there is no letter and no digit in it.
    """
    texts = [" ".join((quoted or plain).split()) for quoted, plain in _TERM.findall(query)]
    lower = pl.Series(texts, dtype=pl.String).str.to_lowercase()
    found = [Term(text, tuple(inside)) for text, inside in zip(lower, in_texts(lower).to_list(), strict=True) if inside]
    if not found:
        raise UsageError(f"a search needs a letter or a digit; {query!r} has none")
    return tuple(dict.fromkeys(found))


def in_texts(texts: pl.Series) -> pl.Series:
    """The words of each text, in order: list[str]."""
    return texts.str.to_lowercase().str.extract_all(_WORD).list.eval(pl.element().str.slice(0, LONGEST))


def flat(texts: pl.Series) -> pl.Series:
    """Texts in lower case, white space as single blanks: what a term in quotes is compared with."""
    return texts.str.to_lowercase().str.replace_all(r"\s+", " ")


def readable(texts: pl.Series) -> pl.Series:
    """Texts without the escapes of JSON inside them."""
    return texts.str.replace_all(_ESCAPES, " ")


def document(text: str | None) -> str | None:
    """What a stored JSON document says; None if that is nothing. What is no JSON is taken as it is."""
    if not text or text in ("[]", "{}", "null"):
        return None
    try:
        return "\n".join(_said(msgspec.json.decode(text))) or None
    except (msgspec.DecodeError, RecursionError):
        return text


def _said(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if not value.startswith("data:"):  # an image's bytes
            yield value
    elif isinstance(value, list):
        for one in value:
            yield from _said(one)
    elif isinstance(value, Mapping):
        # A call's name before its arguments, as people say it.
        for key, one in sorted(value.items(), key=lambda item: item[0] != "name"):
            if key in _STRUCTURE:
                continue
            if key not in _WRAPPERS:
                yield str(key)
            yield from _said(one)
    elif value is not None:
        yield str(value)
