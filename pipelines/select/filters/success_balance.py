"""Success balance: no task may drown its few failures in successes, or the other way round."""

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from pipelines.lots import draw_lots
from pipelines.select.base import Filter, Unknown, dropped, shown, unknown_test


class SuccessBalance(Filter):
    """Keeps, per task, at most `max_ratio` episodes of the more frequent outcome for each of the other.

    Success is a score of at least `success`. Of the more frequent outcome max(1, floor(max_ratio x the other)) episodes
    stay, those with the smallest lots drawn from (seed, episode_id). A task with one outcome alone has no balance to
    strike and is left as it is, unless `one_sided = "drop"`.
    """

    kind: Literal["success_balance"] = "success_balance"
    """Name of the filter."""
    primary: ClassVar[str | None] = "max_ratio"
    max_ratio: float = Field(1.0, ge=1)
    """Episodes of the more frequent outcome for each of the other."""
    success: float = 0.5
    """Smallest score of a success."""
    one_sided: Literal["drop", "keep"] = "keep"
    """Tasks whose episodes all succeeded, or all failed."""
    seed: int = 0
    """Decides who stays."""
    unknown: Unknown = "drop"
    """Episodes that are not scored."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes beyond the balance."""
        lots = draw_lots(episodes["episode_id"], "success_balance", self.seed)
        facts = episodes.with_columns(lots, outcome=pl.col("score") >= self.success)
        outcome = pl.col("outcome")
        wins, losses = (e.sum().over("task_id") for e in (outcome, ~outcome))
        facts = facts.with_columns(
            mine=pl.when(outcome).then(wins).otherwise(losses),
            others=pl.when(outcome).then(losses).otherwise(wins),
            place=pl.struct("lot", "episode_id").rank("ordinal").over("task_id", "outcome"),
        )
        quota = pl.max_horizontal(pl.lit(1), (pl.col("others") * self.max_ratio).floor().cast(pl.Int64))
        is_known, alone = outcome.is_not_null(), pl.col("others") == 0
        named = pl.when(outcome).then(pl.lit("successes")).otherwise(pl.lit("failures"))
        over = pl.format(
            "{} {} for {} of the other, above {} to 1", pl.col("mine"), named, pl.col("others"), shown(self.max_ratio)
        )
        tests = [
            *unknown_test("score", self.unknown),
            (is_known & ~alone & (pl.col("place") > quota), over),
        ]
        if self.one_sided == "drop":
            tests.append((is_known & alone, pl.format("its task has {} only", named)))
        return dropped(facts, *tests)
