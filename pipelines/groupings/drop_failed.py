"""Drop failed: groups without the rollouts that ended in a fault."""

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from pipelines.groupings.step import Regrouped, Step, without

Status = Literal["completed", "truncated", "aborted", "failed"]


class DropFailed(Step):
    """The group of those members whose `episodes.status` is none of `statuses`.

    What is left of a group stays together, however few they are: an estimator flags a group of one by itself.
    """

    kind: Literal["drop_failed"] = "drop_failed"
    """Name of the step."""
    statuses: tuple[Status, ...] = Field(("failed", "aborted"), min_length=1)
    """How an episode that is left out ended."""
    facts: ClassVar[tuple[str, ...]] = ("status",)

    def apply(self, members: pl.DataFrame) -> Regrouped:
        """Members that ended otherwise."""
        return without(members, {f"status {status}": pl.col("status") == status for status in self.statuses})
