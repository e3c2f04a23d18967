"""Text that a model, an environment or a user wrote, made harmless for a page.

Streamlit reads Markdown in headings, labels, captions and badges, and Markdown can load images, link anywhere and style
the page. So foreign text goes to `st.code` and `st.text`, which read nothing, or through `chip`, which makes it a code
span. Control characters (ANSI escapes, bidirectional overrides) are shown, not obeyed.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

CHIP = 60
"""Characters of a name in a heading, label or badge."""

_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]")


def visible(text: str) -> str:
    r"""The text with control and direction characters as `\x1b` or `\u202e`; line breaks and tabs stay."""
    return _INVISIBLE.sub(lambda found: ascii(found.group())[1:-1], text.replace("\r\n", "\n"))


def one_line(text: str, limit: int = CHIP) -> str:
    """The text in one line of at most `limit` characters."""
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def chip(text: Any, limit: int = CHIP) -> str:
    """A Markdown code span that shows the value literally."""
    flat = one_line(str(text), limit) or " "
    fence = "`" * (max((len(run) for run in re.findall("`+", flat)), default=0) + 1)
    pad = " " if flat.startswith("`") or flat.endswith("`") or not flat.strip() else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def word(text: str) -> str:
    """A name that is a plain word as it is, any other as a `chip`."""
    return text if text.isascii() and text.isidentifier() else chip(text)


def slug(text: str) -> str:
    """A name reduced to letters, digits, spaces, `-` and `_`, for badges, which take no code span."""
    return re.sub(r"[^A-Za-z0-9 _-]", "?", text)[:CHIP] or "?"


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; a dash for what is not known."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and abs(value) < 10**-digits:
        return f"{value:.2g}"
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".")


def aligned(value: float, digits: int = 3) -> str:
    """A number as a column of a table has it: always as many digits after the point, unless that would hide it."""
    return number(value, digits) if isinstance(value, int) or 0 < abs(value) < 10**-digits else f"{value:,.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """A number with its sign; 0 has none; a dash for what is not known."""
    if value is None:
        return number(None)
    if value == 0:
        return "0"
    sign = "+" if value > 0 else "\N{MINUS SIGN}"
    return sign + (f"{abs(value):.{digits}f}" if abs(value) >= 10**-digits else f"{abs(value):.2g}")


def seconds(value: float) -> str:
    """A duration for people: `0.21 s`, `45.3 s`, `12 min 5 s`, `3 h 20 min`."""
    if value < 60:
        return f"{number(value, 1 if value >= 1 else 3)} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def percent(value: float | None) -> str:
    """A share as a percentage; a dash for what is not known."""
    return number(None) if value is None else f"{100 * value:.0f} %"


def listed(document: str | None, length: int) -> list[Any] | None:
    """The elements of a stored JSON list.

    Args:
        document: its text, perhaps cut; None is an empty list.

    Returns:
        None if the text is cut, or is no list.
    """
    if document is None:
        return []
    if length > len(document):
        return None
    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def messages(document: str | None, length: int) -> list[Any]:
    """Stored chat messages; a single one that holds the text if it cannot be taken apart."""
    found = listed(document, length)
    return [{"role": "messages", "content": document}] if found is None else found


def role(message: Any) -> str:
    """Who says it."""
    found = message.get("role") if isinstance(message, Mapping) else None
    return str(found or "message")


def content(message: Any) -> str:
    """The text of a message, whatever its shape."""
    value = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, indent=1)


def call(found: Any) -> tuple[str, str]:
    """Name and arguments of a tool call, the arguments with line breaks."""
    function = found.get("function", found) if isinstance(found, Mapping) else {}
    if not isinstance(function, Mapping):
        function = {}
    return str(function.get("name", "?")), pretty(function.get("arguments", found))


def pretty(value: Any) -> str:
    """JSON with line breaks; text that holds JSON is taken apart first, other text stays as it is."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return str(value)
    return json.dumps(value, ensure_ascii=False, indent=2)
