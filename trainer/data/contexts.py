"""Whether two steps were decided in the same context: hashes of all token ids before an action, and of the action.

The hash runs along the step's training sequence, over the token ids end to end: how they are cut into rows does not
matter. Files are gone through once, row group by row group.

Axes: `_M` members of sequences.
"""

import hashlib
from functools import lru_cache

import numpy as np
import polars as pl

from lake import ids
from lake.snapshot import Snapshot
from trainer.data.row_groups import RowGroup, RowGroupReader

_OPEN_GROUPS = 8
"""Decoded row groups kept: a sequence's rows lie side by side, or nearly."""


def fingerprints(snapshot: Snapshot, members: pl.DataFrame) -> pl.DataFrame:
    """Hashes of the contexts and actions of some steps.

    Args:
        snapshot: the data.
        members: of `trainer.data.sequences`, sorted: whole sequences, at least up to their last wanted step. Beside its
            columns `wanted`: which steps.

    Returns:
        episode_id, step_index, context_hash, action_hash (63 bits), context_tokens: one row per wanted member.
    """
    rows = _Rows(snapshot)
    keys = ("episode_id", "sequence")
    number = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in keys).cum_sum()
    numbered = members.with_columns(number=number)
    # Sequence by sequence in the order of the files, each from its beginning.
    place = [pl.col(name).first().over("number") for name in ("file", "row")]
    ordered = numbered.sort(*place, "number", maintain_order=True)
    found: list[tuple[int, int, int]] = []
    before, hasher, length = -1, hashlib.blake2b(digest_size=8), 0
    for of, file, row, wanted in ordered.select("number", "file", "row", "wanted").iter_rows():
        if of != before:
            before, hasher, length = of, hashlib.blake2b(digest_size=8), 0
        context, action = rows.at(file, row)
        hasher.update(context)
        length += len(context) // 4
        if wanted:
            found.append((_number(hasher.digest()), ids.bytes_hash(action), length))
        hasher.update(action)
        length += len(action) // 4
    schema = {"context_hash": pl.Int64, "action_hash": pl.Int64, "context_tokens": pl.Int64}
    steps = ordered.filter("wanted").select("episode_id", "step_index")
    return pl.concat([steps, pl.DataFrame(found, schema=schema, orient="row")], how="horizontal")


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little") & ids.MASK


class _Rows:
    """Token ids of rows of the table `tokens`, as bytes of int32."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._reader = RowGroupReader(snapshot.files("tokens"), snapshot.objects, masks=False, logprobs=False)
        self._group = lru_cache(_OPEN_GROUPS)(self._reader.read)
        self._starts = lru_cache(None)(self._reader.group_starts)

    def at(self, file: int, row: int) -> tuple[bytes, bytes]:
        """Context and action of a row."""
        starts = self._starts(file)
        number = int(np.searchsorted(starts, row, side="right")) - 1
        group: RowGroup = self._group(file, number)
        inner = row - int(starts[number])
        context = group.context_C[group.context_starts[inner] : group.context_starts[inner + 1]]
        action = group.action_A[group.action_starts[inner] : group.action_starts[inner + 1]]
        return context.astype(np.int32, copy=False).tobytes(), action.astype(np.int32, copy=False).tobytes()
