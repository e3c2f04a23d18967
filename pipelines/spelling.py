"""What commands read and say: parts of a definition as `KIND`, `KIND:KEY=VALUE,...` or `KEY=VALUE`; counted nouns."""

from collections.abc import Mapping
from typing import Any, get_origin

import msgspec
from pydantic import BaseModel

from lake.errors import UsageError


def spelled(text: str, kinds: Mapping[str, type[BaseModel]], noun: str) -> dict[str, Any]:
    """One part as the mapping that its model validates; UsageError if there is no such kind or option.

    `subsample:size=8,draws=4`; `dead_groups`; `max_steps=30`, where only one kind has such an option; or
    `min_reward=0.5`, where a kind has a main one. Values are JSON if they parse as JSON, else text; lists are written
    `a|b`. `noun` is what a part is called in messages.
    """
    head, colon, tail = (part.strip() for part in text.partition(":"))
    key, equals, _ = head.partition("=")
    if equals:
        key = key.strip()
        if (main := getattr(kinds.get(key), "primary", None)) is not None:
            return spelled(f"{key}:{main}{text.strip().removeprefix(key).lstrip()}", kinds, noun)
        owners = [kind for kind, model in kinds.items() if key in set(model.model_fields) - {"kind"}]
        if len(owners) != 1:
            why = f"belongs to {' and '.join(owners)}: write KIND:{key}=..." if owners else "is no option of any"
            msg = f"--{noun} {text!r}: {key!r} {why}. {_valid(kinds)}"
            raise UsageError(msg)
        head, tail = owners[0], text
    elif head not in kinds:
        msg = f"--{noun} {text!r}: there is no {noun} {head!r}. {_valid(kinds)}"
        raise UsageError(msg)
    pairs = tail.split(",") if equals or colon else []
    return {"kind": head} | dict(_pair(pair, text, kinds[head], noun) for pair in pairs)


def _pair(pair: str, text: str, model: type[BaseModel], noun: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in pair.partition("="))
    if not equals or key not in set(model.model_fields) - {"kind"}:
        valid = ", ".join(name for name in model.model_fields if name != "kind") or "none"
        msg = f"--{noun} {text!r}: {pair.strip()!r} is no option; write KEY=VALUE with one of {valid}"
        raise UsageError(msg)
    several = get_origin(model.model_fields[key].annotation) is tuple
    return key, [_value(part) for part in value.split("|")] if several else _value(value)


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _valid(kinds: Mapping[str, type[BaseModel]]) -> str:
    return f"Valid: {', '.join(kinds)}"
