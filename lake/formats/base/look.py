"""What a file looks like before it is read: what formats recognise themselves by.

Only the beginning is read, and a JSON value that the beginning cuts is taken as far as it goes, so a damaged or huge
file is recognised like a whole one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from lake.errors import FormatError
from lake.formats.base.source import Source

Kind = Literal["lines", "array", "object", "parquet", "zip", "sqlite", "other"]
HEAD_BYTES = 1 << 16
_WIDE_BYTES = 16 << 20
"""Looked at where the first value is longer than the head: what tells it apart may be its last key."""
_MOST_VALUES = 200
_KEY = re.compile(r'"([A-Za-z_][\w.$-]*)"\s*:')
_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (b"PAR1", "parquet"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"SQLite format 3\x00", "sqlite"),
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Look:
    """The beginning of a file."""

    path: Path
    kind: Kind
    """lines, array or object of JSON; a binary kind by its first bytes; anything else is other."""
    text: str = ""
    """Its first 64 KB, undecodable bytes replaced; empty for a binary kind."""
    values: list[Any] = field(default_factory=list)
    """Its first JSON values: of lines, or elements of the array, or the one object. The last may be cut."""

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        """Those of the values that are objects."""
        return [value for value in self.values if isinstance(value, dict)]

    @cached_property
    def _keys(self) -> set[frozenset[str]]:
        """The different sets of keys that they have: few, where there are many lines."""
        return {frozenset(value) for value in self.objects}

    @property
    def first(self) -> dict[str, Any]:
        """The first object; an empty one if there is none."""
        return next(iter(self.objects), {})

    def has(self, *keys: str) -> bool:
        """Whether one of the first objects has all of these keys."""
        return any(present.issuperset(keys) for present in self._keys)

    def says(self, key: str, values: Iterable[str]) -> bool:
        """Whether one of the first objects has one of these texts under a key."""
        return any(value.get(key) in set(values) for value in self.objects if isinstance(value.get(key), str))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Columns of a Parquet file, entries of a zip archive, tables of an SQLite file; none if it is damaged."""
        return self._named[0]

    @property
    def damage(self) -> str | None:
        """Why there are no names; None if nothing is damaged."""
        return self._named[1]

    @cached_property
    def _named(self) -> tuple[tuple[str, ...], str | None]:
        try:
            return _names(self.path, self.kind), None
        except (OSError, ValueError) as error:
            return (), str(error).partition(". ")[0]


def look(path: Path) -> Look:
    """Look at a file. Raises FormatError: it cannot be read, or is empty."""
    try:
        with Source(path) as file:
            head, fault = file.read(HEAD_BYTES), file.fault
            kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
            if kind is not None:
                return Look(path, kind)
            if head.startswith(_UTF16):
                raise FormatError(f"{path} is text in UTF-16; save it as UTF-8")
            text = _text(head)
            found = _json(path, text, is_whole=len(head) < HEAD_BYTES)
            if found.kind == "object" and len(head) == HEAD_BYTES:
                found = _json(path, text, wide=_text(head + file.read(_WIDE_BYTES)))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}; give the path of a readable file") from error
    if not text.strip() and fault is not None:
        raise FormatError(f"{path}: {fault}; nothing of it can be read")
    if not text.strip() or (found.kind == "array" and not "".join(text.split()).removeprefix("[").removesuffix("]")):
        raise FormatError(f"{path} is empty; there is nothing to ingest")
    return found


def look_or_other(path: Path) -> Look:
    """Look at a file; one that not even begins to be readable is `other`, and whoever reads its values says why."""
    try:
        return look(path)
    except FormatError:
        return Look(path, "other")


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").lstrip("\ufeff")


def _json(path: Path, text: str, *, wide: str | None = None, is_whole: bool = False) -> Look:
    """The JSON values at the beginning of a text, or of more of it."""
    start = text.lstrip()
    if start.startswith("["):
        values = _partial(start)
        return Look(path, "array", text, values[:_MOST_VALUES] if isinstance(values, list) else _by_keys(start))
    lines = [line.rstrip() for line in (wide or text).split("\n", _MOST_VALUES)[:_MOST_VALUES]]
    values = [value for line in lines if line.startswith("{") and line.endswith("}") and (value := _whole(line))]
    if values:
        return Look(path, "lines", text, values)
    if not start.startswith("{"):
        return Look(path, "other", text)
    value = _partial((wide or text).lstrip())
    # A document that an error cuts short shows its keys all the same.
    return Look(path, "object", text, [value] if value else _by_keys(start))


def _whole(line: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    from pydantic_core import from_json

    try:
        return from_json(line)  # with the NaN of Python's JSON, which some formats know
    except ValueError:
        return None


def _partial(text: str) -> Any:
    from pydantic_core import from_json

    try:
        return from_json(text, allow_partial=True)
    except ValueError:
        return None


def _by_keys(text: str) -> list[Any]:
    keys = dict.fromkeys(_KEY.findall(text))
    return [keys] if keys else []


def _names(path: Path, kind: Kind) -> tuple[str, ...]:
    if kind == "parquet":
        import pyarrow.parquet as pq

        return tuple(pq.read_schema(path).names)
    if kind == "zip":
        from lake.formats.base.zip_entries import listed

        return tuple(entry.name for entry in listed(path)[0])
    if kind == "sqlite":
        from lake.formats.base.sqlite_rows import tables

        return tables(path)
    return ()
