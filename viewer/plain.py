"""Make text that a model, an environment or a user wrote harmless for a page.

Streamlit reads Markdown in headings, labels, captions and badges, and Markdown can load images, link anywhere and style
the page. So foreign text goes to `st.code` and `st.text`, which read no markup, or through `chip`, which makes it a
code span. Control characters (ANSI escapes, bidirectional overrides) are shown as text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Self

CHIP = 60
"""Characters of a name in a heading, label or badge."""

MAX_ELEMENTS = 5000
"""Elements of a stored JSON list that is parsed."""

_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]")


def visible(text: str) -> str:
    r"""Return the text with control and direction characters as `\x1b` or `\u202e`; line breaks and tabs stay."""
    return _INVISIBLE.sub(lambda match: ascii(match.group())[1:-1], text.replace("\r\n", "\n"))


def one_line(text: str, limit: int = CHIP) -> str:
    """Return the text in one line of at most `limit` characters."""
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def chip(text: Any, limit: int = CHIP) -> str:
    """Return a Markdown code span that shows the value literally."""
    flat = one_line(str(text), limit) or " "
    fence = "`" * (max((len(run) for run in re.findall("`+", flat)), default=0) + 1)
    pad = " " if flat.startswith("`") or flat.endswith("`") or not flat.strip() else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def word(text: str) -> str:
    """Return a name unchanged if it is a plain word, else as a `chip`."""
    return text if text.isascii() and text.isidentifier() else chip(text)


def slug(text: str) -> str:
    """Return a name reduced to letters, digits, spaces, `-` and `_`, for badges, which take no code span."""
    return re.sub(r"[^A-Za-z0-9 _-]", "?", text)[:CHIP] or "?"


def grade(outcome: float) -> str:
    """Return the class of an outcome's colour: good from 1, bad up to 0, middling between."""
    return "good" if outcome >= 1 else "bad" if outcome <= 0 else "middling"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number; None, which means unknown, as a dash. The sign below 0 is U+2212, as on the whole page."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, int):
        text = f"{value:,}"
    elif value != 0 and abs(value) < 10**-digits:
        text = f"{value:.2g}"
    else:
        text = f"{value:,.{digits}f}".rstrip("0").rstrip(".")
    return text.replace("-", "\N{MINUS SIGN}")


def format_aligned(value: float, digits: int = 3) -> str:
    """Format a number for a table column: with a fixed number of decimals, unless that would hide it."""
    if isinstance(value, int) or 0 < abs(value) < 10**-digits:
        return number(value, digits)
    return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def name_rollout(index: int | None) -> str | None:
    """Return the number of a rollout; 8 hexadecimal digits for a hash, where the source only names its rollouts."""
    return None if index is None else str(index) if index < 1_000_000 else f"{index:08x}"


def signed(value: float | None, digits: int = 3) -> str:
    """Format a number with its sign; 0 without one; None, which means unknown, as a dash."""
    if value is None:
        return number(None)
    if value == 0:
        return "0"
    sign = "+" if value > 0 else "\N{MINUS SIGN}"
    return sign + (f"{abs(value):.{digits}f}" if abs(value) >= 10**-digits else number(abs(value), digits))


def seconds(value: float) -> str:
    """Format a duration: `0.21 s`, `45.3 s`, `12 min 5 s`, `3 h 20 min`."""
    if value < 60:
        return f"{number(value, 1 if value >= 1 else 3)} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def percent(value: float | None) -> str:
    """Format a share as a percentage; None, which means unknown, as a dash."""
    return number(None) if value is None else f"{100 * value:.0f} %".replace("-", "\N{MINUS SIGN}")


class CutText(str):
    """A text that may be cut; no stored JSON can spell its `length`, the characters of the full text."""

    length: int

    def __new__(cls, text: str, length: int) -> Self:
        """Make the text."""
        cut = super().__new__(cls, text)
        cut.length = length
        return cut


def parse_list(document: str | None, length: int) -> list[Any] | None:
    """Return the elements of a stored JSON list; None if the text is cut, long or no list.

    Args:
        document: the text, which may be cut; None is an empty list.
        length: characters of the full text.
    """
    if document is None:
        return []
    if length > len(document):
        return None
    try:
        document_ = json.loads(document)
    except (ValueError, RecursionError):
        return None
    return document_ if isinstance(document_, list) and len(document_) <= MAX_ELEMENTS else None


def parse_messages(document: str | None, length: int) -> list[Any]:
    """Return stored chat messages; a single message with the text if it cannot be parsed."""
    messages = parse_list(document, length)
    return [{"role": "messages", "content": CutText(document or "", length)}] if messages is None else messages


def get_role(message: Any) -> str:
    """Return the role of a chat message, `message` if it has none."""
    role = message.get("role") if isinstance(message, Mapping) else None
    return str(role or "message")


def get_text(message: Any) -> str:
    """Return the text of a message of any shape."""
    value = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, indent=1)


def parse_call(tool_call: Any) -> tuple[str, str]:
    """Return the name of a tool call, and its arguments as JSON with line breaks."""
    function = tool_call.get("function", tool_call) if isinstance(tool_call, Mapping) else {}
    if not isinstance(function, Mapping):
        function = {}
    return str(function.get("name", "?")), format_json(function.get("arguments", tool_call))


def describe_calls(document: str, limit: int) -> str:
    """Return stored tool calls in one line as `name(arguments)`; the text itself if it is cut or no JSON."""
    try:
        calls: Any = json.loads(document)
    except (ValueError, RecursionError):
        return one_line(document, limit)
    parsed = [parse_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return one_line("; ".join(f"{name}({arguments})" for name, arguments in parsed), limit)


def format_json(value: Any) -> str:
    """Format a value as JSON with line breaks; a text that is not JSON is returned unchanged."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return str(value)
    return json.dumps(value, ensure_ascii=False, indent=2)
