"""What a group is computed from, as one hash: equal hashes mean equal advantages.

A group's hash covers its members as written (episode_id, write_id: facts never change under them), their scores to the
bit, whose step scores are their rewards, and what is looked for in it (`checks`). It depends on neither order, files
nor machine, and survives compaction. The estimator, its options and its code are the series' business, not the hash's.

Axes: `_E` episodes, `_P` groups.
"""

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids
from lake.ids import splitmix64
from pipelines.credit.segments import Segments

_FACTS = ("episode_id", "write_id")
_NOT_INPUTS = ("group_id", "collected_group_id", "run_id", "status", "num_steps")
"""Columns of selected episodes that follow from the facts, and the group itself."""
Words = npt.NDArray[np.uint64]


def group_fingerprints(episodes: pl.DataFrame, *, of_batch: bool = False, checks: int = 0) -> pl.DataFrame:
    """Hash of each group's input.

    Args:
        episodes: rows of `select_episodes`, sorted by (group_id, episode_id).
        of_batch: every group depends on all of them, as under a batch-normalised estimator.
        checks: hash of what the job looks for in a group beside its advantages: other checks are another answer.

    Returns:
        group_id, input_fingerprint (63 bits), episodes, steps: one row per group, sorted by group_id.
    """
    first_E = episodes.select(pl.col("group_id").ne_missing(pl.col("group_id").shift())).to_series().to_numpy()
    groups = Segments.opening_at(first_E)
    hash_E = np.zeros(episodes.height, np.uint64)
    for column in (*_FACTS, *sorted(set(episodes.columns) - {*_FACTS, *_NOT_INPUTS})):
        hash_E = splitmix64(hash_E ^ _words(episodes[column]))
    # A sum wraps around, and does not ask in which order siblings stand.
    hash_P = splitmix64(np.add.reduceat(hash_E, groups.starts_K) + groups.lengths_K.astype(np.uint64))
    hash_P = splitmix64(hash_P ^ np.uint64(checks)) if checks else hash_P
    group_P = episodes["group_id"].gather(groups.starts_K)
    if of_batch:
        total = np.array([splitmix64(hash_P ^ _words(group_P)).sum(dtype=np.uint64)])
        hash_P = splitmix64(hash_P ^ splitmix64(total))
    return pl.DataFrame(
        {
            "group_id": group_P,
            "input_fingerprint": (hash_P & np.uint64(ids.MASK)).astype(np.int64),
            "episodes": groups.lengths_K,
            "steps": np.add.reduceat(episodes["num_steps"].to_numpy().astype(np.int64), groups.starts_K),
        }
    )


def total_fingerprint(groups: pl.DataFrame, **inputs: str | None) -> int:
    """Hash of a whole job's input.

    Args:
        groups: of `group_fingerprints`.
        inputs: everything else by name, for example the filter's text.
    """
    pairs_P2 = groups.select("group_id", "input_fingerprint").to_numpy()
    facts = ids.bytes_hash(pairs_P2.astype("<i8", order="C").tobytes())
    return ids.key_hash("credit", facts, *(part for name in sorted(inputs) for part in (name, inputs[name])))


def _words(column: pl.Series) -> Words:
    """A column's values as 64 bits each; NULL is a value of its own."""
    floats = column.dtype.is_float()
    # Adding 0.0 makes -0.0 the 0.0 it equals.
    values = (column.fill_null(0).to_numpy() + 0.0).view(np.uint64) if floats else column.fill_null(0).to_numpy()
    return splitmix64(values.astype(np.uint64)) ^ (column.is_null().to_numpy().astype(np.uint64) * _NULL)


_NULL = np.uint64(0xA0761D6478BD642F)
