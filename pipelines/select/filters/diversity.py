"""Response diversity: a group whose rollouts did the same explores nothing."""

from typing import Literal

import polars as pl
from pydantic import Field

from pipelines.select.base import Filter, dropped, shown


class Diversity(Filter):
    """Drops groups with too few distinct responses.

    A response is an episode's sequence of actions with their tool calls (ids of calls left out). Groups are judged as
    the filters before left them.
    """

    kind: Literal["diversity"] = "diversity"
    """Name of the filter."""
    min_distinct: int = Field(2, ge=1)
    """Distinct responses a group needs."""
    min_share: float = Field(0.0, ge=0, le=1)
    """Distinct responses per rollout a group needs."""

    def facts(self) -> frozenset[str]:
        """The sequence of actions."""
        return frozenset({"actions"})

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes of groups that are too uniform."""
        distinct, size = (e.over("group_id") for e in (pl.col("actions").n_unique(), pl.len()))
        said = pl.format("{} distinct responses of {} siblings", distinct, size)
        return dropped(
            episodes,
            (distinct < self.min_distinct, pl.format("{}, below {}", said, self.min_distinct)),
            (distinct < self.min_share * size, pl.format("{}, below {} of them", said, shown(self.min_share))),
        )
