"""Filters, one file each. `FILTERS` maps their names to their classes, `AnyFilter` validates one from a mapping."""

from typing import Annotated, Literal, get_args

import polars as pl
from pydantic import Field

from pipelines.select.base import DROPS, Filter
from pipelines.select.filters.groups import DeadGroups, Dedup, Diversity
from pipelines.select.filters.lengths import Length, OverLong
from pipelines.select.filters.outcomes import MinReward, Staleness, Status, SuccessBalance, TopQ

SimpleFilter = (
    DeadGroups | MinReward | Diversity | Length | OverLong | Staleness | SuccessBalance | TopQ | Dedup | Status
)
_KEYS = ["episode_id", "step_index"]


class Combined(Filter):
    """All filters see the same input: none of them profits from what another dropped.

    `all`: what every filter keeps stays. `any`: what one of them keeps stays; a step is dropped if every filter drops
    it or its whole episode. The reasons of all filters that dropped a row are joined.
    """

    kind: Literal["combined"] = "combined"
    filters: tuple[Annotated[SimpleFilter, Field(discriminator="kind")], ...] = Field(min_length=1)
    """The filters."""
    keep: Literal["all", "any"] = "all"
    """Who must agree for a row to stay."""

    def facts(self) -> frozenset[str]:
        """What any of them reads."""
        return frozenset[str]().union(*(part.facts() for part in self.filters))

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """What they drop together."""
        found = pl.concat(
            part.drops(episodes, steps).with_columns(
                pl.format("{}: {}", pl.lit(part.kind), pl.col("reason")).alias("reason"), part=pl.lit(number)
            )
            for number, part in enumerate(self.filters)
        )
        whole = _joined(found.filter(pl.col("step_index").is_null()))
        single = found.filter(pl.col("step_index").is_not_null())
        if self.keep == "any":
            # Whoever drops an episode drops its steps too.
            of_whole = found.filter(pl.col("step_index").is_null()).drop("step_index")
            asked = single.select(_KEYS).unique()
            single = pl.concat([single, asked.join(of_whole, on="episode_id").select(single.columns)])
            whole = whole.filter(pl.col("parts") == len(self.filters))
        steps_dropped = _joined(single)
        if self.keep == "any":
            steps_dropped = steps_dropped.filter(pl.col("parts") == len(self.filters))
        steps_dropped = steps_dropped.join(whole, on="episode_id", how="anti")
        return pl.concat([whole, steps_dropped]).select(list(DROPS))


def _joined(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per key: the reasons joined, and how many filters gave one."""
    return rows.group_by(_KEYS).agg(
        reason=pl.col("reason").sort_by("part").str.join("; "), parts=pl.col("part").n_unique()
    )


AnyFilter = Annotated[SimpleFilter | Combined, Field(discriminator="kind")]
FILTERS: dict[str, type[Filter]] = {
    cls.model_fields["kind"].default: cls for cls in (*get_args(SimpleFilter), Combined)
}
"""Name -> class, in the order of the documentation."""
