"""Whether answers, or all actions, have the form that was asked for: a regular expression, JSON, a JSON schema, tags.

JSON schemas are a small part of JSON Schema (2020-12): enough to say what an answer must hold, nothing that is slow or
reaches out. The package jsonschema validates. It ignores keywords that it does not know, follows `$ref` and matches
`pattern` by backtracking, so a schema has to obey a schema of ours first: any keyword that is not listed is refused. A
rule that does nothing is a bug that looks like a success. Left out on purpose: pattern (use the rule `regex`), $ref,
and the combinators; what is left takes time linear in the value and visits nothing but the value.
"""

from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

import msgspec
import polars as pl
from pydantic import BaseModel, Field, model_validator

from pipelines.score.scorers import texts
from pipelines.score.scorers.protocol import Columns, ScorerInputs
from pipelines.score.scorers.texts import AnswerScorer, is_blank, pattern_fault

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

_TYPE = {"enum": ["object", "array", "string", "number", "integer", "boolean", "null"]}
_TYPES = {"type": "array", "items": _TYPE, "minItems": 1}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_SCHEMA = {"$ref": "#"}
_KEYWORDS: dict[str, Any] = {
    "type": {"if": {"type": "array"}, "then": _TYPES, "else": _TYPE},
    "enum": {"type": "array", "minItems": 1},
    "const": {},
    "properties": {"type": "object", "additionalProperties": _SCHEMA},
    "required": {"type": "array", "items": {"type": "string"}},
    "additionalProperties": {"type": "boolean"},
    "items": _SCHEMA,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
}
"""The keywords that a schema may have, and the schema of what each one says."""


def validator(schema: dict[str, Any]) -> "Draft202012Validator":
    """What tells whether a value obeys a schema without a fault, by `is_valid`."""
    # Imported here: most jobs check no schema, and the two take as long to load as the scorers.
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # Without a registry of its own jsonschema would fetch a reference that it does not know.
    return Draft202012Validator(schema, registry=Registry())


def schema_fault(schema: Any) -> str | None:
    """What is wrong with a schema, with the place; None if nothing is."""
    from jsonschema.exceptions import best_match

    try:
        error = best_match(_of_schemas().iter_errors(schema))
    except RecursionError:
        return "the schema is nested too deeply"
    if error is None:
        return None
    place = ".".join(map(str, ["schema", *error.absolute_path]))
    return f"{place}: {error.message}; valid keywords: {', '.join(_KEYWORDS)}"


@cache
def _of_schemas() -> "Draft202012Validator":
    return validator({"type": "object", "properties": _KEYWORDS, "additionalProperties": False})


class Regex(BaseModel, frozen=True, extra="forbid"):
    """The text matches a regular expression (Rust's syntax; linear time on every text)."""

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


class Json(BaseModel, frozen=True, extra="forbid"):
    """The text is JSON (RFC 8259), and of a type."""

    kind: Literal["json"] = "json"
    """Name of the rule."""
    type: Literal["any", "object", "array"] = "any"
    """What it has to be."""

    def obeyed(self, texts: pl.Series) -> pl.Series:
        """Booleans, NULL where the text is."""
        return _decoded(texts, lambda value: self.type == "any" or isinstance(value, _CONTAINERS[self.type]))


class JsonSchema(BaseModel, frozen=True, extra="forbid"):
    """The text is JSON that obeys a small JSON schema; see `json_schema` for the keywords."""

    kind: Literal["json_schema"] = "json_schema"
    """Name of the rule."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if (fault := schema_fault(self.schema_)) is not None:
            raise ValueError(fault)
        return self

    def obeyed(self, texts: pl.Series) -> pl.Series:
        """Booleans, NULL where the text is."""
        return _decoded(texts, validator(self.schema_).is_valid)


class Tags(BaseModel, frozen=True, extra="forbid"):
    """Every tag is opened once and closed once, one after the other, in the order given."""

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
            inner = r"\s*".join(f"<{tag}>(?s:.*)</{tag}>" for tag in (tag.replace(".", r"\.") for tag in self.tags))
            rules.append(text.str.contains(rf"\A\s*{inner}\s*\z"))
        obeyed = pl.all_horizontal(rule.fill_null(False) for rule in rules)
        return texts.to_frame("text").select(pl.when(text.is_not_null()).then(obeyed)).to_series()


Rule: TypeAlias = Annotated[Regex | Json | JsonSchema | Tags, Field(discriminator="kind")]
"""Any rule, told apart by `kind`."""
_CONTAINERS: dict[str, type] = {"object": dict, "array": list}


def _decoded(texts: pl.Series, test: Any) -> pl.Series:
    """What a test says of each text's JSON value; false for a text that is none. Each distinct text is read once."""

    def obeys(text: str) -> bool:
        try:
            return bool(test(msgspec.json.decode(text)))
        except (msgspec.DecodeError, RecursionError):
            return False

    distinct = texts.unique().drop_nulls().alias("text")
    obeyed = pl.Series("obeyed", map(obeys, distinct.to_list()), dtype=pl.Boolean)
    known = pl.DataFrame([distinct, obeyed])
    return texts.to_frame("text").join(known, on="text", how="left", maintain_order="left").get_column("obeyed")


_STEPS = ("action", "is_active", "is_copied_context", "tool_calls")


class FormatValidity(AnswerScorer):
    """1 if the text obeys the rule, else 0.

    Source: the format rewards of DeepSeek-R1 (arXiv 2501.12948); as a check, any. Rules: a regular expression, JSON, a
    small JSON schema, tags. Of actions, each gets a score and the episode their mean; an action that is only a native
    tool call has no text and gets none. O(characters); JSON is decoded in Python, once for each distinct text.
    """

    name: ClassVar[str] = "format_validity"
    columns: ClassVar[Columns] = Columns(steps=_STEPS)
    helpers: ClassVar[tuple[ModuleType, ...]] = (texts,)

    rule: Rule
    """What the text has to obey."""
    of: Literal["answer", "actions"] = "answer"
    """The answer, or every action."""

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        if self.of == "actions":
            return self._of_actions(inputs)
        answered = self.answers(inputs)
        value = pl.col("value")
        reason = None if self.no_answer is not None else self.no_answer_reason()
        return answered.with_columns(value=self._obeyed(answered.get_column("answer"))).select(
            "episode_id",
            value=value.fill_null(self.no_answer) if self.no_answer is not None else value,
            reason=pl.when(value.is_null()).then(pl.lit(reason, pl.String)),
        )

    def _of_actions(self, inputs: ScorerInputs) -> pl.DataFrame:
        only_calls = is_blank(pl.col("action")) & pl.col("tool_calls").is_not_null()
        counts = pl.col("is_active").fill_null(True) & ~pl.col("is_copied_context").fill_null(False)
        steps = inputs.steps.filter(counts & ~only_calls).sort("episode_id", "step_index")
        parts = steps.select(part=self.extracted(pl.col("action"))).get_column("part")
        scored = steps.select(
            "episode_id",
            "step_index",
            value=self._obeyed(parts).fill_null(0.0 if self.no_answer is None else self.no_answer),
        )
        means = scored.group_by("episode_id").agg(
            pl.col("value").mean(),
            metrics=pl.struct(actions=pl.len(), valid=(pl.col("value") == 1.0).sum()).struct.json_encode(),
        )
        episodes = inputs.episodes.join(means, on="episode_id", how="left", maintain_order="left").with_columns(
            reason=pl.when(pl.col("value").is_null()).then(pl.lit("no action has text"))
        )
        return pl.concat([episodes, scored], how="diagonal")

    def _obeyed(self, parts: pl.Series) -> pl.Series:
        return self.rule.obeyed(parts).cast(pl.Float64)
