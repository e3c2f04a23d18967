"""JSON documents of a lake, in objects next to its tables and in columns.

Every user with write access to a lake can write such a document. So readers expect any text: damaged, of another type,
or nested deeper than a decoder can follow.
"""

import json
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec

from lake.errors import LakeAccessError

T = TypeVar("T")
Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time with a timezone, comparable with a store's clock."""
Version = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
"""Version of a Delta table; -1 before its first commit."""
Versions = dict[str, Version]
"""Table -> its version."""


def decode_document(content: bytes | str, kind: type[T], where: str, remedy: str) -> T:
    """Decode a document of a lake.

    Args:
        content: JSON.
        kind: required type of the document, for msgspec.
        where: URI of the object, or the table, row key and column.
        remedy: what the user can do about a damaged document, for the message.

    Raises:
        LakeAccessError: `content` is not JSON, is nested too deeply, or has another type.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LakeAccessError(f"{where} is damaged ({describe_fault(error)}); {remedy}") from error


def parse_json_object(text: str | None) -> dict[str, Any]:
    """Return the JSON object of a column; empty for NULL and for any other text."""
    try:
        document: Any = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def describe_fault(error: Exception) -> str:
    """Return why a document cannot be decoded."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
