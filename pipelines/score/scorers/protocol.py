"""Base classes of built-in scorers: a frozen configuration with one pure function from frames to scores.

A scorer declares the columns that it reads, so that a job reads only these; it opens no lake to score. The base class
checks frames before and scores after the computation, so a scorer is little more than its formula. Further bases read
an episode's answer, and compare it with the ground truth.

Whitespace is Unicode's White_Space, punctuation is ASCII's (Python's `string.punctuation`), as in the SQuAD script.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Literal, Self, final

import msgspec
import polars as pl
from pydantic import BaseModel, model_validator

from lake import ids
from lake.errors import ContractError
from lake.read.snapshot import Snapshot
from lake.tables import TABLES

SCORES = pl.Schema(
    {
        "episode_id": pl.Int64,
        "step_index": pl.Int32,
        "value": pl.Float64,
        "reason": pl.String,
        "error": pl.String,
        "metrics": pl.String,
    }
)
"""Columns of a scorer's scores; the job adds group, run, scorer and version."""
LONGEST_TEXT = 8192
"""Maximum characters of a stored reason or error."""
_KEYS = {
    "episodes": ("episode_id",),
    "steps": ("episode_id", "step_index"),
    "spans": ("episode_id",),
    "ratios": ("episode_id", "step_index"),
    "tokens": ("episode_id", "step_index"),
}


@dataclass(frozen=True, slots=True)
class ScorerColumns:
    """Columns that a scorer reads from each table, without its keys."""

    episodes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    ratios: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    def tables(self) -> dict[str, tuple[str, ...]]:
        """Return table -> columns, keys first, for `episodes` and the other tables that the scorer reads."""
        tables = {}
        for table, keys in _KEYS.items():
            columns = getattr(self, table)
            if columns or table == "episodes":
                tables[table] = tuple(dict.fromkeys((*keys, *columns)))
        return tables


@dataclass(frozen=True, slots=True)
class ScorerInputs:
    """Rows to score: all rows of some episodes. Tables that a scorer does not read may be empty."""

    episodes: pl.DataFrame
    """One row per episode to score."""
    steps: pl.DataFrame = field(default_factory=pl.DataFrame)
    """Steps of the episodes, in any order."""
    spans: pl.DataFrame = field(default_factory=pl.DataFrame)
    """Spans of the episodes, in any order."""
    ratios: pl.DataFrame = field(default_factory=pl.DataFrame)
    """Log-probabilities of the steps, in any order."""
    tokens: pl.DataFrame = field(default_factory=pl.DataFrame)
    """Token counts of the steps, in any order."""


class Scorer(BaseModel, ABC, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of the built-in scorers: a configuration, a version, and `scores`.

    To add one, write a class in this package with formula and source in its docstring, `name` and `columns` (and
    `helpers`) as class variables, and `_score`. Then add a line in `SCORERS`.
    """

    name: ClassVar[str]
    """Name in the registry, and in `scores.scorer` unless the job sets another."""
    columns: ClassVar[ScorerColumns]
    """Columns that it reads under any configuration."""
    helpers: ClassVar[tuple[ModuleType, ...]] = ()
    """Modules whose source decides its scores, in addition to those of its class and its base classes."""

    @property
    def version(self) -> str:
        """Hash of the source and the configuration, as 13 characters: equal versions give equal scores."""
        config = msgspec.json.encode(self.model_dump(mode="json"), order="deterministic").decode()
        bases = [base for base in type(self).__mro__ if issubclass(base, Scorer)]
        modules = {sys.modules[base.__module__] for base in bases}.union(*(base.helpers for base in bases))
        sources = map(_read_source, sorted(modules, key=lambda module: module.__name__))
        return ids.to_text(ids.key_hash("scorer", self.name, config, *sources))

    def reads(self) -> ScorerColumns:
        """Return the columns that it reads under this configuration."""
        return self.columns

    def check(self, snapshot: Snapshot) -> None:
        """Raise UsageError if an option names something that the lake does not have; called before the run."""

    @final
    def scores(self, inputs: ScorerInputs) -> pl.DataFrame:
        """Return scores of whole episodes (`step_index` NULL), of steps, or of both; see the scorer.

        The inputs have the columns of `reads`; all-NULL columns may have any type. The rows are those of `SCORES`:
        value is finite, or NULL. Where it is NULL, reason says why there is nothing to judge (no tool call, no ground
        truth, nothing recorded), or error says why the record cannot be judged (invalid JSON, longer than a limit,
        contradictory, or not computed yet by another job). metrics is a JSON object, or NULL. ContractError if a table
        lacks a column, a column has the wrong type, or an episode occurs twice.
        """
        scores = self._score(self._read_inputs(inputs))
        finite = pl.col("value").is_finite()
        return (
            scores.with_columns(pl.lit(None, dtype).alias(n) for n, dtype in SCORES.items() if n not in scores.columns)
            .select(pl.col(name).cast(dtype) for name, dtype in SCORES.items())
            .with_columns(
                value=pl.when(finite).then("value"),
                error=pl.when(pl.col("value").is_null() | finite)
                .then("error")
                .otherwise(pl.lit("the score is not a finite number")),
            )
            .with_columns(pl.col("reason", "error").str.head(LONGEST_TEXT))
        )

    @abstractmethod
    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        """Return the scores; missing columns of `SCORES` become NULL."""

    def _read_inputs(self, inputs: ScorerInputs) -> ScorerInputs:
        """Return the inputs with exactly the columns that it reads, in the types of the lake's tables."""
        tables = self.reads().tables()
        frames = {name: self._read_table(name, getattr(inputs, name), columns) for name, columns in tables.items()}
        episodes = frames["episodes"]
        if (duplicates := episodes.filter(pl.col("episode_id").is_duplicated())).height:
            msg = f"scorer `{self.name}`: episode {duplicates['episode_id'][0]} is in `episodes` twice; give each once"
            raise ContractError(msg)
        for name in tables.keys() - {"episodes"}:
            frames[name] = frames[name].join(episodes.select("episode_id"), on="episode_id", how="semi")
        return ScorerInputs(**frames)

    def _read_table(self, name: str, frame: pl.DataFrame, columns: tuple[str, ...]) -> pl.DataFrame:
        schema = TABLES[name].polars()
        if frame.is_empty() and not frame.columns:
            return pl.DataFrame(schema={column: schema[column] for column in columns})
        if missing := [column for column in columns if column not in frame.columns]:
            msg = f"scorer `{self.name}`: `{name}` lacks the columns {missing}; it reads {', '.join(columns)}"
            raise ContractError(msg)
        return frame.select(self._read_column(name, frame[column], schema[column]) for column in columns)

    def _read_column(self, table: str, series: pl.Series, dtype: pl.DataType) -> pl.Series:
        """Return the column in the table's type. Cast integers to any numeric type, all-NULL columns to any type."""
        if series.dtype == dtype:
            return series
        if series.null_count() == len(series):
            return pl.repeat(None, len(series), dtype=dtype, eager=True).alias(series.name)
        if series.dtype.is_integer() and dtype.is_numeric():
            return series.cast(dtype)
        msg = f"scorer `{self.name}`: column `{series.name}` of `{table}` is {series.dtype}; valid: {dtype}"
        raise ContractError(msg)


@cache
def _read_source(module: ModuleType) -> str:
    return inspect.getsource(module)


def divide(column: pl.Expr, by: int) -> pl.Expr:
    """Divide a column by a positive constant, as float64; NULL stays NULL.

    Polars multiplies a column by the reciprocal of a constant, but divides where the column has one row (version 2.1).
    So an episode alone would score differently than among others. With a column as the divisor, both divide.
    """
    return column / pl.when(column.is_not_null()).then(float(by))


_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


class Normalise(BaseModel, frozen=True, extra="forbid"):
    """Normalisation of texts before a comparison. With all five options: SQuAD's (arXiv 1606.05250), after NFKC."""

    unicode: bool = True
    """Unicode's compatibility form NFKC: full-width digits, ligatures and the like become plain."""
    lowercase: bool = True
    """Letters in lower case."""
    punctuation: bool = False
    """ASCII punctuation is dropped (`1,286.50` becomes `128650`)."""
    articles: bool = False
    """The words a, an, the are dropped."""
    whitespace: bool = True
    """Runs of whitespace are one space, none at the ends."""

    def apply(self, text: pl.Expr) -> pl.Expr:
        """Return the text, normalised in the order of the options; O(characters)."""
        if self.unicode:
            text = text.str.normalize("NFKC")
        if self.lowercase:
            text = text.str.to_lowercase()
        if self.punctuation:
            text = text.str.replace_all(_PUNCTUATION, "")
        if self.articles:
            text = text.str.replace_all(r"\b(a|an|the)\b", " ")
        if self.whitespace:
            text = text.str.replace_all(r"\s+", " ").str.strip_chars(" ")
        return text


def parse_number(text: pl.Expr) -> pl.Expr:
    """Return the number of a text without `$`, `%`, commas and whitespace; NULL if it is not a number."""
    bare = text.str.replace_all(r"[\s,$%]", "")
    number = pl.when(bare.str.contains(_NUMBER)).then(bare).cast(pl.Float64, strict=False)
    return pl.when(number.is_finite()).then(number)


def split_words(text: pl.Expr) -> pl.Expr:
    """Return lists of the text's words, which are separated by whitespace."""
    return text.str.extract_all(r"\S+")


def is_blank(text: pl.Expr) -> pl.Expr:
    """Return whether a text is NULL or only whitespace."""
    return text.str.strip_chars().fill_null("") == ""


def find_pattern_fault(pattern: str) -> str | None:
    """Return the fault of a regular expression (Rust's syntax, linear time on every text); None if it is valid."""
    try:
        pl.Series([""]).str.contains(pattern, strict=True)
    except pl.exceptions.ComputeError as error:
        return " ".join(str(error).split())
    return None


ANSWER_STEPS = ("action", "is_active")
"""Columns of `steps` that `AnswerScorer.answers` reads."""


class AnswerScorer(Scorer):
    """Base of the scorers of an episode's answer."""

    answer: Literal["last_text", "last", "all"] = "last_text"
    """The last action that has text; the last action; or all actions, joined by newlines."""
    extract: str | None = None
    """Regular expression (Rust's syntax) of the part that counts: its last match, or that match's first group."""
    no_answer: float | None = None
    """Score of an episode without an answer. None: unknown."""

    @model_validator(mode="after")
    def _check_extract(self) -> Self:
        if self.extract is not None and (fault := find_pattern_fault(self.extract)) is not None:
            msg = f"extract {self.extract!r} is not a regular expression: {fault}"
            raise ValueError(msg)
        return self

    def answers(self, inputs: ScorerInputs) -> pl.DataFrame:
        """Return episode_id and answer (NULL for none), in the order of the episodes. O(characters)."""
        text = pl.col("action")
        steps = inputs.steps.filter(pl.col("is_active").fill_null(True))
        if self.answer != "last":
            steps = steps.filter(~is_blank(text))
        selected = text.get(pl.col("step_index").arg_max())
        if self.answer == "all":
            selected = text.sort_by("step_index").str.join("\n")
        texts = steps.group_by("episode_id").agg(answer=selected)
        answer = self.extract_part(pl.col("answer"))
        if self.answer == "last":
            answer = pl.when(~is_blank(answer)).then(answer)
        return (
            inputs.episodes.select("episode_id")
            .join(texts, on="episode_id", how="left", maintain_order="left")
            .select("episode_id", answer=answer)
        )

    def extract_part(self, text: pl.Expr) -> pl.Expr:
        """Return the part of a text that counts; NULL for none."""
        if self.extract is None:
            return text
        last = text.str.extract_all(self.extract).list.last()
        try:
            pl.Series([""]).str.extract(self.extract, 1)
        except pl.exceptions.ComputeError:
            # The expression has no group.
            return last
        return pl.coalesce(last.str.extract(self.extract, 1), last)

    def no_answer_reason(self) -> str:
        """Return why an answer is NULL."""
        return "the episode has no answer" if self.extract is None else "the episode has no answer that `extract` finds"


class TruthScorer(AnswerScorer):
    """Base of the scorers that compare the answer with the ground truth."""

    columns: ClassVar[ScorerColumns] = ScorerColumns(episodes=("ground_truth",), steps=ANSWER_STEPS)

    truth_path: str = ""
    """Path of the truth in the ground truth, keys and positions separated by dots; empty: the whole."""
    normalise: Normalise = Normalise()
    """Normalisation of answer and truth before the comparison."""

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        normalise = self.normalise.apply
        answered = self.answers(inputs).with_columns(a=normalise(pl.col("answer")))
        truth = read_truths(inputs.episodes, self.truth_path)
        pairs = (
            truth.drop_nulls("truths")
            .select("episode_id", truth="truths")
            .explode("truth", empty_as_null=False, keep_nulls=False)
            .with_columns(b=normalise(pl.col("truth")))
            .filter(pl.col("b") != "")
            .join(answered.drop_nulls("answer"), on="episode_id")
        )
        error = pl.coalesce("truth_error", "why")
        unanswered = pl.col("answer").is_null() & pl.coalesce("truth_error", "truth_reason").is_null()
        return (
            answered.join(truth, on="episode_id", how="left", maintain_order="left")
            .join(self.compare(pairs), on="episode_id", how="left", maintain_order="left")
            .select(
                "episode_id",
                pl.when(unanswered).then(pl.lit(self.no_answer, pl.Float64)).otherwise("value").alias("value"),
                pl.when(unanswered)
                .then(pl.lit(self.no_answer_reason() if self.no_answer is None else None, pl.String))
                .when(pl.col("value").is_null() & error.is_null())
                .then(pl.coalesce("truth_reason", pl.lit("the ground truth is empty after normalisation")))
                .alias("reason"),
                error.alias("error"),
                pl.col("metrics"),
            )
        )

    @abstractmethod
    def compare(self, pairs: pl.DataFrame) -> pl.DataFrame:
        """Return episode_id, value, why (NULL, or the reason of a NULL value) and metrics.

        `pairs` has episode_id, answer, truth, and both normalised as a and b.
        """


def read_truths(episodes: pl.DataFrame, path: str) -> pl.DataFrame:
    """Return the texts at a path of each episode's ground truth (JSON): keys and positions separated by dots.

    Columns: episode_id, truths (list of texts, or NULL), truth_reason (why there is no text), truth_error (why the
    ground truth cannot be read); in the order of the episodes. Numbers and booleans are their JSON text. A list gives
    its elements, without nested lists and objects. Python decodes each distinct text once.
    """
    distinct = episodes.get_column("ground_truth").unique().drop_nulls()
    rows = [_read_truth(text, path) for text in distinct.to_list()]
    names = ("truths", "truth_reason", "truth_error")
    types = pl.List(pl.String), pl.String, pl.String
    truths = pl.DataFrame(rows, schema=list(zip(names, types, strict=True)), orient="row").with_columns(distinct)
    return (
        episodes.select("episode_id", "ground_truth")
        .join(truths, on="ground_truth", how="left", maintain_order="left")
        .with_columns(
            truth_reason=pl.when(pl.col("ground_truth").is_null())
            .then(pl.lit("the episode has no ground truth"))
            .otherwise("truth_reason")
        )
        .drop("ground_truth")
    )


def _read_truth(text: str, path: str) -> tuple[list[str] | None, str | None, str | None]:
    """Return the texts, why there is no text, and why the truth cannot be read."""
    try:
        truth = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None, None, "the ground truth is not JSON"
    for key in path.split(".") if path else ():
        if isinstance(truth, dict) and key in truth:
            truth = truth[key]
        elif isinstance(truth, list) and key.isdecimal() and int(key) < len(truth):
            truth = truth[int(key)]
        else:
            return None, f"the ground truth has nothing at {path!r}", None
    scalars = [_scalar_text(scalar) for scalar in (truth if isinstance(truth, list) else [truth])]
    if texts := [scalar for scalar in scalars if scalar is not None]:
        return texts, None, None
    return None, f"the ground truth has no text at {path!r}" if path else "the ground truth has no text", None


def _scalar_text(scalar: Any) -> str | None:
    if isinstance(scalar, str):
        return scalar
    return None if scalar is None or isinstance(scalar, (dict, list)) else msgspec.json.encode(scalar).decode()
