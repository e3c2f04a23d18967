"""Batches of episodes, over which some estimators normalise: everything that one value of the batch key gathers.

Computed together are whole groups, and whole batches. Two groups belong together if they have episodes of one batch,
and so do those that a third one links: the parts of the graph whose nodes are batches and whose edges are groups with
episodes of several.

Axes: `_N` the units that are normalised (rows or episodes), `_M` the same gathered by batch, `_K` batches.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import polars as pl

from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from pipelines.credit.estimators.normalise import Moments
from pipelines.credit.inputs.batch import Bools, Floats, Segments, scatter


@dataclass(frozen=True, slots=True)
class Whitened:
    """Values with mean 0 and deviation 1 over their batch."""

    values_N: Floats
    """NaN for units that take no part."""
    single_N: Bools
    """The unit is the only one of its batch."""
    tied_N: Bools
    """The batch has two or more units, all equal."""


@dataclass(frozen=True, slots=True)
class Batches:
    """The partition of units by batch key. Units whose key is NULL belong to no batch."""

    order_M: npt.NDArray[np.int64]
    """Unit number of each gathered unit; inside a batch units stay in canonical order."""
    runs: Segments
    """Gathered units -> batches."""
    known_N: Bools
    """The unit's key is not NULL."""

    @classmethod
    def of(cls, key_N: pl.Series) -> Self:
        """Gather units by their key."""
        keys = key_N.alias("batch").to_frame()
        order = keys.select(pl.arg_sort_by("batch", maintain_order=True)).to_series()
        gathered = key_N.gather(order)
        opens_M = gathered.ne_missing(gathered.shift()).to_numpy().copy()
        opens_M[0] = True
        return cls(order.cast(pl.Int64).to_numpy(), Segments.opening_at(opens_M), key_N.is_not_null().to_numpy())

    def whiten(self, values_N: Floats, member_N: Bools) -> Whitened:
        """(x - mean) / (std + 1e-6) over the members of each batch; exactly 0 where they are all equal, or only one."""
        values_M, member_M, moments = self._moments(values_N, member_N)
        whitened_M = moments.normalise(values_M, member_M, self.runs, "mean_std_norm", "zero")
        return Whitened(
            scatter(whitened_M, self.order_M),
            scatter(member_M & self.runs.spread(moments.count_K == 1), self.order_M),
            scatter(member_M & self.runs.spread(moments.tied_K), self.order_M),
        )

    def deviation(self, values_N: Floats, member_N: Bools) -> Floats:
        """Sample deviation of the members of each unit's batch; NaN for units of no batch."""
        deviation_N = scatter(self.runs.spread(self._moments(values_N, member_N)[2].std_K), self.order_M)
        return np.where(self.known_N, deviation_N, np.nan)

    def _moments(self, values_N: Floats, member_N: Bools) -> tuple[Floats, Bools, Moments]:
        values_M, member_M = values_N[self.order_M], (member_N & self.known_N)[self.order_M]
        return values_M, member_M, Moments.of(values_M, member_M, self.runs)


def batch_units(snapshot: Snapshot, episodes: pl.DataFrame, batch_key: str) -> pl.DataFrame:
    """The parts of a job that can be computed apart: group_id and unit, one row per group; equal units go together."""
    if batch_key not in episodes.columns:
        keys = collected(snapshot.scan("episodes").select("episode_id", batch_key))
        episodes = episodes.select("group_id", "episode_id").join(keys, on="episode_id", how="left")
    # The first row of each batch is its number: equality is a group-by's, of whatever type the key is.
    rows = episodes.select("group_id", key=pl.col(batch_key)).with_row_index("row")
    number = pl.when(pl.col("key").is_not_null()).then(pl.col("row").min().over("key"))
    of_groups = rows.select("group_id", number.cast(pl.Int64).alias("batch")).unique()
    first = of_groups.group_by("group_id").agg(pl.col("batch").min().alias("first"))
    links = of_groups.join(first, on="group_id").filter(pl.col("batch") != pl.col("first")).select("first", "batch")
    heads = _heads(links.unique().rows())
    moved = pl.DataFrame(list(heads.items()), schema={"first": pl.Int64, "head": pl.Int64}, orient="row")
    units = first.join(moved, on="first", how="left").with_row_index("place")
    alone = -1 - pl.col("place").cast(pl.Int64)  # no episode of the group is in a batch
    return units.select("group_id", unit=pl.coalesce("head", "first", alone))


def _heads(links: list[tuple[int, int]]) -> dict[int, int]:
    """For each linked batch, the one that stands for its part."""
    above: dict[int, int] = {}

    def head(batch: int) -> int:
        while above.setdefault(batch, batch) != batch:
            above[batch] = above[above[batch]]
            batch = above[batch]
        return batch

    for one, other in links:
        above[head(one)] = head(other)
    return {batch: head(batch) for batch in list(above)}
