"""The answer equals, or contains, what the ground truth says."""

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from pipelines.score.scorers.texts import number
from pipelines.score.scorers.truths import TruthScorer


class ExactMatch(TruthScorer):
    """1 if the normalised answer matches one of the normalised truths (or every one of them), else 0.

    .. code-block:: text

        equals     n(answer) = n(truth)       or, with numbers, |x - y| <= tolerance * max(1, |y|)
        contains   n(truth) occurs in n(answer)

    Source: the exact match of SQuAD (arXiv 1606.05250); `contains` with `require="all"` and `answer="all"` is how
    tau-bench checks outputs (arXiv 2406.12045). One score per episode; O(characters x truths).
    """

    name: ClassVar[str] = "exact_match"

    mode: Literal["equals", "contains"] = "equals"
    """Compare whole texts, or look for the truth inside the answer."""
    require: Literal["any", "all"] = "any"
    """Of several truths, one suffices, or all are needed."""
    numbers: bool = False
    """Under `equals`: compare as numbers where answer and truth are numbers (`$1,000` and `1000.0`)."""
    tolerance: float = Field(default=1e-9, ge=0.0)
    """Relative difference of numbers that are the same."""

    def compared(self, pairs: pl.DataFrame) -> pl.DataFrame:
        """Whether one truth matches, or all; metrics count them."""
        matches = pl.col("matches")
        return (
            pairs.with_columns(matches=self._matches())
            .group_by("episode_id")
            .agg(
                value=(matches.all() if self.require == "all" else matches.any()).cast(pl.Float64),
                why=pl.lit(None, pl.String),
                metrics=pl.struct(truths=pl.len(), matched=matches.sum()).struct.json_encode(),
            )
        )

    def _matches(self) -> pl.Expr:
        plain, truth = pl.col("a"), pl.col("b")
        if self.mode == "contains":
            return plain.str.contains(truth, literal=True)
        if not self.numbers:
            return plain == truth
        x, y = number(pl.col("answer")), number(pl.col("truth"))
        close = (x - y).abs() <= self.tolerance * pl.max_horizontal(y.abs(), pl.lit(1.0))
        return (plain == truth) | close.fill_null(False)
