"""Settings of a command: defaults < TOML section < KEY=VALUE pairs, validated by the owner's config class."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
from pydantic import BaseModel, TypeAdapter, ValidationError

from lake.errors import UsageError
from lake.faults import models_in

SECTIONS = ("credit", "group", "reward", "score", "select", "trainer")
"""Sections of a configuration file: one file may hold those of several commands."""


def from_file(path: str, section: Sequence[str]) -> dict[str, Any]:
    """A section of a TOML file; empty if the file has none.

    Raises:
        UsageError: the file is missing, is not TOML, or holds something that no command reads.
    """
    try:
        found: Any = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"{path}: {error.strerror}; give the path of a TOML file"
        raise UsageError(msg) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{path} is not TOML: {error}"
        raise UsageError(msg) from error
    except RecursionError as error:
        msg = f"{path} nests arrays or tables too deeply to be read"
        raise UsageError(msg) from error
    if foreign := [name for name in found if name not in SECTIONS]:
        msg = f"{path}: there is no section {', '.join(foreign)}; valid: {', '.join(SECTIONS)}"
        raise UsageError(msg)
    for name in section:
        found = found.get(name, {})
        if not isinstance(found, dict):
            msg = f"{path}: {name!r} is not a section; write [{'.'.join(section)}]"
            raise UsageError(msg)
    return dict(found)


def from_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; a value is JSON if it parses as JSON, else text.

    Raises:
        UsageError: a pair without `=`.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            msg = f"{pair!r} is no setting; write KEY=VALUE"
            raise UsageError(msg)
        try:
            settings[key.strip()] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            settings[key.strip()] = value
    return settings


def typed_pairs(pairs: Sequence[str], model: type[BaseModel]) -> dict[str, Any]:
    """SECTION.KEY=VALUE pairs as nested settings of a model.

    A value is what its field takes: JSON, else text, else a list written `a|b`. What no field takes stays as it is, for
    validation to tell.

    Args:
        pairs: for example `epochs=3`, `loss.clip_low=0.1`, `loggers=wandb|tensorboard`.
        model: whose fields they are.

    Raises:
        UsageError: a pair without `=` or without a name, or one that sets a part of what another one sets.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        names = [name.strip() for name in key.split(".")]
        if not equals or not all(names):
            msg = f"--set {pair!r} is no setting; write KEY=VALUE or SECTION.KEY=VALUE"
            raise UsageError(msg)
        place = settings
        for name in names[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                msg = f"--set {pair!r}: `{name}` is set already, as {place!r}"
                raise UsageError(msg)
        place[names[-1]] = _typed(value, _annotation(model, names))
    return settings


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over settings, section by section; lists and values are replaced.

    Args:
        below: what holds where `above` says nothing.
        above: what was said later.
    """
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
    with suppress(msgspec.DecodeError):
        forms.insert(0, msgspec.json.decode(text))
    for form in forms:
        with suppress(ValidationError):
            adapter.validate_python(form)
            return form
    takes_a_list = any(get_origin(one) in (list, tuple) for one in (annotation, *get_args(annotation)))
    return forms[-1] if takes_a_list and forms[0] == text else forms[0]
