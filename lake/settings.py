"""Settings of a command: defaults < TOML section < KEY=VALUE pairs, validated by the owner's config class.

Every command and loader reports what is wrong with them through `faults` (`validated` is the usual way), so that a
wrong number reads the same in a file, in `--set` and in `--filter`: which field, what it is, what is valid.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from lake.errors import UsageError

NAME = r"^[A-Za-z0-9][\w.-]*$"
"""What a user's own definitions may be called. No slash, which separates a grouping's draws."""
NAME_IN_WORDS = "letters, digits, `_`, `.` and `-`, beginning with a letter or a digit"
SELECTION_NAME = r"^[^\W_][\w.+=:@-]*$"
"""What a selection may be called: as a user's definition, or after a run."""
SECTIONS = ("credit", "group", "loop", "reward", "score", "select", "trainer")
"""Sections of a configuration file: one file may hold those of several commands."""


def from_file(path: str, section: Sequence[str]) -> dict[str, Any]:
    """A section of a TOML file; empty if it has none. Raises UsageError: missing, no TOML, or an unknown section."""
    try:
        found: Any = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} nests arrays or tables too deeply to be read") from error
    if foreign := [name for name in found if name not in SECTIONS]:
        raise UsageError(f"{path}: there is no section {', '.join(foreign)}; valid: {', '.join(SECTIONS)}")
    for name in section:
        found = found.get(name, {})
        if not isinstance(found, dict):
            raise UsageError(f"{path}: {name!r} is not a section; write [{'.'.join(section)}]")
    return dict(found)


def from_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; a value is JSON if it parses as JSON, else text. Raises UsageError: a pair without `=`."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{pair!r} is no setting; write KEY=VALUE")
        try:
            settings[key.strip()] = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            settings[key.strip()] = value
    return settings


def typed_pairs(pairs: Sequence[str], model: type[BaseModel]) -> dict[str, Any]:
    """SECTION.KEY=VALUE pairs as nested settings of a model.

    A value is what its field takes: JSON, else text, else a list written `a|b`. What no field takes stays as it is, for
    validation to tell.

    Args:
        pairs: for example `epochs=3`, `loss.clip_low=0.1`, `loggers=wandb|tensorboard`.

    Raises:
        UsageError: a pair without `=` or without a name, or one that sets a part of what another one sets.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        names = [name.strip() for name in key.split(".")]
        if not equals or not all(names):
            raise UsageError(f"--set {pair!r} is no setting; write KEY=VALUE or SECTION.KEY=VALUE")
        place = settings
        for name in names[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise UsageError(f"--set {pair!r}: `{name}` is set already, as {place!r}")
        place[names[-1]] = _typed(value, _annotation(model, names))
    return settings


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over settings, section by section; lists and values are replaced."""
    both = dict(below)
    for name, value in above.items():
        before = both.get(name)
        both[name] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return both


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of all values in nested settings, dotted."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def value_at(settings: Mapping[str, Any], place: str) -> Any:
    """The value under a dotted name; None if there is none."""
    found: Any = settings
    for name in place.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _annotation(model: type[BaseModel], names: Sequence[str]) -> Any:
    """The type of a field; Any if the model has none of that name."""
    annotation: Any = model
    for name in names:
        fields = [owner.model_fields[name] for owner in models_in(annotation) if name in owner.model_fields]
        if not fields:
            return Any
        annotation = fields[0].annotation
    return annotation


def _typed(text: str, annotation: Any) -> Any:
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    forms: list[Any] = [text, text.split("|")]
    with suppress(msgspec.DecodeError, RecursionError):
        forms.insert(0, msgspec.json.decode(text))
    for form in forms:
        with suppress(ValidationError):
            adapter.validate_python(form)
            return form
    takes_a_list = any(get_origin(one) in (list, tuple) for one in (annotation, *get_args(annotation)))
    return forms[-1] if takes_a_list and forms[0] == text else forms[0]


Config = TypeVar("Config", bound=BaseModel)
_SHOWN = 60
"""Characters of a wrong value that are shown."""
_PATTERNS = {
    NAME: NAME_IN_WORDS,
    SELECTION_NAME: "letters, digits and `. _ - + = : @`, beginning with a letter or a digit",
}
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
_NEAR = 0.75
"""How much a valid option must look like an unknown one to be named alone."""
_ALTERNATIVES = frozenset(("bool", "float", "int", "str"))
_SPELLED = ("list[", "literal[", "tuple[")
"""Types that a value might have had, in a finding's place."""


def validated(model: type[Config], settings: Mapping[str, Any], place: str = "") -> Config:
    """A model of a user's settings; `place` begins the message. Raises UsageError: each wrong field, what is valid."""
    try:
        return model.model_validate(dict(settings))
    except ValidationError as error:
        raise UsageError(place + faults(error, model)) from error


def faults(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Everything that is wrong, each field once, separated by semicolons.

    With the model that was validated, a place is named as its user wrote it, and an option that the model lacks comes
    with those that it has.
    """
    found = error.errors(include_url=False)
    valid_by_fault: dict[str, list[str]] = {}
    for one in found:
        # A list that is only too short because what stands in it is wrong says nothing new.
        at = one["loc"]
        if one["type"] != "too_short" or not any(o["loc"][: len(at)] == at and o["loc"] != at for o in found):
            place = _Place.of(one["loc"], model)
            fault, valid = _described(one, place.written)
            if model is not None and one["type"] == "extra_forbidden":
                fault, valid = f"{fault}{place.member}", place.options
            valid_by_fault.setdefault(fault, []).extend([valid] if valid else [])
    return "; ".join(
        f"{fault}; valid: {' or '.join(valid)}" if valid else fault for fault, valid in valid_by_fault.items()
    )


def _described(found: ErrorDetails, place: tuple[int | str, ...]) -> tuple[str, str]:
    """What is wrong, and what is valid; the latter is empty where the former says it."""
    kind, context, field = found["type"], found.get("ctx", {}), _field(place)
    if sentence := _sentence(found, place):
        return sentence, ""
    what = f"{field} is {_shown(found['input'])}"
    if kind == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        return f"{field} has the {key} {context['tag']!r}", context["expected_tags"]
    if kind == "string_pattern_mismatch":
        return what, _PATTERNS.get(context["pattern"], f"a text that matches {context['pattern']}")
    if kind in _VALID:
        return what, _VALID[kind].format(**context)
    return f"{what}: {found['msg'][:1].lower()}{found['msg'][1:]}", ""


def _sentence(found: ErrorDetails, place: tuple[int | str, ...]) -> str:
    """A finding that needs no list of what is valid; empty for others."""
    kind, given, context, field = found["type"], found["input"], found.get("ctx", {}), _field(place)
    if kind == "missing":
        return f"{field} is missing"
    if kind == "extra_forbidden":
        return f"there is no option {field}"
    if kind == "json_invalid":
        return f"it is no JSON: {context['error']}"
    if kind in ("value_error", "assertion_error"):
        return f"{field}: {context['error']}" if place else str(context["error"])
    is_broken = isinstance(given, str) and given.lstrip()[:1] in ("{", "[") and (fault := _json_fault(given))
    return f"{field} is no JSON: {fault}" if is_broken else ""


class _Place(NamedTuple):
    """Where a finding is, in the words of who wrote the settings."""

    written: tuple[int | str, ...]
    """Without the names that pydantic puts in for the members of a union, except in a list of them, where they say what
    stands there: `loss.beta`, but `filters.0.length.max_steps`."""
    member: str
    """` of awr` in a member of a union; empty elsewhere."""
    options: str
    """Those that there are where there is none of the last name: the nearest, or all."""

    @classmethod
    def of(cls, place: tuple[int | str, ...], model: type[BaseModel] | None) -> "_Place":
        """The place of a finding in a model; as pydantic has it where the model is not known."""
        if model is None:
            return cls(place, "", "")
        written: list[int | str] = []
        member = ""
        owners = within = [model]
        for name in place:
            owners = within
            tagged = [owner for owner in owners if len(owners) > 1 and _tag(owner) == name]
            if tagged and not isinstance(written[-1], int):
                within, member = tagged, f" of {name}"
                continue
            written.append(name)
            fields = [owner.model_fields[name] for owner in owners if name in owner.model_fields]
            # A position in a list, the member that stands there, or the name of a type stays where it is.
            within = tagged or [one for field in fields for one in models_in(field.annotation)] or owners
            member = member if within is owners else ""
        names = list(dict.fromkeys(name for owner in owners for name in owner.model_fields))
        nearest = get_close_matches(str(place[-1]) if place else "", names, cutoff=_NEAR)
        return cls(tuple(written), member, ", ".join(nearest or names))


def _tag(model: type[BaseModel]) -> Any:
    """What identifies a member of a union: the value of a field that has only one."""
    return next(
        (one.default for one in model.model_fields.values() if get_args(one.annotation) == (one.default,)), None
    )


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's annotation names, alone, in a union or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def _field(place: tuple[int | str, ...]) -> str:
    """Where the finding is; a type that a value might have had instead is no place."""
    last = str(place[-1]) if place else ""
    named = ".".join(map(str, place[:-1] if last in _ALTERNATIVES or last.startswith(_SPELLED) else place))
    return f"`{named}`" if named else "it"


def _json_fault(text: str) -> str:
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
