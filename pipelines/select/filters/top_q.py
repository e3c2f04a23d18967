"""Top q: the best episodes of each task, so that easy tasks do not dominate (rejection sampling with a cap)."""

from typing import ClassVar, Literal, Self

import polars as pl
from pydantic import Field, model_validator

from pipelines.lots import draw_lots
from pipelines.select.base import Filter, Unknown, dropped, shown, unknown_test


class TopQ(Filter):
    """Keeps the `count` best episodes of a task, or the best `fraction` of them (rounded up, so never none).

    Best means the highest score; equal scores are ordered by lots drawn from (seed, episode_id). A fraction is one of
    what the filters before it left: applied again it takes a share of that share. A count is not affected by that.
    """

    kind: Literal["top_q"] = "top_q"
    """Name of the filter."""
    primary: ClassVar[str | None] = "fraction"
    fraction: float | None = Field(None, gt=0, le=1)
    """Share of a task's scored episodes that stays."""
    count: int | None = Field(None, ge=1)
    """Number of a task's episodes that stays."""
    seed: int = 0
    """Orders episodes of equal score."""
    unknown: Unknown = "drop"
    """Episodes that are not scored. Kept ones do not count."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.fraction is None) == (self.count is None):
            msg = "give fraction or count, one of them"
            raise ValueError(msg)
        return self

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """All but the best."""
        scored = episodes.filter(pl.col("score").is_not_null())
        lots = draw_lots(scored["episode_id"], "top_q", self.seed)
        ranked = scored.with_columns(lots, size=pl.len().over("task_id")).with_columns(
            place=pl.struct(-pl.col("score"), "lot", "episode_id").rank("ordinal").over("task_id")
        )
        # The share of 10 at 0.3 is 3, not 4: the product may lie above by a rounding error.
        share = pl.lit(self.count) if self.fraction is None else (pl.col("size") * self.fraction - 1e-9).ceil()
        quota = pl.max_horizontal(pl.lit(1), share.cast(pl.Int64))
        reason = pl.format(
            "place {} of {} in its task with score {}, beyond {}", pl.col("place"), pl.col("size"),
            shown(pl.col("score")), quota,
        )  # fmt: skip
        low = dropped(ranked, (pl.col("place") > quota, reason))
        unscored = unknown_test("score", self.unknown)
        return pl.concat([low, dropped(episodes, *unscored)]) if unscored else low
