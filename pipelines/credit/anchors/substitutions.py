"""Regular-expression substitutions: strip what varies without mattering, such as counters, times and ids.

The expressions are those of Rust's regex crate, run by Polars: they take time linear in the text, whatever the
expression, so that no text and no expression can make them hang. For that they have no look-around and no
back-references; an expression that would compile to more than 10 MB is refused.
"""

import re
from typing import Literal, Self

import polars as pl
from polars.exceptions import ComputeError
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipelines.credit.anchors.definition import Definition
from pipelines.credit.anchors.states import States

SYNTAX = (
    "Valid is the syntax of Rust's regex crate: classes, groups, repetitions, alternatives, ^ $ \\b, flags such as "
    "(?i) (?m) (?s); no look-around, no back-references"
)
_REFERENCE = re.compile(r"\$(?:\$|\{(?P<braced>[^}]*)\}|(?P<bare>[0-9A-Za-z_]+))")


def check_pattern(pattern: str) -> list[str]:
    """Names and numbers of a pattern's groups, `0` (all of it) included.

    Raises:
        ValueError: not an expression, or too big; says what is valid.
    """
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


class Substitution(BaseModel):
    """One pattern and what its matches become."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """Name of the definition."""
    substitutions: tuple[Substitution, ...] = Field(min_length=1)
    """What to replace, in order."""

    @property
    def reads_text(self) -> bool:
        """Texts are rewritten."""
        return True

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
