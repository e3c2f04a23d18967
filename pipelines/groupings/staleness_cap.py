"""Staleness cap: groups without the rollouts of policies that are too old."""

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from pipelines.groupings.step import Regrouped, Step, without


class StalenessCap(Step):
    """The group of those members whose policy is at most `max_behind` versions behind the newest one in the group.

    Counted in `episodes.policy_version`, the version that the episode began with.
    """

    kind: Literal["staleness_cap"] = "staleness_cap"
    """Name of the step."""
    max_behind: int = Field(ge=0)
    """Versions behind the newest one of the group."""
    unknown: Literal["drop", "keep"] = "drop"
    """Episodes whose policy version is NULL."""
    facts: ClassVar[tuple[str, ...]] = ("policy_version",)

    def apply(self, members: pl.DataFrame) -> Regrouped:
        """Members that are recent enough."""
        version = pl.col("policy_version")
        behind = version.max().over("group_id", "draw") - version
        reasons = {f"more than {self.max_behind} versions behind": behind > self.max_behind}
        if self.unknown == "drop":
            reasons["policy version unknown"] = version.is_null()
        marked = members.with_columns(reason.alias(words) for words, reason in reasons.items())
        found = without(marked, {words: pl.col(words) for words in reasons})
        return Regrouped(found.members.select(members.columns), found.notes)
