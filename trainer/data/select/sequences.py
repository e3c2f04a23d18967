"""Which token rows form one training sequence, and which steps were decided in the same context.

A row whose prefix is NULL opens a sequence; a row that extends the sequence's last row continues it, so an append-only
episode is one sequence with several action spans. A row that extends an earlier step forks: a new sequence that repeats
the path to that step as context. Every action carries loss in exactly one sequence, the first that holds it.

Whether two steps were decided in the same context is told by hashes of all token ids before an action, and of the
action, taken along the step's training sequence: how the ids are cut into rows does not matter. Files are gone through
once, row group by row group.

Axes: `_R` token rows, `_E` episodes, `_M` members of sequences.
"""

import hashlib
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.read.snapshot import Snapshot
from trainer.data.stream.row_groups import RowGroup, RowGroupReader

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def link_sequences(rows: pl.DataFrame) -> pl.DataFrame:
    """Token rows of one encoding, sorted by episode_id and step_index, arranged in sequences.

    Returns members of sequences, sorted by episode, sequence, step: the columns of `rows`, `sequence` (0, 1, ... within
    the episode), `repeated` (the row stands in an earlier sequence already) and `end` (tokens of the sequence up to and
    including this row).

    Raises:
        ContractError: a row extends a step that has no tokens, or its prefix_length is not where that step ends.
    """
    end = (pl.col("prefix_length") + pl.col("n_context") + pl.col("n_action")).cast(pl.Int64)
    follows_R, opens_R = _continuations(rows)
    rows = rows.with_columns(end=end, sequence=_numbered(rows, opens_R), repeated=pl.lit(value=False))
    branched = rows.filter(pl.Series(~(follows_R | opens_R)))["episode_id"].unique(maintain_order=True)
    if len(branched):
        is_branched = pl.col("episode_id").is_in(branched.implode())
        trees = [_branches(part) for part in rows.filter(is_branched).partition_by("episode_id")]
        rows = pl.concat([rows.filter(~is_branched), *trees]).sort("episode_id", "sequence", "step_index")
    _check_lengths(rows)
    return rows


def _continuations(rows: pl.DataFrame) -> tuple[Bools, Bools]:
    """For each row: does it extend the row before it; does it open a sequence."""
    episode_R, step_R = (rows[name].to_numpy() for name in ("episode_id", "step_index"))
    prefix_R = rows["prefix_step_index"].fill_null(-1).to_numpy()
    follows_R = np.zeros(rows.height, np.bool_)
    follows_R[1:] = (episode_R[1:] == episode_R[:-1]) & (prefix_R[1:] == step_R[:-1])
    return follows_R, prefix_R < 0


def _numbered(rows: pl.DataFrame, opens_R: Bools) -> pl.Series:
    """Number of each row's sequence in its episode, if every row extends the one before it or opens a sequence."""
    episode_R = rows["episode_id"].to_numpy()
    first_R = np.ones(rows.height, np.bool_)
    first_R[1:] = episode_R[1:] != episode_R[:-1]
    opened_R: Ints = np.cumsum(opens_R)
    before_E: Ints = (opened_R - opens_R)[first_R]
    number_R: Ints = opened_R - before_E[np.cumsum(first_R) - 1] - 1
    return pl.Series(number_R, dtype=pl.Int32)


def _branches(rows: pl.DataFrame) -> pl.DataFrame:
    """The sequences of one episode whose steps form a tree."""
    numbers = {step: number for number, step in enumerate(rows["step_index"].to_list())}
    paths: list[list[int]] = []
    home: dict[int, int] = {}
    for step, prefix in rows.select("step_index", "prefix_step_index").iter_rows():
        if prefix is None:
            paths.append([step])
            home[step] = len(paths) - 1
            continue
        if prefix not in home:
            _refuse(rows.row(numbers[step], named=True), f"extends step {prefix}, which has no tokens before it")
        trunk = paths[home[prefix]]
        if trunk[-1] == prefix:
            trunk.append(step)
            home[step] = home[prefix]
        else:
            paths.append([*trunk[: trunk.index(prefix) + 1], step])
            home[step] = len(paths) - 1
    parts = [
        rows[[numbers[step] for step in path]].with_columns(
            pl.lit(sequence, pl.Int32).alias("sequence"),
            pl.Series("repeated", [home[step] != sequence for step in path]),
        )
        for sequence, path in enumerate(paths)
    ]
    return pl.concat(parts)


def _check_lengths(members: pl.DataFrame) -> None:
    """Each row must begin where the row before it in its sequence ends."""
    sequence_R2 = members.select("episode_id", "sequence").to_numpy()
    before_R = np.zeros(members.height, np.int64)
    inside_R = (sequence_R2[1:] == sequence_R2[:-1]).all(axis=1)
    before_R[1:] = np.where(inside_R, members["end"].to_numpy()[:-1], 0)
    bad = np.flatnonzero(members["prefix_length"].to_numpy() != before_R)
    if len(bad):
        row = members.row(int(bad[0]), named=True)
        _refuse(row, f"has prefix_length {row['prefix_length']}, but its prefix ends at {before_R[bad[0]]}")


def _refuse(row: dict[str, Any], fault: str) -> NoReturn:
    raise ContractError(
        f"table `tokens`, row episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}: "
        f"{fault}; record the episode again"
    )


_OPEN_GROUPS = 8
"""Decoded row groups kept: a sequence's rows lie side by side, or nearly."""


def fingerprints(snapshot: Snapshot, members: pl.DataFrame) -> pl.DataFrame:
    """Hashes of the contexts and actions of some steps.

    Members are whole sequences, sorted, at least up to their last wanted step; `wanted` says which steps. Returns
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
            context_hash = int.from_bytes(hasher.digest(), "little") & ids.MASK
            found.append((context_hash, ids.bytes_hash(action), length))
        hasher.update(action)
        length += len(action) // 4
    schema = {"context_hash": pl.Int64, "action_hash": pl.Int64, "context_tokens": pl.Int64}
    steps = ordered.filter("wanted").select("episode_id", "step_index")
    return pl.concat([steps, pl.DataFrame(found, schema=schema, orient="row")], how="horizontal")


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
