"""Last k states: steps that came to the same place the same way (the groups of HGPO, arXiv 2602.22817).

Axes: `_N` rows in canonical order.
"""

from typing import ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from lake.ids import bytes_hash
from pipelines.credit.anchors.definition import Definition, Reads, States
from pipelines.credit.inputs.batch import Segments


class LastStates(Definition):
    """Two steps share an anchor if their last k states are equal, in order: this one and the k - 1 before it.

    A window never leaves its episode. With `short="keep"` the first k - 1 steps of an episode go by the states there
    are, and so are comparable with the first steps of a sibling only; with `unknown` they have no key. A window that
    holds an unknown state has none either. In a chain the states are those that the stages before have left.
    """

    kind: Literal["last_states"] = "last_states"
    """Name of the definition."""
    k: int = Field(default=2, ge=1, le=64)
    """Number of states. 1 is the state alone."""
    short: Literal["keep", "unknown"] = "keep"
    """What the first k - 1 steps of an episode get: the key of the states there are, or none."""
    makes_key: ClassVar[bool] = True
    reads: ClassVar[Reads] = "state"

    def apply(self, states: States) -> States:
        """Keys of the windows."""
        keys_N = history_keys(states.keys(), states.batch.episodes, self.k)
        if self.short == "unknown":
            is_whole_N = _positions(states.batch.episodes) >= self.k - 1
            return states.keyed(keys_N).kept(pl.Series(is_whole_N))
        return states.keyed(keys_N)


def history_keys(keys_N: pl.Series, episodes: Segments, k: int) -> pl.Series:
    """Key of the last k keys inside each row's episode, of fewer at its beginning: Int64, NULL if any of them is NULL.

    For k = 1 the keys as they are; else the hash of the window's keys, 8 bytes each, little-endian, oldest first.
    """
    if k == 1:
        return keys_N
    values_N = keys_N.fill_null(0).to_numpy()
    unknown_N = keys_N.is_null().to_numpy()
    position_N = _positions(episodes)
    window_N = np.zeros((len(values_N), k), "<i8")
    holes_N = np.zeros(len(values_N), np.bool_)
    for back in range(k):
        rows = np.flatnonzero(position_N >= back)
        window_N[rows, k - 1 - back] = values_N[rows - back]
        holes_N[rows] |= unknown_N[rows - back]
    columns = {f"key_{at}": window_N[:, at] for at in range(k)} | {"length": np.minimum(position_N + 1, k)}
    windows = pl.DataFrame(columns)
    distinct = windows.filter(pl.Series(~holes_N)).unique()
    packed = np.ascontiguousarray(distinct.drop("length").to_numpy().astype("<i8")).tobytes()
    ends = zip(range(8 * k, len(packed) + 1, 8 * k), distinct["length"], strict=True)
    hashes = [bytes_hash(packed[end - 8 * length : end]) for end, length in ends]
    table = distinct.with_columns(key=pl.Series(hashes, dtype=pl.Int64))
    found = windows.join(table, on=windows.columns, how="left", maintain_order="left")["key"]
    return pl.select(pl.when(pl.Series(~holes_N)).then(found).alias("anchor_key")).to_series()


def _positions(episodes: Segments) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Number of active steps before each row in its episode."""
    return np.arange(int(episodes.lengths_K.sum())) - episodes.spread(episodes.starts_K.astype(np.int64))
