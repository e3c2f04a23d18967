"""The texts of an opened step: what was said to the agent, its reasoning, its action, its calls with their results.

A result is stored with the step after the call, whose state it is; it is shown with the call. Every text is foreign: it
is cut at first, its control characters are made visible (colours of a terminal aside), and `form` says how it may be
read.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from viewer import plain
from viewer.queries import Row
from viewer.queries.episodes import TEXT
from viewer.transcript import maths

Form = Literal["text", "markdown", "json", "ansi"]
TREE = 20_000
"""Characters of JSON that are shown as a tree at most."""
DEEPEST = 40
"""Levels of such a tree at most."""
LONG_OUTPUT = 700
"""Longer output of tools is folded."""
IMAGE = 4_000_000
"""Characters of an image's data URI at most."""
IMAGES = 8
"""Images of a message at most."""

_EXACT = 2**53
_COLOUR = re.compile("\x1b\\[[0-9;]{0,40}m")
_IMAGE = re.compile("data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\\s]+")
_RESULT_ROLES = ("tool", "function")


@dataclass(frozen=True, slots=True)
class Block:
    """A text of a step."""

    name: str
    """Of the block in its step: `state`, `call/0`."""
    kind: Literal["message", "state", "reasoning", "action", "call", "result"]
    label: str
    text: str
    length: int
    """Characters of the whole text."""
    form: Form = "text"
    is_folded: bool = False
    images: tuple[str, ...] = ()
    """Data URIs."""

    def sent(self, limit: int = TEXT) -> dict[str, Any]:
        """What the page gets: the text cut after `limit` characters, harmless."""
        # A tree needs the whole document.
        text = self.text[: max(limit, TREE) if self.form == "json" else limit]
        value = tree(text) if self.form == "json" else None
        said = harmless(text)
        drawn = maths.formulas(said) if self.form == "markdown" and limit == TEXT else {}
        return asdict(self) | {"text": said, "value": value, "shown": len(text), "maths": drawn}


def harmless(text: str) -> str:
    """The text with control characters visible; a terminal's colours stay as they are."""
    pieces = _COLOUR.split(text.replace("\r\n", "\n"))
    return "".join(
        plain.visible(piece) + colour for piece, colour in zip(pieces, [*_COLOUR.findall(text), ""], strict=True)
    )


def form_of(text: str, *, prose: bool = False) -> Form:
    """How a whole text may be read."""
    if _COLOUR.search(text):
        return "ansi"
    if tree(text) is not None:
        return "json"
    return "markdown" if prose else "text"


def tree(text: str) -> Any:
    """A JSON object or list with harmless texts, as a browser can hold it; None if the text is none, long or deep."""
    if text[:1] not in ("{", "[") or len(text) > TREE:
        return None
    try:
        return _harmless_tree(json.loads(text, parse_constant=str), DEEPEST)
    except (ValueError, RecursionError):
        return None


def _harmless_tree(value: Any, depth: int) -> Any:
    if depth == 0:
        raise ValueError
    if isinstance(value, str):
        return plain.visible(value)
    if isinstance(value, list):
        return [_harmless_tree(one, depth - 1) for one in value]
    if isinstance(value, dict):
        return {plain.visible(name): _harmless_tree(one, depth - 1) for name, one in value.items()}
    is_exact = not isinstance(value, int) or abs(value) <= _EXACT
    return value if is_exact else str(value)


def of_step(row: Row, following: Sequence[Any]) -> list[Block]:
    """The blocks of a step.

    Args:
        row: a row of `transcripts.steps`.
        following: the messages between this decision and the next, or after the last; results of calls are among them.
    """
    found = [*_context(row), _of_column(row, "state", "state", _state_label(row))]
    if row["state_role"] in _RESULT_ROLES and row["state_length"] > LONG_OUTPUT:
        found[-1] = replace(found[-1], is_folded=True)
    if row["reasoning"]:
        found.append(_of_column(row, "reasoning", "reasoning", "reasoning", prose=True))
    if row["action"] or not row["tool_calls"]:
        found.append(_of_column(row, "action", "action", "action", prose=True))
    return found + list(_calls(row, following))


def of_messages(messages: Sequence[Any], name: str) -> list[Block]:
    """The blocks of chat messages outside the steps; system prompts are folded."""
    return [_message(message, f"{name}/{position}") for position, message in enumerate(messages)]


def following(row: Row | None) -> list[Any]:
    """The messages that a step begins with, its state among them."""
    if row is None:
        return []
    found = plain.listed(row["context"], row["context_length"]) or []
    is_there = any(plain.role(message) in _RESULT_ROLES for message in found)
    if row["state_role"] in _RESULT_ROLES and not is_there:
        found = [*found, {"role": row["state_role"], "content": row["state"] or "", "length": row["state_length"]}]
    return found


def _of_column(
    row: Row, column: str, kind: Literal["state", "reasoning", "action"], label: str, *, prose: bool = False
) -> Block:
    text, length = row[column] or "", row[f"{column}_length"]
    form = form_of(text, prose=prose) if length == len(text) else "markdown" if prose else "text"
    return Block(column, kind, label, text, length, form)


def _state_label(row: Row) -> str:
    return "state" + (f" ({plain.one_line(row['state_role'])})" if row["state_role"] else "")


def _context(row: Row) -> Iterator[Block]:
    """Messages since the last decision that are not the state itself."""
    found = plain.listed(row["context"], row["context_length"])
    if found is None:
        yield Block("context", "message", "messages since the last step", row["context"], row["context_length"])
        return
    state = _squeezed(row["state"] or "")
    for position, message in enumerate(found):
        text = plain.content(message)
        # The state at hand may be cut: the first half of what is shown decides whether a message is part of it.
        if _squeezed(text[:TEXT])[: TEXT // 2] not in state or images(message):
            block = _message(message, f"context/{position}")
            yield replace(block, is_folded=True) if plain.role(message) in _RESULT_ROLES else block


def _calls(row: Row, following: Sequence[Any]) -> Iterator[Block]:
    """Tool calls, each with its result: the one of its id, else the one at its place."""
    calls = plain.listed(row["tool_calls"], row["tool_calls_length"])
    if calls is None:
        yield Block("tool_calls", "call", "tool calls", row["tool_calls"], row["tool_calls_length"])
        return
    results = [message for message in following if plain.role(message) in _RESULT_ROLES]
    named = {_text(message, "tool_call_id"): message for message in results if _text(message, "tool_call_id")}
    unnamed = [message for message in results if not _text(message, "tool_call_id")]
    for position, call in enumerate(calls):
        name, arguments = plain.call(call)
        yield Block(f"call/{position}", "call", plain.one_line(name), arguments, len(arguments), form_of(arguments))
        result = named.get(_text(call, "id")) or (unnamed[position] if position < len(unnamed) else None)
        if result is not None:
            block = _message(result, f"result/{position}")
            length = result.get("length", block.length) if isinstance(result, Mapping) else block.length
            yield replace(block, kind="result", label="result", length=length, is_folded=length > LONG_OUTPUT)


def _message(message: Any, name: str) -> Block:
    role, text = plain.one_line(plain.role(message)), content(message)
    form = form_of(text, prose=role not in _RESULT_ROLES)
    return Block(name, "message", role, text, len(text), form, role == "system", tuple(images(message)))


def content(message: Any) -> str:
    """The text of a message; of one in parts, the texts of its parts, and what an image is in place of it."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return plain.content(message)
    return "\n".join(_part(part) for part in parts)


def images(message: Any) -> list[str]:
    """The images of a message, as data URIs of formats that cannot hold a script."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    found = [_address(part) for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    return [address for address in found if len(address) <= IMAGE and _IMAGE.fullmatch(address)][:IMAGES]


def _part(part: Mapping[Any, Any]) -> str:
    if isinstance(text := part.get("text"), str):
        return text
    if address := _address(part):
        kind = address[:80].partition(",")[0] if address.startswith("data:") else plain.one_line(address, 200)
        return f"[image: {kind}, {len(address):,} characters]" if address.startswith("data:") else f"[image: {kind}]"
    return json.dumps(part, ensure_ascii=False, indent=1)


def _address(part: Mapping[Any, Any]) -> str:
    """Where the image of a part is: OpenAI's `image_url`, or Anthropic's `source` as a data URI; empty of others."""
    image, source = part.get("image_url"), part.get("source")
    if isinstance(image, Mapping):
        image = image.get("url")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return image if isinstance(image, str) else ""


def _text(value: Any, name: str) -> str:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, str) else ""


def _squeezed(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())
