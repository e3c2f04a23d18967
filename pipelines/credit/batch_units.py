"""What a batch-normalised estimator has to compute together: whole groups, and whole batches.

Two groups belong together if they have episodes of one batch, and so do those that a third one links: the parts of the
graph whose nodes are batches and whose edges are groups with episodes of several. Where a batch is a run, a round or a
policy version, and groups keep to one, every batch is a part of its own.
"""

import polars as pl

from lake.reading import collected
from lake.snapshot import Snapshot


def batch_units(snapshot: Snapshot, episodes: pl.DataFrame, batch_key: str) -> pl.DataFrame:
    """The parts of a job that can be computed apart.

    Args:
        snapshot: where the key is read, if the episodes do not have it.
        episodes: rows of `select_episodes`.
        batch_key: a column of `episodes`.

    Returns:
        group_id and unit, one row per group; groups with equal units have to be computed together.
    """
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
