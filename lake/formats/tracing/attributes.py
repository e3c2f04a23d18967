"""Attributes of spans: dicts with dotted names, whose values may be text where a number or an object is meant."""

from typing import Any


def first(said: dict[str, Any], *keys: str) -> Any:
    """The value of the first key that has one."""
    return next((said[key] for key in keys if said.get(key) is not None), None)


def name_in(said: dict[str, Any], *keys: str) -> str | None:
    """The first text that is not empty."""
    return next((value for key in keys if isinstance(value := said.get(key), str) and value), None)


def numeric(value: Any) -> Any:
    """A number that is written as text, as a number; any other value as it is."""
    if isinstance(value, str):
        try:
            return int(value) if value.lstrip("-").isdecimal() and len(value) < 20 else float(value)
        except ValueError:
            return value
    return value


def count_of(value: Any) -> int | None:
    """A count, also where it is written as text or with a fraction of zero; None for anything else."""
    found = numeric(value)
    is_count = isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found < 1 << 63
    return int(found) if is_count else None


def flattened(said: dict[str, Any], prefix: str) -> list[Any]:
    """What attributes PREFIX.0.a and PREFIX.0.b.1.c say, as a list of nested objects; they are taken out.

    An attribute PREFIX that is such a list already (of objects whose keys may be dotted) comes out the same way.
    """
    root: dict[str, Any] = {}
    if isinstance(whole := said.get(prefix), list):
        root = {str(index): item for index, item in enumerate(said.pop(prefix))} if whole else {}
    for key in [key for key in said if key.startswith(f"{prefix}.")]:
        _put(root, key.removeprefix(f"{prefix}.").split("."), said.pop(key))
    nested = _nested(root)
    return nested if isinstance(nested, list) else [nested] if nested else []


def _put(root: dict[str, Any], path: list[str], value: Any) -> None:
    *inside, last = path
    for name in inside:
        inner = root.get(name)
        if not isinstance(inner, dict):
            inner = root[name] = {}
        root = inner
    root[last] = value


def _nested(value: Any) -> Any:
    """Objects with dotted keys as nested ones, and those whose keys are numbers as lists."""
    if isinstance(value, list):
        return [_nested(item) for item in value]
    if not isinstance(value, dict):
        return value
    root: dict[str, Any] = {}
    for key, inner in value.items():
        _put(root, key.split("."), inner)
    if root and all(key.isdecimal() for key in root):
        return [_nested(root[key]) for key in sorted(root, key=lambda key: (len(key), key))]
    return {key: _nested(inner) for key, inner in root.items()}
