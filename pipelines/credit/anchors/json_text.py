"""JSON-canonical states: tool results that say the same in another order or spelling.

Keys sorted, no spaces, chosen fields left out, numbers compared exactly: 1, 1.0, 1e0 and 10e-1 are the same, and so are
0.1 and 0.10; nothing goes through a float, so that no two different numbers become one (under RFC 8785 they do).
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NoReturn, Self

from pydantic import Field, model_validator

from pipelines.credit.anchors.definition import Definition, Reads, States, map_distinct

DEEPEST = 100
"""Levels of nesting above which a text does not count as JSON: one limit for every machine."""

Paths = Sequence[tuple[str, ...]]


class _Number(str):
    """A number in its canonical form."""

    __slots__ = ()


def canonical_json(text: str, names: frozenset[str] = frozenset(), paths: Paths = ()) -> str | None:
    """The canonical form of a JSON text, in ASCII; of equal keys in one object the last one counts.

    None if the text is not JSON (NaN and Infinity are not), or nested more than 100 levels deep.

    `names` are keys left out wherever they occur, `paths` fields left out at one place: keys from the root on; `*`
    stands for any key and any list item, a number for one list item.
    """
    try:
        value = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_refuse)
        return _written(value, names, paths, 0)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    msg = f"{constant} is not JSON"
    raise ValueError(msg)


def _number(text: str) -> _Number:
    """Digits without zeros at either end, and the power of ten they are multiplied by."""
    sign = "-" if text.startswith("-") else ""
    mantissa, _, exponent = text.removeprefix("-").lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return _Number("0")
    kept = digits.rstrip("0")
    power = int(exponent or "0") - len(fraction) + len(digits) - len(kept)
    return _Number(f"{sign}{kept}e{power}" if power else sign + kept)


def _written(value: Any, names: frozenset[str], paths: Paths, depth: int) -> str:
    if depth > DEEPEST:
        msg = "nested too deeply"
        raise ValueError(msg)
    if isinstance(value, _Number):
        return value
    if isinstance(value, dict):
        fields = ((key, value[key], _below(paths, key)) for key in sorted(value) if key not in names)
        parts = (
            f"{json.dumps(key)}:{_written(field, names, inner, depth + 1)}"
            for key, field, inner in fields
            if () not in inner
        )
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list):
        items = ((item, _below(paths, str(index)) if paths else paths) for index, item in enumerate(value))
        return "[" + ",".join(_written(item, names, inner, depth + 1) for item, inner in items if () not in inner) + "]"
    return json.dumps(value)


def _below(paths: Paths, step: str) -> Paths:
    """What is left of the paths that lead through a key or a list item."""
    return [path[1:] for path in paths if path[0] in ("*", step)]


class CanonicalJson(Definition):
    """Two steps share an anchor if their states are the same JSON value: order of keys, spaces and 1 or 1.0 aside."""

    kind: Literal["json"] = "json"
    """Name of the definition."""
    drop: tuple[str, ...] = Field(default=())
    """Fields to leave out: `name` wherever it occurs, or `$.a.b` at one place (`*` for any key or list item)."""
    otherwise: Literal["text", "unknown"] = "text"
    """A state that is not JSON counts by its exact text, or as unknown."""

    @model_validator(mode="after")
    def _droppable(self) -> Self:
        for field in self.drop:
            if not field or (field.startswith("$") and (field[1:2] != "." or "" in field[2:].split("."))):
                msg = f"drop: {field!r} is no field. Write a key, or a path such as $.meta.time or $.rows.*.id"
                raise ValueError(msg)
        return self

    reads: ClassVar[Reads] = "text"

    def apply(self, states: States) -> States:
        """Each distinct text in canonical form."""
        return states.rewritten(lambda texts_V: map_distinct(texts_V, self._canonical))

    def _canonical(self, texts: list[str]) -> list[str | None]:
        names = frozenset(field for field in self.drop if not field.startswith("$"))
        paths = [tuple(field[2:].split(".")) for field in self.drop if field.startswith("$")]
        found = (canonical_json(text, names, paths) for text in texts)
        if self.otherwise == "unknown":
            return list(found)
        return [text if form is None else form for text, form in zip(texts, found, strict=True)]
