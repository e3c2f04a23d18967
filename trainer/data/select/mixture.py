"""Weighted mixtures: which source an episode belongs to, and how many episodes of each an epoch draws.

An epoch is as long as one pass over everything. A source of weight w gets w / sum of weights of its episodes, within
one. If the source has more than that, an epoch draws some of them, other ones each epoch; if it has fewer, it is
repeated as a whole and drawn from for the rest. What is drawn depends on hashes of (seed, epoch, episode_id) alone.

Axes: `_E` episodes, `_D` draws: an episode as often as it was drawn.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from lake.errors import DataRefusedError
from lake.ids import splitmix64
from lake.judgements.predicates import select_where
from lake.judgements.selections import read_kept
from lake.read.snapshot import Snapshot
from trainer.config import MixtureSource
from trainer.data.stream.batch import Ints

Keys = npt.NDArray[np.uint64]


def order_keys(episode_ids_E: Ints, seed: int, epoch: int) -> Keys:
    """Sort keys of episodes (int64 [E]) in one epoch: a hash of (seed, epoch, episode_id), uint64 [E].

    Equal ids have equal keys on every machine.
    """
    salt = splitmix64(splitmix64(np.array([seed], np.uint64)) + np.uint64(epoch))
    keys_E = episode_ids_E.astype(np.uint64)
    # What is computed on the way takes several times the memory of the keys.
    for first in range(0, len(keys_E), _MIXED):
        part = keys_E[first : first + _MIXED]
        part[:] = splitmix64(part ^ salt)
    return keys_E


_MIXED = 1 << 20
"""Keys that are computed together."""


_DRAW = np.uint64(0x2545F4914F6CDD1D)
"""Tells the keys by which episodes are drawn from those by which they are ordered."""


def assign(
    snapshot: Snapshot, mixture: Sequence[MixtureSource], episodes: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Find each episode's source, and the single steps that the selection of this source dropped.

    Returns episode_id, source (position in the mixture), each episode once, in the first source that it is in; and
    episode_id, step_index.

    Raises:
        UsageError: a predicate that is none, or an unknown selection.
        DataRefusedError: a source without episodes.
    """
    left, found, dropped = episodes.select("episode_id"), [], []
    for number, source in enumerate(mixture):
        chosen = left.join(
            select_where(snapshot, ("episode_id",), source.predicate, f"mixture source {number}: where", empty=True),
            on="episode_id",
            how="semi",
            maintain_order="left",
        )
        if source.selection is not None:
            kept = read_kept(snapshot, source.selection)
            chosen = chosen.join(kept.episodes, on="episode_id", how="semi", maintain_order="left")
            dropped.append(kept.dropped_steps.join(chosen, on="episode_id", how="semi"))
        if chosen.is_empty():
            msg = f"mixture source {number} ({source.describe()}) has no episode that the sources before it left"
            raise DataRefusedError(msg)
        left = left.join(chosen, on="episode_id", how="anti", maintain_order="left")
        found.append(chosen.with_columns(source=pl.lit(number, pl.Int32)))
    nothing = pl.DataFrame(schema={"episode_id": pl.Int64, "step_index": pl.Int32})
    return pl.concat(found).sort("episode_id"), pl.concat([nothing, *dropped])


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """A total in whole parts in proportion to weights, each within one of its share; ties favour earlier parts.

    This is the method of the largest remainder.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def draw(episode_ids_E: Ints, source_E: npt.NDArray[np.int32], weights: Sequence[float], seed: int, epoch: int) -> Ints:
    """The episodes of an epoch, in order, from their ids (int64 [E]) and sources (int32 [E], each occurs).

    Returns positions in episode_ids_E, int64 [D] with D = E; repeated ones where a source is drawn more than once.
    """
    keys_E = order_keys(episode_ids_E, seed, epoch)
    parts, keys = [], []
    for source, count in enumerate(shares(len(episode_ids_E), weights)):
        mine = np.flatnonzero(source_E == source)
        by_draw = mine[np.lexsort((episode_ids_E[mine], splitmix64(keys_E[mine] ^ _DRAW)))]
        drawn = np.resize(by_draw, count)
        key_D = keys_E[drawn]
        for again in range(1, -(-count // len(mine))):
            later = slice(again * len(mine), None)
            key_D[later] = splitmix64(key_D[later])
        parts.append(drawn)
        keys.append(key_D)
    drawn_D, key_D = np.concatenate(parts), np.concatenate(keys)
    order_D = np.lexsort((episode_ids_E[drawn_D], key_D))
    return np.asarray(drawn_D[order_D], np.int64)
