"""Dedup: the same rollout twice teaches it twice."""

from typing import Literal

import polars as pl

from lake import ids
from pipelines.select.base import DROPS, Filter

_SCOPES = {"group": ["group_id"], "task": ["task_id"], "all": []}


class Dedup(Filter):
    """Keeps one of several episodes that did the same: the one with the smallest episode_id.

    `actions`: the same sequence of actions and tool calls (ids of calls left out). `decisions`: the same sequence of
    states and actions.
    """

    kind: Literal["dedup"] = "dedup"
    """Name of the filter."""
    by: Literal["actions", "decisions"] = "actions"
    """What is compared."""
    within: Literal["group", "task", "all"] = "task"
    """Where copies are looked for."""

    def facts(self) -> frozenset[str]:
        """The hash that is compared."""
        return frozenset({self.by})

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """All but the first of each kind."""
        first = pl.col("episode_id").min().over([self.by, *_SCOPES[self.within]])
        found = episodes.with_columns(first=first).filter(
            (pl.col("first") != pl.col("episode_id")) & pl.col(self.by).is_not_null()
        )
        reason = pl.format("the same {} as {}", pl.lit(self.by), pl.col("first").map_elements(ids.to_text, pl.String))
        return found.select("episode_id", step_index=pl.lit(None, pl.Int32), reason=reason).select(list(DROPS))
