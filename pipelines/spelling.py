"""Parser of a definition's parts on the command line: `KIND`, `KIND:KEY=VALUE,...` or `KEY=VALUE`."""

from collections.abc import Mapping
from typing import Any, get_origin

import msgspec
from pydantic import BaseModel

from lake.errors import UsageError


def parse_part(text: str, kinds: Mapping[str, type[BaseModel]], noun: str) -> dict[str, Any]:
    """Parse one part to the mapping that its model validates; UsageError for an unknown kind or option.

    Examples: `subsample:size=8,draws=4`; `dead_groups`; `max_steps=30`, if one kind has this option; `min_reward=0.5`,
    if the kind has a primary option. Values are JSON if they parse as JSON, else text; lists are `a|b`. `noun` names a
    part in messages.
    """
    valid = f"Valid: {', '.join(kinds)}"
    head, colon, tail = (part.strip() for part in text.partition(":"))
    key, equals, _ = head.partition("=")
    if equals:
        key = key.strip()
        if (main := getattr(kinds.get(key), "primary", None)) is not None:
            return parse_part(f"{key}:{main}{text.strip().removeprefix(key).lstrip()}", kinds, noun)
        owners = [kind for kind, model in kinds.items() if key in set(model.model_fields) - {"kind"}]
        if len(owners) != 1:
            why = f"belongs to {' and '.join(owners)}: write KIND:{key}=..." if owners else "is not an option of any"
            msg = f"--{noun} {text!r}: {key!r} {why}. {valid}"
            raise UsageError(msg)
        head, tail = owners[0], text
    elif head not in kinds:
        msg = f"--{noun} {text!r}: unknown {noun} {head!r}. {valid}"
        raise UsageError(msg)
    pairs = tail.split(",") if equals or colon else []
    return {"kind": head} | dict(_parse_pair(pair, text, kinds[head], noun) for pair in pairs)


def _parse_pair(pair: str, text: str, model: type[BaseModel], noun: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in pair.partition("="))
    if not equals or key not in set(model.model_fields) - {"kind"}:
        valid = ", ".join(name for name in model.model_fields if name != "kind") or "none"
        msg = f"--{noun} {text!r}: {pair.strip()!r} is not an option; write KEY=VALUE with one of {valid}"
        raise UsageError(msg)
    several = get_origin(model.model_fields[key].annotation) is tuple
    return key, [_parse_value(part) for part in value.split("|")] if several else _parse_value(value)


def _parse_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
