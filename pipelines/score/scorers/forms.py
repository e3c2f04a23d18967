"""Scorers of a text's form: whether it matches a rule (regular expression, JSON, JSON schema, tags), and its length.

JSON schemas are a subset of JSON Schema (2020-12) without slow keywords and external references. The package jsonschema
validates. It ignores unknown keywords, follows `$ref` and matches `pattern` by backtracking. So a schema must first
match a schema of this module, which rejects every unlisted keyword; an ignored keyword would look like a success. The
subset excludes pattern (use the rule `regex`), $ref, and the combinators. Its validation takes time linear in the value
and reads only the value.
"""

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

import msgspec
import polars as pl
from pydantic import BaseModel, Field, model_validator

from pipelines.score.scorers.protocol import (
    AnswerScorer,
    ScorerColumns,
    ScorerInputs,
    divide,
    find_pattern_fault,
    is_blank,
    split_words,
)

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
"""Valid keywords of a schema, with the schema of each keyword's value."""


def build_validator(schema: dict[str, Any]) -> "Draft202012Validator":
    """Return a validator of a faultless schema; its method `is_valid` tests a value."""
    # Imported here: most jobs check no schema, and the two packages take as long to load as the scorers.
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # Without a registry jsonschema would fetch unknown references.
    return Draft202012Validator(schema, registry=Registry())


def find_schema_fault(schema: Any) -> str | None:
    """Return the fault of a schema with its path; None for a valid schema."""
    from jsonschema.exceptions import best_match

    try:
        error = best_match(_build_schema_validator().iter_errors(schema))
    except RecursionError:
        return "the schema is nested too deeply"
    if error is None:
        return None
    path = ".".join(map(str, ["schema", *error.absolute_path]))
    return f"{path}: {error.message}; valid keywords: {', '.join(_KEYWORDS)}"


@cache
def _build_schema_validator() -> "Draft202012Validator":
    return build_validator({"type": "object", "properties": _KEYWORDS, "additionalProperties": False})


class Regex(BaseModel, frozen=True, extra="forbid"):
    """The text matches a regular expression (Rust's syntax; linear time on every text)."""

    kind: Literal["regex"] = "regex"
    """Name of the rule."""
    pattern: str
    """The expression."""
    full: bool = False
    """Match the whole text, not a part."""

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if (fault := find_pattern_fault(self.pattern)) is not None:
            msg = f"{self.pattern!r} is not a regular expression: {fault}"
            raise ValueError(msg)
        return self

    def test(self, texts: pl.Series) -> pl.Series:
        """Return booleans, NULL where the text is NULL."""
        return texts.str.contains(rf"\A(?:{self.pattern})\z" if self.full else self.pattern)


class Json(BaseModel, frozen=True, extra="forbid"):
    """The text is JSON (RFC 8259) of a type."""

    kind: Literal["json"] = "json"
    """Name of the rule."""
    type: Literal["any", "object", "array"] = "any"
    """Required type."""

    def test(self, texts: pl.Series) -> pl.Series:
        """Return booleans, NULL where the text is NULL."""
        return _test_json(texts, lambda value: self.type == "any" or isinstance(value, _CONTAINERS[self.type]))


class JsonSchema(BaseModel, frozen=True, extra="forbid"):
    """The text is JSON that matches a schema with the keywords of this module."""

    kind: Literal["json_schema"] = "json_schema"
    """Name of the rule."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema."""

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (fault := find_schema_fault(self.schema_)) is not None:
            raise ValueError(fault)
        return self

    def test(self, texts: pl.Series) -> pl.Series:
        """Return booleans, NULL where the text is NULL."""
        return _test_json(texts, build_validator(self.schema_).is_valid)


class Tags(BaseModel, frozen=True, extra="forbid"):
    """Every tag is opened once and closed once, in the configured order, without overlap."""

    kind: Literal["tags"] = "tags"
    """Name of the rule."""
    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.:-]*$")], ...] = Field(
        default=("think", "answer"), min_length=1
    )
    """Names of the tags."""
    only: bool = True
    """Allow only whitespace outside the tags."""

    @model_validator(mode="after")
    def _check_tags(self) -> Self:
        if len(set(self.tags)) < len(self.tags):
            msg = f"tags {list(self.tags)} contain a name twice; each tag is opened once"
            raise ValueError(msg)
        return self

    def test(self, texts: pl.Series) -> pl.Series:
        """Return booleans, NULL where the text is NULL."""
        text = pl.col("text")
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        positions = [text.str.find(mark, literal=True) for mark in marks]
        rules = [text.str.count_matches(mark, literal=True) == 1 for mark in marks]
        rules += [position < following for position, following in pairwise(positions)]
        if self.only:
            inner = r"\s*".join(f"<{tag}>(?s:.*)</{tag}>" for tag in (tag.replace(".", r"\.") for tag in self.tags))
            rules.append(text.str.contains(rf"\A\s*{inner}\s*\z"))
        obeyed = pl.all_horizontal(rule.fill_null(False) for rule in rules)
        return texts.to_frame("text").select(pl.when(text.is_not_null()).then(obeyed)).to_series()


Rule: TypeAlias = Annotated[Regex | Json | JsonSchema | Tags, Field(discriminator="kind")]
"""Any rule; `kind` selects it."""
_CONTAINERS: dict[str, type] = {"object": dict, "array": list}


def _test_json(texts: pl.Series, test: Any) -> pl.Series:
    """Return the result of a test on each text's JSON value; false for invalid JSON. Decode each distinct text once."""

    def obeys(text: str) -> bool:
        try:
            return bool(test(msgspec.json.decode(text)))
        except (msgspec.DecodeError, RecursionError):
            return False

    distinct = texts.unique().drop_nulls().alias("text")
    obeyed = pl.Series("obeyed", map(obeys, distinct.to_list()), dtype=pl.Boolean)
    verdicts = pl.DataFrame([distinct, obeyed])
    return texts.to_frame("text").join(verdicts, on="text", how="left", maintain_order="left").get_column("obeyed")


_STEPS = ("action", "is_active", "is_copied_context", "tool_calls")


class FormatValidity(AnswerScorer):
    """1 if the text matches the rule, else 0.

    Source: the format rewards of DeepSeek-R1 (arXiv 2501.12948); also usable as a check. Rules: a regular expression,
    JSON, a JSON schema, tags. With `of="actions"` each action gets a score, and the episode their mean; an action that
    is only a native tool call has no text and no score. O(characters); JSON is decoded in Python, once per distinct
    text.
    """

    name: ClassVar[str] = "format_validity"
    columns: ClassVar[ScorerColumns] = ScorerColumns(steps=_STEPS)

    rule: Rule
    """Rule for the text."""
    of: Literal["answer", "actions"] = "answer"
    """The answer, or every action."""

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        if self.of == "actions":
            return self._score_actions(inputs)
        answered = self.answers(inputs)
        value = pl.col("value")
        reason = None if self.no_answer is not None else self.no_answer_reason()
        return answered.with_columns(value=self._test(answered.get_column("answer"))).select(
            "episode_id",
            value=value.fill_null(self.no_answer) if self.no_answer is not None else value,
            reason=pl.when(value.is_null()).then(pl.lit(reason, pl.String)),
        )

    def _score_actions(self, inputs: ScorerInputs) -> pl.DataFrame:
        only_calls = is_blank(pl.col("action")) & pl.col("tool_calls").is_not_null()
        counts = pl.col("is_active").fill_null(True) & ~pl.col("is_copied_context").fill_null(False)
        steps = inputs.steps.filter(counts & ~only_calls).sort("episode_id", "step_index")
        texts = steps.select(part=self.extract_part(pl.col("action"))).get_column("part")
        scored = steps.select(
            "episode_id",
            "step_index",
            value=self._test(texts).fill_null(0.0 if self.no_answer is None else self.no_answer),
        )
        means = scored.group_by("episode_id").agg(
            pl.col("value").mean(),
            metrics=pl.struct(actions=pl.len(), valid=(pl.col("value") == 1.0).sum()).struct.json_encode(),
        )
        episodes = inputs.episodes.join(means, on="episode_id", how="left", maintain_order="left").with_columns(
            reason=pl.when(pl.col("value").is_null()).then(pl.lit("no action has text"))
        )
        return pl.concat([episodes, scored], how="diagonal")

    def _test(self, texts: pl.Series) -> pl.Series:
        return self.rule.test(texts).cast(pl.Float64)


_ACTIONS = ("action", "is_active", "is_copied_context")
_TOKENS = ("encoding_id", "provenance", "n_action")


class LengthPenalty(AnswerScorer):
    r"""0 inside the limits, down to -1 beyond them.

    .. code-block:: text

        L <= max_length - cache            0
        L <= max_length                    (max_length - cache - L) / cache
        L >  max_length                    -1
        L <  min_length                    -(min_length - L) / min_length, in addition

    Source: the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), which counts the tokens of the
    response (there max_length 20480, cache 4096); the lower limit is ours. Tokens are the engine's (`tokens.n_action`;
    rendered ones do not count). Inactive steps and copied context count nothing. O(characters), or O(steps) for tokens.
    """

    name: ClassVar[str] = "length"
    columns: ClassVar[ScorerColumns] = ScorerColumns(steps=_ACTIONS, tokens=_TOKENS)

    max_length: int = Field(ge=1)
    """Length of the full penalty."""
    cache: int = Field(default=0, ge=0)
    """Width of the soft range below `max_length`; 0 is a hard limit."""
    min_length: int = Field(default=0, ge=0)
    """Minimum length without a penalty; 0: no minimum."""
    unit: Literal["tokens", "characters", "words"] = "tokens"
    """Unit of length."""
    of: Literal["episode", "steps", "answer"] = "episode"
    """Text to measure: all actions together; each action (the episode gets the mean); or the answer (not in tokens)."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.cache > self.max_length:
            msg = f"cache is {self.cache}, more than max_length, {self.max_length}; it is the width of the soft range"
            raise ValueError(msg)
        if self.min_length > self.max_length - self.cache:
            msg = f"min_length is {self.min_length}, above max_length - cache, {self.max_length - self.cache}"
            raise ValueError(msg)
        if self.of == "answer" and self.unit == "tokens":
            msg = 'the tokens of an answer are unknown; count characters or words, or use of="steps"'
            raise ValueError(msg)
        return self

    def reads(self) -> ScorerColumns:
        """Return the columns: texts or token counts."""
        steps = _ACTIONS if self.unit != "tokens" else _ACTIONS[1:]
        return ScorerColumns(steps=steps, tokens=_TOKENS if self.unit == "tokens" else ())

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        if self.of == "answer":
            counted = self.answers(inputs).select("episode_id", length=self._count_units(pl.col("answer")))
            return self._grade(counted, pl.lit(self.no_answer_reason()))
        steps = self._measure_steps(inputs).with_columns(value=self._penalty())
        length = pl.col("length")
        complete = length.null_count() == 0
        summed = steps.group_by("episode_id").agg(
            length=pl.when(complete).then(length.sum()), mean=pl.when(complete).then(pl.col("value").mean())
        )
        episodes = inputs.episodes.join(summed, on="episode_id", how="left", maintain_order="left")
        why = pl.lit("no tokens of the engine are stored for some step" if self.unit == "tokens" else "no active step")
        graded = self._grade(episodes, why)
        if self.of == "episode":
            return graded
        reason = pl.when(length.is_null()).then(pl.lit("no tokens of the engine are stored for the step"))
        means = graded.with_columns(value=episodes.get_column("mean"))
        metrics = pl.struct("length").struct.json_encode()
        return pl.concat([means, steps.with_columns(reason=reason, metrics=metrics)], how="diagonal_relaxed")

    def _measure_steps(self, inputs: ScorerInputs) -> pl.DataFrame:
        """Return episode_id, step_index and length of each action; NULL where it is unknown."""
        counts = pl.col("is_active").fill_null(True) & ~pl.col("is_copied_context").fill_null(False)
        steps = inputs.steps.filter(counts).sort("episode_id", "step_index")
        if self.unit != "tokens":
            return steps.select("episode_id", "step_index", length=self._count_units(pl.col("action")))
        n_action = pl.col("n_action")
        engine = (
            inputs.tokens.filter(pl.col("provenance") == "engine")
            .group_by("episode_id", "step_index")
            .agg(length=pl.when(n_action.n_unique() == 1).then(n_action.first()).cast(pl.Int64))
        )
        keys = steps.select("episode_id", "step_index")
        return keys.join(engine, on=["episode_id", "step_index"], how="left", maintain_order="left")

    def _count_units(self, text: pl.Expr) -> pl.Expr:
        count = text.str.len_chars() if self.unit == "characters" else split_words(text).list.len()
        return count.cast(pl.Int64)

    def _grade(self, counted: pl.DataFrame, why: pl.Expr) -> pl.DataFrame:
        length = pl.col("length")
        value = self._penalty()
        return counted.select(
            "episode_id",
            value=value if self.no_answer is None or self.of != "answer" else value.fill_null(self.no_answer),
            reason=pl.when(length.is_null() & pl.lit(self.no_answer is None or self.of != "answer")).then(why),
            metrics=pl.when(length.is_not_null()).then(pl.struct("length").struct.json_encode()),
        )

    def _penalty(self) -> pl.Expr:
        """Return the formula over the column `length`."""
        length = pl.col("length")
        soft = self.max_length - self.cache
        over = (
            pl.when(length <= soft)
            .then(0.0)
            .when(length <= self.max_length)
            .then(divide(soft - length, max(self.cache, 1)))
            .when(length > self.max_length)
            .then(-1.0)
        )
        if self.min_length == 0:
            return over
        return over - divide((self.min_length - length).clip(lower_bound=0), self.min_length)
