"""Settings of a command: defaults < TOML section < KEY=VALUE pairs, validated by the owner's config class."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lake.errors import UsageError


def from_file(path: str, section: Sequence[str]) -> dict[str, Any]:
    """A section of a TOML file; empty if the file has none.

    Raises:
        UsageError: the file is missing or is not TOML.
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
