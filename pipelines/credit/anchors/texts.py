"""Definitions by text: exact text (the GiGPO paper's), substitutions, filters, and JSON in one spelling.

Substitutions strip what varies without mattering, such as counters, times and ids. The expressions are those of Rust's
regex crate, run by Polars: they take time linear in the text, whatever the expression. For that they have no
look-around and no back-references; one that would compile to more than 10 MB is refused.

Filters take states out, whatever they say: they lose their key, and A_S is exactly 0 there.

JSON-canonical states are tool results that say the same in another order or spelling: keys sorted, no spaces, chosen
fields left out, numbers compared exactly. 1, 1.0, 1e0 and 10e-1 are the same, and so are 0.1 and 0.10; nothing goes
through a float, so that no two different numbers become one (under RFC 8785 they do).
"""

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NoReturn, Self

import polars as pl
from polars.exceptions import ComputeError
from pydantic import BaseModel, Field, model_validator

from pipelines.credit.anchors.definition import Definition, Reads, States, map_distinct


class ExactText(Definition):
    """Two steps share an anchor if their state texts are equal, character for character.

    The key is the stored `state_hash` where there is one, so that no text is read.
    """

    kind: Literal["exact"] = "exact"

    reads: ClassVar[Reads] = "state"

    def apply(self, states: States) -> States:
        """The states as they are."""
        return states


SYNTAX = (
    "Valid is the syntax of Rust's regex crate: classes, groups, repetitions, alternatives, ^ $ \\b, flags such as "
    "(?i) (?m) (?s); no look-around, no back-references"
)
_REFERENCE = re.compile(r"\$(?:\$|\{(?P<braced>[^}]*)\}|(?P<bare>[0-9A-Za-z_]+))")


def check_pattern(pattern: str) -> list[str]:
    """Names and numbers of a pattern's groups, `0` (all of it) included; ValueError if it cannot be used."""
    try:
        probe = pl.DataFrame({"text": [""]}).select(pl.col("text").str.extract_groups(pattern))
    except ComputeError as error:
        fault = str(error).partition("\n\nThis error occurred")[0]
        msg = f"{pattern!r} is not a regular expression that can be used here: {fault}. {SYNTAX}"
        raise ValueError(msg) from error
    dtype = probe.schema["text"]
    fields = [field.name for field in dtype.fields] if isinstance(dtype, pl.Struct) else []
    # A named group's field has its name; it has its number as well.
    return ["0", *fields, *(str(number) for number in range(1, len(fields) + 1))]


class Substitution(BaseModel, frozen=True, extra="forbid"):
    """One pattern and what its matches become."""

    pattern: str = Field(min_length=1)
    """Regular expression; all its matches are replaced, left to right, without overlap."""
    replacement: str = ""
    """What a match becomes. `$1`, `${1}`, `$name`, `${name}`: what a group matched; `$$`: a dollar sign."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        groups = check_pattern(self.pattern)
        for found in _REFERENCE.finditer(self.replacement):
            name = found["braced"] if found["braced"] is not None else found["bare"]
            if name is not None and name not in groups:
                msg = (
                    f"replacement {self.replacement!r} refers to group {name!r}, which {self.pattern!r} does not have "
                    f"(groups: {', '.join(dict.fromkeys(groups))}). Write ${{1}}x for group 1 and an x, $$ for a dollar"
                )
                raise ValueError(msg)
        return self


class Substitutions(Definition):
    """Substitutions in the state text, one after the other; each sees what the one before left."""

    kind: Literal["substitutions"] = "substitutions"
    substitutions: tuple[Substitution, ...] = Field(min_length=1)
    """What to replace, in order."""
    reads: ClassVar[Reads] = "text"

    def apply(self, states: States) -> States:
        """Each distinct text, rewritten."""
        return states.rewritten(self.rewrite)

    def rewrite(self, texts_V: pl.Series) -> pl.Series:
        """The texts after all substitutions; NULL stays NULL."""
        expression = pl.col("text")
        for one in self.substitutions:
            expression = expression.str.replace_all(one.pattern, one.replacement)
        # The streaming engine works on parts of the column side by side.
        return texts_V.alias("text").to_frame().lazy().select(expression).collect(engine="streaming")["text"]


class ToolResults(Definition):
    """Only what a tool answered is a state: messages of users differ in wording, answers of tools do not."""

    kind: Literal["tool_results"] = "tool_results"
    roles: tuple[str, ...] = Field(default=("tool",), min_length=1)
    """Values of `state_role` that count. A NULL role does not."""

    def inputs(self) -> tuple[str, ...]:
        """The role."""
        return ("state_role",)

    def apply(self, states: States) -> States:
        """Other roles lose their key."""
        return states.kept(states.batch.frame["state_role"].is_in(self.roles))


class NoErrors(Definition):
    """Error texts are not states: "You can't see any such thing." is said in many places.

    Without a pattern, the mark `state_is_error` decides; a NULL mark is no error.
    """

    kind: Literal["no_errors"] = "no_errors"
    pattern: str | None = Field(default=None, min_length=1)
    """Regular expression (syntax as for substitutions); texts with a match are errors. None: the stored mark."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if self.pattern is not None:
            check_pattern(self.pattern)
        return self

    @property
    def reads_text(self) -> bool:
        """Texts are searched, if a pattern is given."""
        return self.pattern is not None

    def inputs(self) -> tuple[str, ...]:
        """The mark, if no pattern is given."""
        return () if self.reads_text else ("state_is_error",)

    def apply(self, states: States) -> States:
        """Errors lose their key."""
        if self.pattern is None:
            is_error_N = states.batch.frame["state_is_error"].cast(pl.Boolean).fill_null(value=False)
            return states.kept(~is_error_N)
        pattern = self.pattern
        return states.rewritten(
            lambda texts_V: pl.select(pl.when(~texts_V.str.contains(pattern)).then(texts_V)).to_series()
        )


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
