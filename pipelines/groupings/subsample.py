"""Subsample: each group as it would have been with fewer rollouts."""

from typing import Literal

import polars as pl
from pydantic import Field

from pipelines.groupings.step import Regrouped, Step
from pipelines.lots import draw_lots


class Subsample(Step):
    """The group a smaller collection would have given: `size` of its members, drawn without replacement.

    Every episode draws a lot from (seed, draw, episode_id) alone; the members with the `size` smallest lots stay. So a
    draw depends neither on row order nor on other groups, and a new episode displaces at most one member of its group.
    Several draws are several groupings: `NAME/0`, `NAME/1`, ...; an episode may be in several of them, never twice in
    one.
    """

    kind: Literal["subsample"] = "subsample"
    """Name of the step."""
    size: int = Field(ge=1)
    """Members a group keeps."""
    draws: int = Field(1, ge=1, le=1000)
    """How many times, independently."""
    seed: int = 0
    """Decides the draws."""
    short: Literal["drop", "keep"] = "drop"
    """Groups with fewer than `size` members say nothing about that size: left out, or (`keep`) taken as they are."""

    def apply(self, members: pl.DataFrame) -> Regrouped:
        """`size` members of every group and draw."""
        group = ["group_id", "draw"]
        is_short = pl.len().over(group) < self.size
        full = members.filter(~is_short) if self.short == "drop" else members
        notes = {f"in groups of fewer than {self.size}": members.height - full.height}
        # A draw of draws is numbered through: (0, 1, 2) x 2 becomes 0 ... 5.
        drawn = pl.concat(
            full.with_columns(draw_lots(full["episode_id"], "subsample", self.seed, draw))
            .filter(pl.struct("lot", "episode_id").rank("ordinal").over(group) <= self.size)
            .with_columns((pl.col("draw") * self.draws + draw).cast(pl.Int32))
            for draw in range(self.draws)
        ).drop("lot")
        return Regrouped(drawn, {words: rows for words, rows in notes.items() if rows})
