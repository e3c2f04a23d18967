"""Keys out of what a function says: whatever quotes one, `***` is kept.

A function that asks a model has the key in its environment. It may return it, raise it or print it, mostly by accident;
none of that reaches a table, a log or a terminal.
"""

import re
from collections.abc import Mapping
from typing import Any

_NAMED = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8
"""Characters of a key. What is shorter is a stand-in such as `none`, and may be part of any word."""
_MASK = "***"


def keys_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values that are keys, by the names of their variables; longest first.

    Args:
        environment: what a function is given.
    """
    values = {value.strip() for name, value in environment.items() if _NAMED.search(name)}
    return tuple(sorted((value for value in values if len(value) >= _SHORTEST), key=lambda key: (-len(key), key)))


def masked(data: Any, keys: tuple[str, ...]) -> Any:
    """JSON data, or a text, without keys; one that is cut off at either end of a text is masked too.

    Args:
        data: of any depth that JSON has.
        keys: of `keys_in`.
    """
    if not keys:
        return data
    if isinstance(data, str):
        return _masked_text(data, keys)
    if isinstance(data, list):
        return [masked(each, keys) for each in data]
    if isinstance(data, dict):
        return {masked(name, keys): masked(value, keys) for name, value in data.items()}
    return data


def _masked_text(text: str, keys: tuple[str, ...]) -> str:
    for key in keys:
        text = text.replace(key, _MASK)
        for length in range(len(key) - 1, _SHORTEST - 1, -1):
            if text.startswith(key[-length:]):
                text = _MASK + text[length:]
            if text.endswith(key[:length]):
                text = text[:-length] + _MASK
    return text
