"""Status: how an episode may have ended."""

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from pipelines.select.base import Filter, dropped

Ending = Literal["completed", "truncated", "aborted", "failed"]


class Status(Filter):
    """Keeps episodes whose status is one of `keep`."""

    kind: Literal["status"] = "status"
    """Name of the filter."""
    primary: ClassVar[str | None] = "keep"
    keep: tuple[Ending, ...] = Field(("completed", "truncated"), min_length=1)
    """The endings that stay."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes that ended otherwise."""
        return dropped(episodes, (~pl.col("status").is_in(list(self.keep)), pl.format("status {}", pl.col("status"))))
