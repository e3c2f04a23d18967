"""What chat templates want differently from how chats are stored, for whoever renders: the trainer and policies."""

from typing import Any

import msgspec


def with_objects(call: Any) -> Any:
    """A tool call with its arguments as an object, where they are JSON text of one: templates write them by key."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": with_objects(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return call
    return call | {"arguments": decoded} if isinstance(decoded, dict) else call
