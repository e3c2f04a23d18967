"""A small part of JSON Schema (2020-12): enough to say what an answer must hold, nothing that is slow or reaches out.

The package jsonschema validates. It ignores keywords that it does not know, follows `$ref` and matches `pattern` by
backtracking, so a schema has to obey a schema of ours first: any keyword that is not listed is refused. A rule that
does nothing is a bug that looks like a success. Left out on purpose: pattern (use the rule `regex`), $ref, and the
combinators; what is left takes time linear in the value and visits nothing but the value.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

_TYPE = {"enum": ["object", "array", "string", "number", "integer", "boolean", "null"]}
_TYPES = {"type": "array", "items": _TYPE, "minItems": 1}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_SCHEMA = {"$ref": "#"}
_KEYWORDS: dict[str, Any] = {
    "type": {"if": {"type": "array"}, "then": _TYPES, "else": _TYPE},
    "enum": {"type": "array", "minItems": 1},
    "const": {},
    "properties": {"type": "object", "additionalProperties": _SCHEMA},
    "required": {"type": "array", "items": {"type": "string"}},
    "additionalProperties": {"type": "boolean"},
    "items": _SCHEMA,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
}
"""The keywords that a schema may have, and the schema of what each one says."""


def validator(schema: dict[str, Any]) -> "Draft202012Validator":
    """What tells whether a value obeys a schema, by `is_valid`.

    Args:
        schema: in which `fault` finds nothing.
    """
    # Imported here: most jobs check no schema, and the two take as long to load as the scorers.
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # Without a registry of its own jsonschema would fetch a reference that it does not know.
    return Draft202012Validator(schema, registry=Registry())


def fault(schema: Any) -> str | None:
    """What is wrong with a schema, with the place; None if nothing is."""
    from jsonschema.exceptions import best_match

    try:
        error = best_match(_of_schemas().iter_errors(schema))
    except RecursionError:
        return "the schema is nested too deeply"
    if error is None:
        return None
    place = ".".join(map(str, ["schema", *error.absolute_path]))
    return f"{place}: {error.message}; valid keywords: {', '.join(_KEYWORDS)}"


@cache
def _of_schemas() -> "Draft202012Validator":
    return validator({"type": "object", "properties": _KEYWORDS, "additionalProperties": False})
