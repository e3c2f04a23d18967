"""The keys that a call brings along, and its record without them.

Headers and queries are not recorded. But a body may hold keys too (of the servers that a vendor is to reach for its
client), and whoever answers may repeat a key: in the text of an error, in an answer. So what is known to be a key is
looked for in all that is recorded of its call.

A key is what stands in a header, a field or a parameter of a query whose name says so. A word of them that is short, or
that stands in every text, is none: `Bearer`, `EMPTY`.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from lake.formats.base.secrets import REDACTED, redacted
from lake.live.calls.steps import Call

_HEADERS = re.compile(r"auth|cookie|key|token|secret|passw|credential|signature", re.IGNORECASE)
_QUERIES = re.compile(r"auth|key|token|secret|passw|credential|sig(?:nature)?$|code$", re.IGNORECASE)
_FIELDS = re.compile(
    r"(?:api[-_]?key|authorization|secret|secret[-_]?key|access[-_]?key(?:[-_]?id)?|passw(?:or)?d|credentials?|^token"
    r"|(?:access|ad|auth|authorization|bearer|hf|id|refresh|security|session)[-_]token)$",
    re.IGNORECASE,
)
_HEADERS_IN_BODIES = frozenset(("headers", "extra_headers", "default_headers"))
_NOT_LOOKED_INTO = frozenset(
    ("messages", "input", "prompt", "system", "instructions", "parameters", "input_schema", "schema", "json_schema")
)
"""What people and models say, and schemas, whose names are of parameters."""
_BEGINNING = 12
"""Characters by which a key is found: texts are cut, and keys in them."""
_SHORTEST = 8
_TAIL = r"[^\s\"'\\<>,;&]*"


class Secrets:
    """The keys of one call.

    Args:
        headers: of its request, and those that the proxy adds.
        query: of its address.
    """

    def __init__(self, headers: Iterable[tuple[str, str]], query: str = "") -> None:
        self._values: set[str] = set()
        for name, value in headers:
            if _HEADERS.search(name):
                self._add(value)
        self._add_query(query)

    def taken_from(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request's body without the keys in it, which are looked for from now on."""
        return {key: value for key, given in body.items() if (value := self._kept(key, given)) is not None}

    def stand_in(self, text: str) -> bool:
        """Whether a text holds one of them."""
        return any(value[:_BEGINNING] in text for value in self._spelled())

    def hidden_in(self, text: str) -> str:
        """A text without them, and without what looks like a key."""
        pattern = self._pattern()
        return redacted(text if pattern is None else pattern.sub(REDACTED, text))

    def hidden(self, call: Call) -> Call:
        """A call without them; without its tokens too if they were in what it says, as these spell them."""
        if not self._values:
            return call
        packed = msgspec.msgpack.encode(call)
        if not any(value[:_BEGINNING].encode(errors="surrogateescape") in packed for value in self._spelled()):
            return call
        pattern = self._pattern()
        assert pattern is not None
        clean = msgspec.convert(_replaced(msgspec.msgpack.decode(packed), pattern), Call)
        clean.address = call.address
        clean.extra = clean.extra | {"keys_redacted": True}
        if clean.answer is not None:
            clean.answer.prompt_ids, clean.answer.action_ids, clean.answer.logprobs = [], [], None
        return clean

    def _add(self, value: str) -> None:
        """Take in a header's value or the like, with its parts: `Bearer KEY`, `a=KEY; b=KEY`, `Basic BASE64`."""
        for part in re.split(r"[\s;,]+", value):
            for piece in (part, part.partition("=")[2].strip('"')):
                is_mixed = any(map(str.isdigit, piece)) and any(map(str.isalpha, piece))
                if len(piece) >= _BEGINNING or (len(piece) >= _SHORTEST and is_mixed):
                    self._values.add(piece)
        if value.lower().startswith("basic "):
            try:
                said = base64.b64decode(value[6:].strip(), validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return
            self._add(said.partition(":")[2])

    def _add_query(self, query: str) -> None:
        for name, value in parse_qsl(query, errors="replace"):
            if _QUERIES.search(name):
                self._add(value)

    def _address(self, url: str) -> str:
        """An address without the keys in it, which are taken in."""
        with suppress(ValueError):
            parts = urlsplit(url)
            self._add_query(parts.query)
            self._add(unquote(parts.password or ""))
        return redacted(url)

    def _kept(self, key: str, value: Any) -> Any:
        """A field of a request, without the keys in it; None if it is one."""
        if key in _NOT_LOOKED_INTO:
            return value
        is_key = _FIELDS.search(key) is not None or key in _HEADERS_IN_BODIES
        if is_key and isinstance(value, str | dict):
            for text in [value] if isinstance(value, str) else value.values():
                if isinstance(text, str):
                    self._add(text)
            return None
        if isinstance(value, dict):
            return self.taken_from(value)
        if isinstance(value, list):
            return [self._kept("", item) for item in value]
        return self._address(value) if isinstance(value, str) and key.endswith("url") else value

    def _spelled(self) -> set[str]:
        """The keys as they are written, also in JSON inside a text and in an address."""
        escaped = {json.dumps(value)[1:-1] for value in self._values}
        slashes = {value.replace("/", r"\/") for value in escaped}
        return self._values | escaped | slashes | {quote(value, safe="", errors="replace") for value in self._values}

    def _pattern(self) -> re.Pattern[str] | None:
        spelled = sorted(self._spelled(), key=len, reverse=True)
        found = [re.escape(value) for value in spelled]
        found += [re.escape(value[:_BEGINNING]) + _TAIL for value in spelled if len(value) > _BEGINNING]
        return re.compile("|".join(found)) if found else None


def _replaced(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(REDACTED, value)
    if isinstance(value, dict):
        return {_replaced(key, pattern): _replaced(item, pattern) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, pattern) for item in value]
    return value
