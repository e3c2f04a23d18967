"""What a table of advantages looks like: the figures to read before training on it.

A dead group teaches nothing about the outcome; a step whose state no sibling shares has no step advantage. Healthy
GiGPO training has fewer than 35 % singleton anchors; where almost no state is shared, the text needs normalising first.
"""

import polars as pl
from pydantic import BaseModel, ConfigDict

from pipelines.credit.flags import Flag


class CreditSummary(BaseModel):
    """Counts over the rows of one credit job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    episodes: int
    """Distinct episodes."""
    steps: int
    """Rows."""
    undefined_steps: int
    """Rows whose advantage is NULL."""
    groups: int
    """Task groups: live, dead, singleton and unscored ones add up to this."""
    live_groups: int
    """Two or more scored siblings with different scores."""
    dead_groups: int
    """Two or more scored siblings, all with the same score."""
    singleton_groups: int
    """One scored sibling."""
    unscored_groups: int
    """No scored sibling."""
    shared_steps: int
    """Steps whose anchor state two or more trajectories of the group visited."""
    singleton_steps: int
    """Steps whose anchor state no other step has."""

    @property
    def shared_fraction(self) -> float | None:
        """Fraction of steps that share their anchor state with a sibling; None without steps."""
        return self.shared_steps / self.steps if self.steps else None


def summarise(advantages: pl.LazyFrame) -> CreditSummary:
    """Count what the advantages of one job rest on.

    Args:
        advantages: rows as an estimator returns them (`episode_id`, `group_id`, `advantage`, `group_size`,
            `anchor_episodes`, `flags`).

    Returns:
        The counts.
    """
    flags = advantages.select(pl.col("flags").unique()).collect()["flags"].to_list()
    dead = pl.col("flags").is_in(_carrying(Flag.DEAD_GROUP, flags))
    single = pl.col("flags").is_in(_carrying(Flag.SINGLETON_ANCHOR, flags))
    groups = advantages.group_by("group_id").agg(pl.col("group_size").first(), dead.any().alias("dead"))
    rows = advantages.select(
        pl.col("episode_id").n_unique().alias("episodes"),
        pl.len().alias("steps"),
        pl.col("advantage").is_null().sum().alias("undefined_steps"),
        (pl.col("anchor_episodes") >= 2).sum().alias("shared_steps"),
        single.sum().alias("singleton_steps"),
    )
    by_group = groups.select(
        pl.len().alias("groups"),
        ((pl.col("group_size") >= 2) & ~pl.col("dead")).sum().alias("live_groups"),
        pl.col("dead").sum().alias("dead_groups"),
        (pl.col("group_size") == 1).sum().alias("singleton_groups"),
        (pl.col("group_size") == 0).sum().alias("unscored_groups"),
    )
    return CreditSummary.model_validate(pl.concat([rows, by_group], how="horizontal").collect().row(0, named=True))


def _carrying(flag: Flag, flags: list[str]) -> list[str]:
    """The distinct values of the column that name the flag: comparing with them is cheaper than splitting each row."""
    return [value for value in flags if flag.value in value.split(",")]
