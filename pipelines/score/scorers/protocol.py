"""What a built-in scorer is: a frozen configuration with one pure function from frames to scores.

A scorer says which columns it reads, so that a job reads nothing else; it opens no lake to score. The base class checks
frames on the way in and values on the way out, so that a scorer is little more than its formula.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import ClassVar, final

import msgspec
import polars as pl
from pydantic import BaseModel

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
"""Columns of a scorer's result; the job adds group, run, scorer and version."""
LONGEST_TEXT = 8192
"""Characters of a reason or an error that are kept."""
_KEYS = {
    "episodes": ("episode_id",),
    "steps": ("episode_id", "step_index"),
    "spans": ("episode_id",),
    "ratios": ("episode_id", "step_index"),
    "tokens": ("episode_id", "step_index"),
}


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns that a scorer reads of each table, its keys aside."""

    episodes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    ratios: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    def tables(self) -> dict[str, tuple[str, ...]]:
        """Table -> columns, keys first; `episodes` always, others if they are read."""
        wanted = {name: getattr(self, name) for name in _KEYS}
        return {
            name: tuple(dict.fromkeys((*_KEYS[name], *columns)))
            for name, columns in wanted.items()
            if columns or name == "episodes"
        }


@dataclass(frozen=True, slots=True)
class ScorerInputs:
    """Rows to score: all rows of some episodes. Tables that a scorer does not read may stay empty."""

    episodes: pl.DataFrame
    """One row per episode to score."""
    steps: pl.DataFrame = field(default_factory=pl.DataFrame)
    """Their steps, in any order."""
    spans: pl.DataFrame = field(default_factory=pl.DataFrame)
    """Their spans, in any order."""
    ratios: pl.DataFrame = field(default_factory=pl.DataFrame)
    """Log-probabilities of their steps, in any order."""
    tokens: pl.DataFrame = field(default_factory=pl.DataFrame)
    """Token counts of their steps, in any order."""


class Scorer(BaseModel, ABC, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of the built-in scorers: a configuration, a version, and `scores`.

    To add one: a file of its own in this package, formula and source in the class's docstring, `name`, `columns` and
    `helpers` as class variables, `_score`, and a line in `SCORERS`.
    """

    name: ClassVar[str]
    """Name in the registry, and in `scores.scorer` unless the job gives another."""
    columns: ClassVar[Columns]
    """What it reads, whatever its configuration."""
    helpers: ClassVar[tuple[ModuleType, ...]] = ()
    """Modules whose source decides its values, beside those of its class and its base classes."""

    @property
    def version(self) -> str:
        """Hash of the source and the configuration, as 13 characters: equal versions give equal scores."""
        config = msgspec.json.encode(self.model_dump(mode="json"), order="deterministic").decode()
        bases = [base for base in type(self).__mro__ if issubclass(base, Scorer)]
        modules = {sys.modules[base.__module__] for base in bases}.union(*(base.helpers for base in bases))
        sources = map(_source, sorted(modules, key=lambda module: module.__name__))
        return ids.to_text(ids.key_hash("scorer", self.name, config, *sources))

    def reads(self) -> Columns:
        """What it reads under this configuration."""
        return self.columns

    def check(self, snapshot: Snapshot) -> None:
        """Called before anything runs: UsageError if an option names something that this lake does not have."""

    @final
    def scores(self, inputs: ScorerInputs) -> pl.DataFrame:
        """Scores of whole episodes (`step_index` NULL), of steps, or of both; see the scorer.

        The inputs have the columns that `reads` names; all-NULL ones may have any type. Gives rows of `SCORES`: value
        is finite, or NULL. Then reason says why there is nothing to judge (no tool was called, no ground truth, nothing
        recorded), or error why what is there cannot be judged (it is no JSON, longer than a limit, contradicts itself,
        or another job has not computed it yet). metrics is a JSON object, NULL if there are none. ContractError if a
        table lacks a column, a column has the wrong type, or an episode stands there twice.
        """
        found = self._score(self._checked(inputs))
        finite = pl.col("value").is_finite()
        return (
            found.with_columns(pl.lit(None, dtype).alias(n) for n, dtype in SCORES.items() if n not in found.columns)
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
        """The scores; columns of `SCORES` that are left out are NULL."""

    def _checked(self, inputs: ScorerInputs) -> ScorerInputs:
        """The inputs with exactly the columns that are read, in the types of the lake's tables."""
        wanted = self.reads().tables()
        frames = {name: self._table(name, getattr(inputs, name), columns) for name, columns in wanted.items()}
        episodes = frames["episodes"]
        if (twice := episodes.filter(pl.col("episode_id").is_duplicated())).height:
            msg = f"scorer `{self.name}`: episode {twice['episode_id'][0]} is in `episodes` twice; give each once"
            raise ContractError(msg)
        for name in wanted.keys() - {"episodes"}:
            frames[name] = frames[name].join(episodes.select("episode_id"), on="episode_id", how="semi")
        return ScorerInputs(**frames)

    def _table(self, name: str, frame: pl.DataFrame, columns: tuple[str, ...]) -> pl.DataFrame:
        schema = TABLES[name].polars()
        if frame.is_empty() and not frame.columns:
            return pl.DataFrame(schema={column: schema[column] for column in columns})
        if missing := [column for column in columns if column not in frame.columns]:
            msg = f"scorer `{self.name}`: `{name}` lacks the columns {missing}; it reads {', '.join(columns)}"
            raise ContractError(msg)
        return frame.select(self._column(name, frame[column], schema[column]) for column in columns)

    def _column(self, table: str, series: pl.Series, dtype: pl.DataType) -> pl.Series:
        """The column in the table's type; whole numbers pass for any number, and nothing but NULL for anything."""
        if series.dtype == dtype:
            return series
        if series.null_count() == len(series):
            return pl.repeat(None, len(series), dtype=dtype, eager=True).alias(series.name)
        if series.dtype.is_integer() and dtype.is_numeric():
            return series.cast(dtype)
        msg = f"scorer `{self.name}`: column `{series.name}` of `{table}` is {series.dtype}; valid: {dtype}"
        raise ContractError(msg)


@cache
def _source(module: ModuleType) -> str:
    return inspect.getsource(module)


def divided(column: pl.Expr, by: int) -> pl.Expr:
    """A column over a positive constant, as float64; NULL stays NULL.

    Polars multiplies a column by the reciprocal of a constant, but divides where the column has one row (version 2.1):
    the same episode would score otherwise alone than in company. Divided by a column, both are a division.
    """
    return column / pl.when(column.is_not_null()).then(float(by))
