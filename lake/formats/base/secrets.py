"""Keys and passwords, which no table, spool or log keeps: the one rule for all that comes in.

`Secrets.without_keys` takes a value as it came and returns it without keys. A key is told in three ways:

1. By its value, wherever it stands: what the same request brought in a place that authenticates. `Secrets` takes these
   values in: headers, parameters of the query, fields of a body.
2. By its spelling, wherever it stands (`secret_shapes.SHAPES`).
3. By the name before it (`api_key`, `Authorization`), in settings, errors and addresses. What people and models say is
   not judged by names: a game may ask for a password, and a tool may take one.

`NO_REQUEST.without_keys` is the rule for what no request brought: files, spans of this process, errors.
"""

import base64
import binascii
import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from lake.formats.base.secret_shapes import (
    ENVIRONMENTS,
    HEADERS,
    QUOTED,
    REDACTED,
    SHAPES,
    SIGNS,
    has_key,
    is_header_known,
    is_header_of_key,
    is_name_of_key,
    is_quoting,
    is_speech,
    looks_like_key,
)

__all__ = [
    "BY_NAME",
    "NO_REQUEST",
    "REDACTED",
    "TEXT_FIELDS",
    "TOKENS_SPELL_KEY",
    "KeylessRecords",
    "Secrets",
    "has_signs",
    "is_secret",
    "redacted",
    "without_keys",
    "without_secrets",
]
_SPEECH, _SETTINGS, _QUOTED, _MARKED = 0, 1, 2, 3
"""Kinds of places: what was said; settings, whose names count; errors, addresses and commands, whose texts quote both;
JSON in such a text, in which a mark stands where a key was."""
_QUERIES = re.compile(r"auth|key|token|secret|passw|credential|sig(?:nature)?$|code$|jwt|session", re.IGNORECASE)
_FLAG = re.compile(r"--?[\w-]*(?:api-?key|token|secret|passw(?:or)?d|credentials?|auth)", re.IGNORECASE)
_IDS = ("token_ids", "prompt_token_ids", "response_token_ids", "prompt_ids", "action_ids", "logprobs")
"""Fields that spell a text once more."""
_BEGINNING = 12
"""Characters of a key that are looked for: texts are cut, and keys in them."""
_SHORTEST = 8
_TAIL = r"[^\s\"'\\<>,;&]*"
_LONG = 6000
"""Characters from which on the engine of Polars is faster, which takes 0.1 ms to begin."""
_DEEPEST = 200
_GONE: Any = object()
TOKENS_SPELL_KEY = "they spell a key, or extend tokens that do"
"""Why a step whose text lost a key has no tokens: `extra.tokens_left_out`."""
TEXT_FIELDS = ("state", "context", "reasoning", "action", "tool_calls")
"""Fields of a step that its tokens spell."""


class Secrets:
    """The rule for one request; see above.

    Args:
        headers: of the request, and those that a proxy adds.
        query: of its address.
        looks_for_shapes: not where `has_signs` has found none already.
    """

    def __init__(
        self, headers: Iterable[tuple[str, str]] = (), query: str = "", *, looks_for_shapes: bool = True
    ) -> None:
        self._looks_for_shapes = looks_for_shapes
        self._values: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self._beginnings: tuple[str, ...] = ()
        for name, value in headers:
            if is_header_of_key(name, value):
                self.add(value)
        self._add_query(query)

    def without_keys(self, value: Any, field: str = "") -> Any:
        """A value of JSON without keys; the same object if there are none.

        Args:
            value: a text, or anything that JSON can hold.
            field: where it stands: the name of a column or of a field.
        """
        result = self._value(value, _kind(field, _SETTINGS), 0)
        return None if result is _GONE else result

    def fields_without_keys(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request's body without the fields that hold keys, whose values are taken in; texts stay as they are."""
        return {
            key: clean
            for key, original in body.items()
            if (clean := self._field_of_request(key, original, 0)) is not _GONE
        }

    def stand_in(self, text: str) -> bool:
        """Whether a text holds a key."""
        return self._text(text, _SPEECH) != text

    def clean_error(self, text: str) -> str:
        """The text of an error or an address without keys."""
        return self._text(text, _QUOTED)

    def may_stand_in(self, text: str) -> bool:
        """Whether JSON may hold a key by its value or its spelling: a quick look before it is taken apart."""
        return self._is_known_in(text) or has_signs(text)

    # ------------------------------------------------------------ what the request brought

    def add(self, value: str) -> None:
        """Take in a header's value or the like, with its parts: `Bearer KEY`, `a=KEY; b=KEY`, `Basic BASE64`."""
        for part in re.split(r"[\s;,]+", value):
            for piece in (part, part.partition("=")[2].strip('"')):
                is_mixed = any(map(str.isdigit, piece)) and any(map(str.isalpha, piece))
                if len(piece) >= _BEGINNING or (len(piece) >= _SHORTEST and is_mixed):
                    self._values.add(piece)
                    self._pattern = None
        if value.lower().startswith("basic "):
            try:
                inner_text = base64.b64decode(value[6:].strip(), validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return
            self.add(inner_text.partition(":")[2])

    def _add_query(self, query: str) -> None:
        for name, value in parse_qsl(query, errors="replace"):
            if _QUERIES.search(name):
                self.add(value)

    def _add_all(self, value: Any) -> None:
        """Take in every text of a field that holds keys."""
        for text in _texts(value):
            self.add(text)

    def _field_of_request(self, key: str, value: Any, depth: int) -> Any:
        """A field of a request, without the fields in it that hold keys."""
        if is_speech(key) or depth > _DEEPEST:
            return value
        if has_key(key, value, is_request=True):
            self._add_all(value)
            return _GONE
        if isinstance(value, dict):
            return self._object_of_request(key, value, depth)
        if isinstance(value, list):
            return self._items_of_request(key, value, depth)
        is_address = isinstance(value, str) and key.endswith(("url", "uri", "endpoint"))
        return self._address(value) if is_address else value

    def _address(self, url: str) -> str:
        """An address without the keys in it, which are taken in."""
        with suppress(ValueError):
            parts = urlsplit(url)
            self._add_query(parts.query)
            self.add(unquote(parts.password or ""))
        return self._text(url, _QUOTED)

    def _object_of_request(self, key: str, value: dict[str, Any], depth: int) -> Any:
        if isinstance(value.get("properties"), dict):
            return value  # a schema, whose names are of parameters
        if HEADERS.search(key) or ENVIRONMENTS.match(key):
            clean = {name: item for name, item in value.items() if _is_harmless(key, name, item)}
            self._add_all([item for name, item in value.items() if name not in clean])
            return clean or _GONE
        fields = ((name, self._field_of_request(name, original, depth + 1)) for name, original in value.items())
        return {name: item for name, item in fields if item is not _GONE}

    def _items_of_request(self, key: str, items: list[Any], depth: int) -> Any:
        clean = []
        for item in items:
            name, value = _name_and_value(item, key)
            if name is not None and (
                _is_secret_header(name, value) if HEADERS.search(key) else _is_secret_field(name, value)
            ):
                self._add_all(value)
            elif (clean_item := self._field_of_request("", item, depth + 1)) is not _GONE:
                clean.append(clean_item)
        return clean if clean or not items else _GONE

    # ------------------------------------------------------------ values without keys

    def _value(self, value: Any, kind: int, depth: int) -> Any:
        if isinstance(value, str):
            return self._text(value, kind)
        if depth > _DEEPEST or (kind == _SPEECH and not self._looks_for_shapes and not self._values):
            return value
        if isinstance(value, dict):
            return self._object(value, kind, depth + 1)
        if isinstance(value, list):
            return self._list(value, kind, depth + 1)
        return self._struct(value, kind, depth + 1) if isinstance(value, msgspec.Struct) else value

    def _struct(self, value: msgspec.Struct, kind: int, depth: int) -> Any:
        clean = {}
        for field in value.__struct_fields__:
            original = getattr(value, field)
            if isinstance(original, str | dict | list | msgspec.Struct) and original:
                clean_item = self._value(original, _kind(field, kind), depth)
                if clean_item is not original and clean_item != original:
                    clean[field] = None if clean_item is _GONE else clean_item
        return msgspec.structs.replace(value, **clean) if clean else value

    def _object(self, value: dict[str, Any], kind: int, depth: int) -> Any:
        if kind != _SPEECH and (isinstance(value.get("properties"), dict) or isinstance(value.get("role"), str)):
            kind = _SPEECH  # a schema, whose names are of parameters; a message
        entry_name, item = _name_and_value(value, "") if kind != _SPEECH else (None, None)
        if entry_name is not None and _is_secret_field(entry_name, item):
            return value | {"value": REDACTED} if kind == _MARKED else _GONE
        result: dict[str, Any] = {}
        has_changed = False
        for key, original in value.items():
            if kind != _SPEECH and _is_secret_field(key, original):
                has_changed = True
                if kind == _MARKED:
                    result[key] = REDACTED
                continue
            inner = _kind(entry_name if entry_name is not None and key == "value" else key, kind)
            if kind != _SPEECH and isinstance(original, dict) and (HEADERS.search(key) or ENVIRONMENTS.match(key)):
                clean: Any = {name: entry for name, entry in original.items() if _is_harmless(key, name, entry)}
                clean = self._value(original if len(clean) == len(original) else clean, inner, depth)
                clean = _GONE if original and not clean else clean
            elif kind != _SPEECH and isinstance(original, list) and HEADERS.search(key):
                clean = self._value(
                    [entry for entry in original if not _is_secret_header(*_name_and_value(entry, key))], inner, depth
                )
                clean = original if clean == original else clean
            else:
                clean = self._value(original, inner, depth)
            has_changed |= clean is not original and (clean is _GONE or clean != original)
            if clean is not _GONE:
                result[self._text(key, _SPEECH)] = clean
        if not has_changed and result.keys() == value.keys():
            return value
        for name in _IDS:
            if isinstance(result.get(name), list | dict):
                result[name] = None
        return result

    def _list(self, items: list[Any], kind: int, depth: int) -> Any:
        result = []
        is_after_flag = False
        for item in items:
            text = _text_of(item)
            if is_after_flag and text is not None:
                clean: Any = REDACTED if isinstance(item, str) else item | {"stringValue": REDACTED}
            else:
                clean = self._value(item, kind, depth)
            is_after_flag = kind >= _QUOTED and text is not None and _FLAG.fullmatch(text) is not None
            if clean is not _GONE:
                result.append(clean)
        is_same = len(result) == len(items) and all(map(_is_same, result, items))
        return items if is_same else result

    def _text(self, text: str, kind: int) -> str:
        if self._is_known_in(text):
            assert self._pattern is not None
            text = self._pattern.sub(REDACTED, text)
        if kind >= _QUOTED:
            if text[:1] in ("{", "[") and (inner := _decoded(text)) is not None:
                clean = self._value(inner, _MARKED, 0)
                return text if clean is inner else json.dumps(None if clean is _GONE else clean, ensure_ascii=False)
            for pattern, replacement in QUOTED:
                text = pattern.sub(replacement, text)
        if self._looks_for_shapes:
            for sign, pattern, replacement in SHAPES:
                if sign in text:
                    text = pattern.sub(replacement, text)
        return text

    def _is_known_in(self, text: str) -> bool:
        if self._pattern is None and self._values:
            self._compile()
        return any(beginning in text for beginning in self._beginnings)

    def _compile(self) -> None:
        """Find the keys as they are written, also in JSON inside a text, in base64 and in an address."""
        escaped = {json.dumps(value)[1:-1] for value in self._values}
        spelled = self._values | escaped | {value.replace("/", r"\/") for value in escaped}
        spelled |= {quote(value, safe="", errors="replace") for value in self._values}
        spelled |= {base64.b64encode(value.encode("utf-8", "surrogateescape")).decode() for value in self._values}
        longest = sorted(spelled, key=len, reverse=True)
        result = [re.escape(value) for value in longest]
        result += [re.escape(value[:_BEGINNING]) + _TAIL for value in longest if len(value) > _BEGINNING]
        self._pattern = re.compile("|".join(result))
        self._beginnings = tuple({value[:_BEGINNING] for value in spelled})


NO_REQUEST = Secrets()
"""The rule for what no request brought."""
BY_NAME = Secrets(looks_for_shapes=False)
"""The same for what holds no key by its spelling."""


class KeylessRecords(logging.Filter):
    """Takes the keys out of what is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, without keys."""
        message = record.getMessage()
        if (clean := redacted(message)) != message:
            record.msg, record.args = clean, ()
        if record.exc_info:
            record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
        return True


def without_secrets(settings: Any) -> Any:
    """Settings without keys and passwords, at any depth."""
    return without_keys(settings)


def redacted(text: str) -> str:
    """The text of an error, an address or a command without the keys and passwords that can be told as such."""
    return NO_REQUEST.clean_error(text)


def is_secret(key: str) -> bool:
    """Whether a key or a password stands under a name; of `http.request.header.authorization` the last part counts."""
    return is_name_of_key(key) or _is_secret_field(key, "")


def without_keys(value: Any, field: str = "") -> Any:
    """A value of JSON that no request brought without keys; the same object if there are none."""
    return NO_REQUEST.without_keys(value, field)


def has_signs(text: str) -> bool:
    """Whether a text holds a key by its spelling."""
    if len(text) > _LONG:
        import polars as pl

        texts = pl.Series([text])
        if not any(texts.str.contains(sign)[0] for sign in SIGNS):
            return False
    return any(sign in text and pattern.search(text) is not None for sign, pattern, _ in SHAPES)


def _kind(field: str, kind: int) -> int:
    """The kind of a field's place, inside a place of some kind."""
    if kind == _SPEECH or is_speech(field):
        return _SPEECH
    return max(kind, _QUOTED) if kind >= _QUOTED or is_quoting(field) else _SETTINGS


def _is_secret_field(name: str, value: Any) -> bool:
    """Whether a field is left out for its name."""
    before, is_header, header = name.lower().rpartition("header.")
    if is_header and before.endswith((".", "")):
        texts = list(_texts(value))
        return is_header_of_key(header.replace("_", "-"), texts[0] if texts else "")
    texts_of = (
        value if isinstance(value, str) else value.get("stringValue", value) if isinstance(value, dict) else value
    )
    return has_key(name, texts_of)


def _is_secret_header(name: str | None, value: Any) -> bool:
    return name is not None and not is_header_known(name) and any(_texts(value))


def _is_harmless(field: str, name: str, value: Any) -> bool:
    """Whether a header, or a variable of an environment, may stay."""
    if not any(_texts(value)):
        return True
    if HEADERS.search(field):
        return is_header_known(name)
    return not name.isupper() or not (
        is_header_of_key(name.replace("_", "-")) or any(map(looks_like_key, _texts(value)))
    )


def _name_and_value(item: Any, field: str) -> tuple[str | None, Any]:
    """Name and value of what is a pair of both: {name, value}, {key, value}, and in lists of headers [name, value]."""
    if isinstance(item, dict) and "value" in item:
        name = item.get("key", item.get("name"))
        return (name, item["value"]) if isinstance(name, str) else (None, None)
    if HEADERS.search(field):
        if isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str):
            return item[0], item[1]
        if isinstance(item, str) and (parts := item.partition(":"))[1] and re.fullmatch(r"[\w-]+", parts[0]):
            return parts[0], parts[2].strip()
    return None, None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def _text_of(item: Any) -> str | None:
    """An item of a list as text, also as OTLP writes it."""
    if isinstance(item, dict):
        item = item.get("stringValue")
    return item if isinstance(item, str) else None


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str) and one == other)


def _decoded(text: str) -> Any:
    try:
        result = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return result if isinstance(result, dict | list) else None
