"""Staleness: rollouts of weights that are too many updates old for an off-policy correction to mend."""

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from pipelines.select.base import Filter, Unknown, dropped, unknown_test


class Staleness(Filter):
    """Keeps episodes at most `max_behind` policy versions behind.

    An episode is as old as its oldest part: the smallest of `episodes.policy_version` and its active steps' (weights
    may change while it runs). Versions are counted from `now`, or from the newest episode of the same scope that the
    filters before it left.
    """

    kind: Literal["staleness"] = "staleness"
    """Name of the filter."""
    primary: ClassVar[str | None] = "max_behind"
    max_behind: int = Field(ge=0)
    """Versions behind."""
    now: int | None = None
    """The current version; None takes the newest one that is there, per scope."""
    within: Literal["run", "policy", "all"] = "run"
    """Scope in which version numbers are comparable: a run, a policy's name, everything."""
    unknown: Unknown = "drop"
    """Episodes without a known version."""

    def facts(self) -> frozenset[str]:
        """Versions, and the policy's name where that is the scope."""
        return frozenset({"policy_version", "oldest_version"} | ({"policy"} if self.within == "policy" else set()))

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes that are too old."""
        scope = {"run": ["run_id"], "policy": ["policy"], "all": []}[self.within]
        episodes = episodes.with_columns(version=pl.min_horizontal("policy_version", "oldest_version"))
        version = pl.col("version")
        newest = version.max().over(scope) if scope else version.max()
        now = newest if self.now is None else pl.lit(self.now)
        reason = pl.format("{} > {} versions behind", now - version, self.max_behind)
        return dropped(
            episodes,
            *unknown_test("version", self.unknown),
            (now - version > self.max_behind, reason),
        )
