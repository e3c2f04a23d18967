"""Lots: a number drawn for every episode from a seed and its id alone.

Whoever is drawn depends neither on row order, nor on which other episodes there are, nor on a library's version or the
machine: the mixing function is splitmix64 (Steele, Lea and Flood, 2014), written out here.
"""

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids


def draw_lots(episode_ids: pl.Series, *seeds: str | int) -> pl.Series:
    """A number per episode, uniform over uint64, the same for the same id and seeds everywhere.

    Args:
        episode_ids: int64 [N].
        seeds: what the draw is for; other seeds draw independently.

    Returns:
        uint64 [N], named `lot`.
    """
    lots_N = mixed(episode_ids.to_numpy().astype(np.uint64) + np.uint64(ids.key_hash("lot", *seeds)))
    return pl.Series("lot", mixed(lots_N), dtype=pl.UInt64)


def mixed(values_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One round of splitmix64's finaliser; array arithmetic wraps around without a warning."""
    mixed_N = values_N + np.uint64(0x9E3779B97F4A7C15)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_N ^ (mixed_N >> np.uint64(31))
