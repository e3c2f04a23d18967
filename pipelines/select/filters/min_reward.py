"""Minimum reward: episodes worth imitating (filtered behaviour cloning, RFT, STaR)."""

from typing import ClassVar, Literal

import polars as pl

from pipelines.select.base import Filter, Unknown, dropped, shown, unknown_test


class MinReward(Filter):
    """Keeps episodes with a score of at least `at_least`."""

    kind: Literal["min_reward"] = "min_reward"
    """Name of the filter."""
    primary: ClassVar[str | None] = "at_least"
    at_least: float
    """Smallest score that stays."""
    unknown: Unknown = "drop"
    """Episodes that are not scored."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes below it."""
        score = pl.col("score")
        reason = pl.format("score {} < {}", shown(score), shown(self.at_least))
        return dropped(episodes, *unknown_test("score", self.unknown), (score < self.at_least, reason))
