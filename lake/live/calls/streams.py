"""Answers that come as server-sent events, taken apart and put together as they pass by.

`Events` finds the events in whatever pieces a connection brings them; a `Gathering` makes one whole answer of those of
its API. What they hold is bounded by the answer, not by the number of its chunks.
"""

import re
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from lake.formats.base.rows import ShapeError
from lake.formats.chat.chat_completions import Stream
from lake.live.calls.shapes import CHAT, COMPLETIONS, MESSAGES, NO_JSON, RESPONSES

DONE = "[DONE]"
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE = re.compile(rb"\r\n|\n|\r")
_DECODE = msgspec.json.Decoder().decode


class Event(msgspec.Struct, frozen=True):
    """One event of a stream."""

    raw: bytes
    """As it came, the blank line behind it included."""
    data: Any
    """What it says: JSON, `DONE`, or None if it is a comment or no JSON."""

    def with_data(self, data: Any) -> bytes:
        """The event with other data; everything else of it stays."""
        lines = [line for line in _LINE.split(self.raw) if line and not line.startswith(b"data:")]
        return b"\n".join([*lines, b"data: " + msgspec.json.encode(data), b"", b""])


class Events:
    """The events of a stream, from pieces that end anywhere."""

    def __init__(self) -> None:
        self._left = bytearray()
        self._searched = 0

    @property
    def left(self) -> bytes:
        """What came behind the last whole event."""
        return bytes(self._left)

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that a piece ends."""
        self._left += piece
        begin = 0
        while (end := _END.search(self._left, max(begin, self._searched))) is not None:
            raw = bytes(self._left[begin : end.end()])
            begin = self._searched = end.end()
            yield Event(raw, _data(raw))
        del self._left[:begin]
        # An event's end may be cut in two.
        self._searched = max(0, len(self._left) - 3)


def _data(raw: bytes) -> Any:
    lines = [line[5:].removeprefix(b" ") for line in _LINE.split(raw) if line.startswith(b"data:")]
    text = b"\n".join(lines)
    if text == DONE.encode():
        return DONE
    try:
        return _DECODE(text) if text else None
    except NO_JSON:
        return None


class Gathering(Protocol):
    """The whole answer of a stream, so far."""

    is_whole: bool
    """The stream said that it is at its end."""

    def add(self, data: Any) -> None:
        """Take in one event. Raises ShapeError: it is not of the API's form."""

    def answer(self) -> dict[str, Any] | None:
        """As if it had come whole; None if nothing was said."""


def gathering(api: str) -> Gathering:
    """An empty one for an API."""
    kinds: dict[str, type[Gathering]] = {
        CHAT: _Chunks,
        COMPLETIONS: _Chunks,
        RESPONSES: _Responses,
        MESSAGES: _Blocks,
    }
    return kinds[api]()


class _Chunks:
    """Chunks of chat completions and completions."""

    def __init__(self) -> None:
        self._stream, self._has_chunks, self.is_whole = Stream(), False, False

    def add(self, data: Any) -> None:
        if data == DONE:
            self.is_whole = True
        elif isinstance(data, dict):
            _refuse_error(data)
            self._has_chunks = True
            self._stream.add(data)

    def answer(self) -> dict[str, Any] | None:
        return self._stream.response() if self._has_chunks else None


class _Responses:
    """Events of the Responses API: items begun, added to and done; the last event repeats the whole answer."""

    def __init__(self) -> None:
        self._items: dict[int, Any] = {}
        self._pieces: dict[int, list[str]] = {}
        """Of items that are not done."""
        self._about: dict[str, Any] = {}
        self.is_whole = False

    def add(self, data: Any) -> None:
        if not isinstance(data, dict):
            return
        kind, index = str(data.get("type")), data.get("output_index")
        if kind == "error":
            _refuse_error({"error": data})
        if isinstance(index, int):
            if kind in ("response.output_item.added", "response.output_item.done"):
                self._items[index] = data.get("item")
                self._pieces.pop(index, None)
            elif kind in _PIECES and isinstance(piece := data.get("delta"), str):
                self._pieces.setdefault(index, []).append(piece)
        if isinstance(response := data.get("response"), dict):
            self._about = response
        self.is_whole |= kind in ("response.completed", "response.incomplete", "response.failed")

    def answer(self) -> dict[str, Any] | None:
        items = self._about.get("output") or [self._item(index) for index in sorted(self._items)]
        return self._about | {"output": items} if self._about or items else None

    def _item(self, index: int) -> Any:
        """An item, with the pieces that came of it if it is not done."""
        item, text = self._items[index], "".join(self._pieces.get(index, ()))
        if not text or not isinstance(item, dict):
            return item
        if item.get("type") == "message":
            return item | {"content": [{"type": "output_text", "text": text}]}
        is_reasoning = item.get("type") == "reasoning"
        return item | ({"summary": [{"type": "summary_text", "text": text}]} if is_reasoning else {"arguments": text})


_PIECES = frozenset(
    f"response.{kind}.delta"
    for kind in ("output_text", "refusal", "function_call_arguments", "reasoning_text", "reasoning_summary_text")
)
"""Events that add to an item."""


class _Blocks:
    """Events of Anthropic's messages: blocks of content, each begun, added to and ended."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}
        self.is_whole = False

    def add(self, data: Any) -> None:
        if not isinstance(data, dict):
            return
        kind, index = data.get("type"), data.get("index", 0)
        if kind == "error":
            _refuse_error(data)
        elif kind == "message_start" and isinstance(data.get("message"), dict):
            self._message = dict(data["message"])
        elif kind == "content_block_start" and isinstance(data.get("content_block"), dict):
            self._blocks[index] = dict(data["content_block"])
        elif kind == "content_block_delta" and isinstance(delta := data.get("delta"), dict):
            for key in ("text", "partial_json", "thinking", "signature"):
                if isinstance(text := delta.get(key), str):
                    self._pieces.setdefault((index, key), []).append(text)
        elif kind == "message_delta":
            self._message |= data["delta"] if isinstance(data.get("delta"), dict) else {}
            usage = [u for u in (self._message.get("usage"), data.get("usage")) if isinstance(u, dict)]
            self._message["usage"] = {key: value for one in usage for key, value in one.items()}
        self.is_whole |= kind == "message_stop"

    def answer(self) -> dict[str, Any] | None:
        blocks = {index: dict(block) for index, block in self._blocks.items()}
        for (index, key), pieces in self._pieces.items():
            block = blocks.setdefault(index, {"type": "text"})
            if key == "partial_json":
                try:
                    block["input"] = _DECODE("".join(pieces) or "{}")
                except NO_JSON:
                    block["input"] = "".join(pieces)
            else:
                block[key] = str(block.get(key) or "") + "".join(pieces)
        content = [blocks[index] for index in sorted(blocks)]
        return self._message | {"content": content} if self._message or content else None


def says_end(data: Any) -> bool:
    """Whether an event says why an answer, or one choice of it, ended: it is whole but for what is said about it."""
    if not isinstance(data, dict):
        return bool(data == DONE)
    choices = data.get("choices")
    listed = choices if isinstance(choices, list) else []
    is_over = any(isinstance(choice, dict) and choice.get("finish_reason") is not None for choice in listed)
    return is_over or data.get("type") == "message_delta"


def _refuse_error(data: dict[str, Any]) -> None:
    """Raise ShapeError for an event that says that the call failed."""
    if data.get("error") is not None and not data.get("choices"):
        raise ShapeError(f"the stream says: {msgspec.json.encode(data['error']).decode()[:2000]}")
