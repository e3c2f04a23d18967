"""Rules that a text obeys or not: a regular expression, JSON, a JSON schema, tags."""

from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipelines.score.scorers import json_schema
from pipelines.score.scorers.texts import pattern_fault


class Regex(BaseModel):
    """The text matches a regular expression (Rust's syntax; linear time on every text)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["regex"] = "regex"
    """Name of the rule."""
    pattern: str
    """The expression."""
    full: bool = False
    """It must match the whole text, not a part."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if (fault := pattern_fault(self.pattern)) is not None:
            msg = f"{self.pattern!r} is no regular expression: {fault}"
            raise ValueError(msg)
        return self

    def obeyed(self, texts: pl.Series) -> pl.Series:
        """Booleans, NULL where the text is."""
        return texts.str.contains(rf"\A(?:{self.pattern})\z" if self.full else self.pattern)


class Json(BaseModel):
    """The text is JSON (RFC 8259), and of a type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["json"] = "json"
    """Name of the rule."""
    type: Literal["any", "object", "array"] = "any"
    """What it has to be."""

    def obeyed(self, texts: pl.Series) -> pl.Series:
        """Booleans, NULL where the text is."""
        return _decoded(texts, lambda value: self.type == "any" or isinstance(value, _TYPES[self.type]))


class JsonSchema(BaseModel):
    """The text is JSON that obeys a small JSON schema; see `json_schema` for the keywords."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["json_schema"] = "json_schema"
    """Name of the rule."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if (fault := json_schema.fault(self.schema_)) is not None:
            raise ValueError(fault)
        return self

    def obeyed(self, texts: pl.Series) -> pl.Series:
        """Booleans, NULL where the text is."""
        return _decoded(texts, json_schema.validator(self.schema_).is_valid)


class Tags(BaseModel):
    """Every tag is opened once and closed once, one after the other, in the order given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["tags"] = "tags"
    """Name of the rule."""
    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.:-]*$")], ...] = Field(
        default=("think", "answer"), min_length=1
    )
    """Their names."""
    only: bool = True
    """Nothing but whitespace stands outside them."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.tags)) < len(self.tags):
            msg = f"tags {list(self.tags)} name one twice; each is opened once"
            raise ValueError(msg)
        return self

    def obeyed(self, texts: pl.Series) -> pl.Series:
        """Booleans, NULL where the text is."""
        text = pl.col("text")
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        places = [text.str.find(mark, literal=True) for mark in marks]
        rules = [text.str.count_matches(mark, literal=True) == 1 for mark in marks]
        rules += [one < other for one, other in pairwise(places)]
        if self.only:
            inner = r"\s*".join(f"<{tag}>(?s:.*)</{tag}>" for tag in map(_escaped, self.tags))
            rules.append(text.str.contains(rf"\A\s*{inner}\s*\z"))
        obeyed = pl.all_horizontal(rule.fill_null(False) for rule in rules)
        return texts.to_frame("text").select(pl.when(text.is_not_null()).then(obeyed)).to_series()


Rule: TypeAlias = Annotated[Regex | Json | JsonSchema | Tags, Field(discriminator="kind")]
"""Any rule, told apart by `kind`."""
_TYPES: dict[str, type] = {"object": dict, "array": list}


def _decoded(texts: pl.Series, test: Any) -> pl.Series:
    """What a test says of each text's JSON value; false for a text that is none. Each distinct text is read once."""
    distinct = texts.unique().drop_nulls().alias("text")
    known = pl.DataFrame(
        {"text": distinct, "obeyed": [_test(text, test) for text in distinct.to_list()]}, schema=_KNOWN
    )
    return texts.to_frame("text").join(known, on="text", how="left", maintain_order="left").get_column("obeyed")


_KNOWN = pl.Schema({"text": pl.String, "obeyed": pl.Boolean})


def _test(text: str, test: Any) -> bool:
    try:
        return bool(test(msgspec.json.decode(text)))
    except (msgspec.DecodeError, RecursionError):
        return False


def _escaped(tag: str) -> str:
    return tag.replace(".", r"\.")
