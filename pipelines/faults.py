"""What is wrong with settings, in one line: pydantic's findings in the words of this project.

Every command and loader that validates a user's settings says it through `faults`, so that a wrong number reads the
same in a file, in `--set` and in `--filter`: which field, what it is, what is valid.
"""

import json
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipelines.groupings.definition import NAME

_SHOWN = 60
"""Characters of a wrong value that are shown."""
_PATTERNS = {NAME: "letters, digits, `_`, `.` and `-`, beginning with a letter or a digit"}
"""Patterns as people read them."""
_VALID = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "keys with values",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number, not a text",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "keys with values",
    "model_type": "keys with values",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "a text",
    "too_long": "at most {max_length}",
    "too_short": "at least {min_length}",
    "tuple_type": "a list",
    "union_tag_not_found": "keys with values, {discriminator} among them",
}
"""Kind of finding -> what is valid, over the finding's context."""
_ALTERNATIVES = frozenset(("bool", "float", "int", "str"))


def faults(error: ValidationError) -> str:
    """Everything that is wrong, each field once, separated by semicolons.

    Args:
        error: what validation raised.
    """
    found = error.errors(include_url=False)
    told: dict[str, list[str]] = {}
    for one in found:
        if not _follows(one, found):
            what, valid = _told(one)
            told.setdefault(what, []).extend([valid] if valid else [])
    return "; ".join(f"{what}; valid: {' or '.join(valid)}" if valid else what for what, valid in told.items())


def _told(found: ErrorDetails) -> tuple[str, str]:
    """What is wrong, and what is valid; the latter is empty where the former says it."""
    kind, context = found["type"], found.get("ctx", {})
    if said := _sentence(found):
        return said, ""
    what = f"{_field(found['loc'])} is {_shown(found['input'])}"
    if kind == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        return f"{_field(found['loc'])} has the {key} {context['tag']!r}", context["expected_tags"]
    if kind == "string_pattern_mismatch":
        return what, _PATTERNS.get(context["pattern"], f"a text that matches {context['pattern']}")
    if kind in _VALID:
        return what, _VALID[kind].format(**context)
    return f"{what}: {found['msg'][:1].lower()}{found['msg'][1:]}", ""


def _sentence(found: ErrorDetails) -> str:
    """A finding that says all by itself; empty for others."""
    kind, given, context, field = found["type"], found["input"], found.get("ctx", {}), _field(found["loc"])
    said = ""
    if kind == "missing":
        said = f"{field} is missing"
    elif kind == "extra_forbidden":
        said = f"there is no option {field}"
    elif kind == "json_invalid":
        said = f"it is no JSON: {context['error']}"
    elif kind in ("value_error", "assertion_error"):
        said = f"{field}: {context['error']}" if found["loc"] else str(context["error"])
    elif isinstance(given, str) and given.lstrip()[:1] in ("{", "[") and (broken := _no_json(given)):
        said = f"{field} is no JSON: {broken}"
    return said


def _field(place: tuple[int | str, ...]) -> str:
    """Where the finding is; a type that a value might have had instead is no place."""
    last = str(place[-1]) if place else ""
    named = ".".join(map(str, place[:-1] if last in _ALTERNATIVES or last.startswith("literal[") else place))
    return f"`{named}`" if named else "it"


def _follows(one: ErrorDetails, found: list[ErrorDetails]) -> bool:
    """Whether a list is only too short because what stands in it is wrong."""
    place = one["loc"]
    return one["type"] == "too_short" and any(o["loc"][: len(place)] == place and o["loc"] != place for o in found)


def _no_json(text: str) -> str:
    """What breaks a text that was meant as JSON, and where; empty if nothing does."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos + 1} of {_shown(text)}"
    except RecursionError:
        return "it is nested too deeply"
    return ""


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
