"""Settings of a command: defaults < TOML section < KEY=VALUE pairs, validated by a config class.

All commands and loaders report faults through `describe_faults` (usually by `validate`). So an invalid number gets the
same message in a file, in `--set` and in `--filter`: the field, its value, and the valid values.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails

from lake.errors import UsageError

NAME = r"^[A-Za-z0-9][\w.-]*$"
"""Valid names of a user's definitions, without the slash, which separates a grouping's draws."""
NAME_IN_WORDS = "letters, digits, `_`, `.` and `-`, beginning with a letter or a digit"
SELECTION_NAME = r"^[^\W_][\w.+=:@-]*$"
"""Valid names of a selection: those of definitions and of runs."""
SECTIONS = ("collect", "credit", "group", "loop", "prompts", "record", "reward", "score", "select", "trainer")
"""Sections of a configuration file, which may hold those of several commands."""


class FrozenModel(BaseModel):
    """A group of settings that belongs to the module which uses them: frozen, and an unknown key is an error.

    A number that is not finite is an error, too, because a run's configuration is stored as JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # A validator of the model: pydantic lets no field validator see the field that discriminates a union.
    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans(cls, settings: Any) -> Any:
        """Refuse true and false as numbers: `max_staleness = false` does not mean 0."""
        wrong: list[InitErrorDetails] = []
        for name, value in settings.items() if isinstance(settings, Mapping) else ():
            annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
            types = (annotation, *get_args(annotation))
            if isinstance(value, bool) and bool not in types and (int in types or float in types):
                kind = "int_parsing" if int in types else "float_parsing"
                wrong.append(InitErrorDetails(type=kind, loc=(name,), input=value))
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return settings


def read_section(path: str, section: Sequence[str]) -> dict[str, Any]:
    """Read a section of a TOML file; empty if absent.

    Raises UsageError: no such file, not TOML, or unknown sections.
    """
    try:
        table: Any = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} nests arrays or tables too deeply to be read") from error
    if foreign := [name for name in table if name not in SECTIONS]:
        raise UsageError(f"{path}: there is no section {', '.join(foreign)}; valid: {', '.join(SECTIONS)}")
    for name in section:
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {name!r} is not a section; write [{'.'.join(section)}]")
    return dict(table)


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE pairs; a value is JSON if possible, otherwise text. Raises UsageError: a pair without `=`."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"{pair!r} is not a setting; write KEY=VALUE")
        try:
            settings[key.strip()] = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            settings[key.strip()] = text
    return settings


def parse_typed_pairs(pairs: Sequence[str], model: type[BaseModel]) -> dict[str, Any]:
    """Parse SECTION.KEY=VALUE pairs to nested settings of a model.

    A value is the first form that its field accepts: JSON, a text, or a list written `a|b`. Other values stay texts,
    and validation reports them.

    Args:
        pairs: for example `epochs=3`, `loss.clip_low=0.1`, `loggers=wandb|tensorboard`.

    Raises:
        UsageError: a pair without `=` or without a name, or one inside a value that another pair sets.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        names = [name.strip() for name in key.split(".")]
        if not equals or not all(names):
            raise UsageError(f"--set {pair!r} is not a setting; write KEY=VALUE or SECTION.KEY=VALUE")
        section = settings
        for name in names[:-1]:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise UsageError(f"--set {pair!r}: `{name}` is set already, as {section!r}")
        section[names[-1]] = _convert(text, _get_annotation(model, names))
    return settings


def add_flags(settings: Mapping[str, Any], values: Mapping[str, Any], flags: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of --set together with the values of flags.

    Args:
        settings: nested settings of --set.
        values: dotted setting -> value of its flag.
        flags: dotted setting -> flag.

    Raises:
        UsageError: a flag and --set name the same setting.
    """
    combined = dict(settings)
    for name, value in values.items():
        if value_at(settings, name) is not None:
            raise UsageError(f"{flags[name]} and --set {name} say the same thing twice: leave one of them out")
        nested = value
        for part in reversed(name.split(".")):
            nested = {part: nested}
        combined = merge(combined, nested)
    return combined


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings section by section; `above` replaces lists and single values of `below`."""
    combined = dict(below)
    for name, upper in above.items():
        lower = combined.get(name)
        combined[name] = merge(lower, upper) if isinstance(lower, Mapping) and isinstance(upper, Mapping) else upper
    return combined


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all values in nested settings."""
    for name, section in settings.items():
        if isinstance(section, Mapping) and section:
            yield from leaves(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def value_at(settings: Mapping[str, Any], path: str) -> Any:
    """Return the value with a dotted name; None if absent."""
    node: Any = settings
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _get_annotation(model: type[BaseModel], names: Sequence[str]) -> Any:
    """Return the type of a field; Any for an unknown field."""
    annotation: Any = model
    for name in names:
        fields = [owner.model_fields[name] for owner in models_in(annotation) if name in owner.model_fields]
        if not fields:
            return Any
        annotation = fields[0].annotation
    return annotation


def _convert(text: str, annotation: Any) -> Any:
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    forms: list[Any] = [text, text.split("|")]
    with suppress(msgspec.DecodeError, RecursionError):
        forms.insert(0, msgspec.json.decode(text))
    for form in forms:
        with suppress(ValidationError):
            adapter.validate_python(form)
            return form
    takes_a_list = any(get_origin(kind) in (list, tuple) for kind in (annotation, *get_args(annotation)))
    return forms[-1] if takes_a_list and forms[0] == text else forms[0]


Config = TypeVar("Config", bound=BaseModel)
_VALUE_LENGTH = 60
"""Maximum characters of an invalid value in a message."""
_PATTERNS = {
    NAME: NAME_IN_WORDS,
    SELECTION_NAME: "letters, digits and `. _ - + = : @`, beginning with a letter or a digit",
}
"""Pattern -> description for people."""
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
"""Kind of fault -> valid values, formatted with the fault's context."""
_NEAR = 0.75
"""Similarity to an unknown option above which only the similar valid options are named."""
_ALTERNATIVES = frozenset(("bool", "float", "int", "str"))
_SPELLED = ("list[", "literal[", "tuple[")
"""Beginnings of type names that pydantic adds to the path of a fault."""


def validate(model: type[Config], settings: Mapping[str, Any], prefix: str = "") -> Config:
    """Build a model from settings; `prefix` begins a message. Raises UsageError: each invalid field, valid values."""
    try:
        return model.model_validate(dict(settings))
    except ValidationError as error:
        raise UsageError(prefix + describe_faults(error, model)) from error


def describe_faults(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return all faults as text, each field once, separated by semicolons.

    Args:
        model: the validated model; a path is then named as the user wrote it, and an unknown option comes with the
            valid ones.
    """
    details = error.errors(include_url=False)
    valid_by_fault: dict[str, list[str]] = {}
    for detail in details:
        # A list that is too short only because its entries are invalid adds nothing new.
        path = detail["loc"]
        if detail["type"] != "too_short" or not any(
            inner["loc"][: len(path)] == path and inner["loc"] != path for inner in details
        ):
            location = _SettingPath.resolve(path, model)
            fault, valid = _describe(detail, location.written)
            if model is not None and detail["type"] == "extra_forbidden":
                fault, valid = f"{fault}{location.member}", location.options
            valid_by_fault.setdefault(fault, []).extend([valid] if valid else [])
    return "; ".join(
        f"{fault}; valid: {' or '.join(valid)}" if valid else fault for fault, valid in valid_by_fault.items()
    )


def _describe(detail: ErrorDetails, path: tuple[int | str, ...]) -> tuple[str, str]:
    """Return the fault and the valid values; the latter is empty if the fault names them."""
    kind, context, field = detail["type"], detail.get("ctx", {}), _format_path(path)
    if sentence := _describe_self_contained(detail, path):
        return sentence, ""
    fault = f"{field} is {_shorten(detail['input'])}"
    if kind == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        return f"{field} has the {key} {context['tag']!r}", context["expected_tags"]
    if kind == "string_pattern_mismatch":
        return fault, _PATTERNS.get(context["pattern"], f"a text that matches {context['pattern']}")
    if kind in _VALID:
        return fault, _VALID[kind].format(**context)
    return f"{fault}: {detail['msg'][:1].lower()}{detail['msg'][1:]}", ""


def _describe_self_contained(detail: ErrorDetails, path: tuple[int | str, ...]) -> str:
    """Describe a fault that needs no list of valid values; empty for other faults."""
    kind, setting, context, field = detail["type"], detail["input"], detail.get("ctx", {}), _format_path(path)
    if kind == "missing":
        return f"{field} is missing"
    if kind == "extra_forbidden":
        return f"there is no option {field}"
    if kind == "json_invalid":
        return f"it is not JSON: {context['error']}"
    if kind in ("value_error", "assertion_error"):
        return f"{field}: {context['error']}" if path else str(context["error"])
    looks_like_json = isinstance(setting, str) and setting.lstrip()[:1] in ("{", "[")
    fault = _find_json_fault(setting) if looks_like_json else ""
    return f"{field} is not JSON: {fault}" if fault else ""


class _SettingPath(NamedTuple):
    """The path of a fault as the user wrote the settings."""

    written: tuple[int | str, ...]
    """Path without the names that pydantic adds for members of a union: `loss.beta`. In a list of members it keeps
    them, because they name the entry: `filters.0.length.max_steps`."""
    member: str
    """` of awr` inside a member of a union; empty otherwise."""
    options: str
    """Valid options in place of an unknown last name: the similar ones, or all."""

    @classmethod
    def resolve(cls, path: tuple[int | str, ...], model: type[BaseModel] | None) -> "_SettingPath":
        """Resolve a path of pydantic in a model; it stays unchanged without a model."""
        if model is None:
            return cls(path, "", "")
        written: list[int | str] = []
        member = ""
        owners = inner = [model]
        for name in path:
            owners = inner
            tagged = [owner for owner in owners if len(owners) > 1 and _find_tag(owner) == name]
            if tagged and not isinstance(written[-1], int):
                inner, member = tagged, f" of {name}"
                continue
            written.append(name)
            fields = [owner.model_fields[name] for owner in owners if name in owner.model_fields]
            # After a list position, a member of a list or the name of a type, the models stay the same.
            inner = tagged or [owner for field in fields for owner in models_in(field.annotation)] or owners
            member = member if inner is owners else ""
        names = list(dict.fromkeys(name for owner in owners for name in owner.model_fields))
        similar = get_close_matches(str(path[-1]) if path else "", names, cutoff=_NEAR)
        return cls(tuple(written), member, ", ".join(similar or names))


def _find_tag(model: type[BaseModel]) -> Any:
    """Return the tag of a union's member: the value of its field with only one valid value."""
    fields = model.model_fields.values()
    return next((field.default for field in fields if get_args(field.annotation) == (field.default,)), None)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a field's annotation, directly, in a union or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def _format_path(path: tuple[int | str, ...]) -> str:
    """Format the path of a fault without the name of a type that pydantic tried."""
    last = str(path[-1]) if path else ""
    name = ".".join(map(str, path[:-1] if last in _ALTERNATIVES or last.startswith(_SPELLED) else path))
    return f"`{name}`" if name else "it"


def _find_json_fault(text: str) -> str:
    """Return the fault of a text that looks like JSON, with its position; empty if it is valid."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos + 1} of {_shorten(text)}"
    except RecursionError:
        return "it is nested too deeply"
    return ""


def _shorten(setting: Any) -> str:
    text = repr(setting)
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."
