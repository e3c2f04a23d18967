"""JSON that a lake holds, in objects beside its tables and in columns of them.

Anybody who can write to a lake can write such a document, so every reader expects any text: damaged, of another type,
or nested deeper than a decoder can follow.
"""

import json
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec

from lake.errors import LakeAccessError

T = TypeVar("T")
Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A moment that can be compared with a store's clock."""
Version = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
"""Version of a Delta table; -1 before its first one."""
Versions = dict[str, Version]
"""Versions of tables, by the tables' names."""


def decode_document(data: bytes | str, kind: type[T], where: str, remedy: str) -> T:
    """Decode a document of a lake.

    Args:
        data: JSON.
        kind: type that the document must have, as msgspec takes it.
        where: URI of the object, or the table, row key and column.
        remedy: what to do about a damaged one, for the message.

    Raises:
        LakeAccessError: `data` is not JSON, is nested too deeply, or has another type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LakeAccessError(f"{where} is damaged ({fault_of(error)}); {remedy}") from error


def json_object(text: str | None) -> dict[str, Any]:
    """Return the JSON object in a column that a page shows; empty for NULL and for any other text."""
    try:
        value: Any = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def fault_of(error: Exception) -> str:
    """Say in words why a document cannot be decoded."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
