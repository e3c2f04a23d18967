"""A number drawn for every episode from a seed and its id alone.

It depends neither on row order, nor on which other episodes there are, nor on a library's version or the machine: the
mixing function is `lake.ids.splitmix64`.
"""

import numpy as np
import polars as pl

from lake import ids


def draw_lots(episode_ids: pl.Series, *seeds: str | int) -> pl.Series:
    """A number per episode, uniform over uint64 [N], the same for the same id and seeds everywhere.

    Args:
        episode_ids: int64 [N].
        seeds: what the draw is for; other seeds draw independently.
    """
    mixed_N = ids.splitmix64(episode_ids.to_numpy().astype(np.uint64) + np.uint64(ids.key_hash("lot", *seeds)))
    return pl.Series("lot", ids.splitmix64(mixed_N), dtype=pl.UInt64)
