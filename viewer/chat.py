"""Chat messages and tool calls as they are stored: JSON of foreign shape, taken apart without trusting any of it."""

import json
from collections.abc import Mapping
from typing import Any


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
