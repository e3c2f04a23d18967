"""What a filter is: a frozen configuration that says which rows it drops, and why, with the figures.

A filter sees the episodes that the filters before it left, as a narrow frame of facts (`pipelines.select.facts`), and
their steps. It returns drops only; whatever it does not name stays. Unknown is never 0: a fact that is NULL is dropped
with a reason of its own, or kept where the filter says `unknown = "keep"`.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import polars as pl
from pydantic import BaseModel, ConfigDict

DROPS = {"episode_id": pl.Int64, "step_index": pl.Int32, "reason": pl.String}
"""Schema of drops: step_index NULL drops the whole episode."""
Unknown = Literal["drop", "keep"]
UNKNOWN = {
    "score": "unscored",
    "tokens": "number of tokens unknown",
    "version": "policy version unknown",
    "credit_state": "no scored sibling in the credit job",
}
"""Fact -> the reason of a drop because it is NULL, which `unknown = "keep"` spares."""


class Filter(BaseModel, ABC):
    """Base of the filters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    """Name of the filter."""
    primary: ClassVar[str | None] = None
    """The option that `--filter KIND=VALUE` sets."""

    def facts(self) -> frozenset[str]:
        """Names of the facts it reads beyond those that every episode has; see `pipelines.select.facts`."""
        return frozenset()

    @abstractmethod
    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Rows of `DROPS`, episodes at most once: what it drops of the episodes that are left (their facts).

        The active steps that are left, of these episodes and maybe of others, have the columns of `steps`, lazily.
        """


def dropped(episodes: pl.DataFrame, *tests: tuple[pl.Expr, pl.Expr]) -> pl.DataFrame:
    """Whole episodes that a test marks (NULL is false); the first test that applies gives the reason."""
    reason = pl.coalesce(*(pl.when(test).then(words) for test, words in tests), pl.lit(None, pl.String))
    marked = episodes.select("episode_id", pl.lit(None, pl.Int32).alias("step_index"), reason.alias("reason"))
    return marked.filter(pl.col("reason").is_not_null())


def unknown_test(column: str, unknown: Unknown) -> list[tuple[pl.Expr, pl.Expr]]:
    """The test that drops episodes whose fact is NULL; none if they are kept."""
    return [(pl.col(column).is_null(), pl.lit(UNKNOWN[column]))] if unknown == "drop" else []


def shown(value: pl.Expr | float) -> pl.Expr:
    """A number in a reason, to six digits: 3, 0.5, 1.25e-7."""
    number = value if isinstance(value, pl.Expr) else pl.lit(float(value))
    return number.cast(pl.Float64).round_sig_figs(6).cast(pl.String).str.strip_suffix(".0")
