"""A small part of JSON Schema: enough to say what an answer must hold, nothing that can be slow or reach out.

Keywords: type, enum, const, properties, required, additionalProperties (true or false), items, minItems, maxItems,
minLength, maxLength, minimum, maximum. Any other is refused, not ignored: a rule that does nothing is a bug that
looks like a success. Left out on purpose: pattern (use the rule `regex`), $ref, and the combinators.
"""

from collections.abc import Callable
from typing import Any

Check = Callable[[Any, Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def same(one: Any, other: Any) -> bool:
    """Equality of JSON: 1 is 1.0, and never true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def _type(value: Any, names: Any) -> bool:
    return any(_TYPES[name](value) for name in ([names] if isinstance(names, str) else names))


_CHECKS: dict[str, Check] = {
    "type": _type,
    "enum": lambda value, allowed: any(same(value, one) for one in allowed),
    "const": same,
    "required": lambda value, keys: not isinstance(value, dict) or all(key in value for key in keys),
    "minItems": lambda value, least: not isinstance(value, list) or len(value) >= least,
    "maxItems": lambda value, most: not isinstance(value, list) or len(value) <= most,
    "minLength": lambda value, least: not isinstance(value, str) or len(value) >= least,
    "maxLength": lambda value, most: not isinstance(value, str) or len(value) <= most,
    "minimum": lambda value, least: not _is_number(value) or value >= least,
    "maximum": lambda value, most: not _is_number(value) or value <= most,
}
_NESTED = ("properties", "additionalProperties", "items")


def obeys(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a JSON value obeys a schema without fault.

    Args:
        value: the value.
        schema: from which `fault` has nothing to say.
    """
    if not all(check(value, schema[word]) for word, check in _CHECKS.items() if word in schema):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(obeys(part, schema["items"]) for part in value)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if schema.get("additionalProperties") is False and not value.keys() <= properties.keys():
            return False
        return all(obeys(part, properties[key]) for key, part in value.items() if key in properties)
    return True


def fault(schema: Any, place: str = "schema") -> str | None:
    """What is wrong with a schema, with the place; None if nothing is."""
    if not isinstance(schema, dict):
        return f"{place} is {type(schema).__name__}; valid: an object"
    if unknown := sorted(schema.keys() - _CHECKS.keys() - set(_NESTED)):
        return f"{place} has unknown keywords {unknown}; valid: {', '.join((*_CHECKS, *_NESTED))}"
    for word, (test, valid) in _ARGUMENTS.items():
        if word in schema and not test(schema[word]):
            return f"{place}.{word} is {schema[word]!r}; valid: {valid}"
    inner = [(f"{place}.items", schema["items"])] if "items" in schema else []
    inner += [(f"{place}.properties.{key}", part) for key, part in schema.get("properties", {}).items()]
    return next((found for where, part in inner if (found := fault(part, where)) is not None), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_types(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(isinstance(n, str) and n in _TYPES for n in names)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_COUNT = (_is_count, "a number from 0")
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_are_types, f"one or a list of {', '.join(_TYPES)}"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "required": (_are_names, "a list of keys"),
    "properties": (lambda value: isinstance(value, dict), "an object of schemas"),
    "additionalProperties": (lambda value: isinstance(value, bool), "true or false"),
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "minimum": (_is_number, "a number"),
    "maximum": (_is_number, "a number"),
}
