"""Arranges token rows in training sequences, and hashes the contexts in which steps were decided.

A row whose prefix is NULL opens a sequence. A row that extends the sequence's last row continues it, so an append-only
episode is one sequence with several action spans. A row that extends an earlier step forks: it opens a new sequence
that repeats the path to that step as context. Every action carries loss in exactly one sequence, the first that
contains it.

Two hashes identify the context of a step and its action: of all token ids before the action along its training
sequence, and of the action's ids. The division of the ids into rows does not matter. Files are read once, row group by
row group.

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
from trainer.data.row_groups import RowGroup, RowGroupReader

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def link_sequences(rows: pl.DataFrame) -> pl.DataFrame:
    """Arrange token rows of one encoding, sorted by episode_id and step_index, in sequences.

    Returns members of sequences, sorted by episode, sequence, step: the columns of `rows`, `sequence` (0, 1, ... within
    the episode), `repeated` (an earlier sequence has the row already) and `end` (tokens of the sequence up to and
    including this row).

    Raises:
        ContractError: a row extends a step that has no tokens, or its prefix_length is not the end of that step.
    """
    end = (pl.col("prefix_length") + pl.col("n_context") + pl.col("n_action")).cast(pl.Int64)
    episode_R, step_R = (rows[name].to_numpy() for name in ("episode_id", "step_index"))
    prefix_R = rows["prefix_step_index"].fill_null(-1).to_numpy()
    opens_R = prefix_R < 0
    follows_R = np.zeros(rows.height, np.bool_)
    follows_R[1:] = (episode_R[1:] == episode_R[:-1]) & (prefix_R[1:] == step_R[:-1])
    rows = rows.with_columns(end=end, sequence=_number_sequences(rows, opens_R), repeated=pl.lit(value=False))
    branched_ids = rows.filter(pl.Series(~(follows_R | opens_R)))["episode_id"].unique(maintain_order=True)
    if len(branched_ids):
        is_branched = pl.col("episode_id").is_in(branched_ids.implode())
        trees = [_link_branches(part) for part in rows.filter(is_branched).partition_by("episode_id")]
        rows = pl.concat([rows.filter(~is_branched), *trees]).sort("episode_id", "sequence", "step_index")
    sequence_R2 = rows.select("episode_id", "sequence").to_numpy()
    before_R = np.zeros(rows.height, np.int64)
    inside_R = (sequence_R2[1:] == sequence_R2[:-1]).all(axis=1)
    before_R[1:] = np.where(inside_R, rows["end"].to_numpy()[:-1], 0)
    bad = np.flatnonzero(rows["prefix_length"].to_numpy() != before_R)
    if len(bad):
        row = rows.row(int(bad[0]), named=True)
        _refuse(row, f"has prefix_length {row['prefix_length']}, but its prefix ends at {before_R[bad[0]]}")
    return rows


def _number_sequences(rows: pl.DataFrame, opens_R: Bools) -> pl.Series:
    """Number each row's sequence in its episode; every row must extend the one before or open a sequence."""
    episode_R = rows["episode_id"].to_numpy()
    first_R = np.ones(rows.height, np.bool_)
    first_R[1:] = episode_R[1:] != episode_R[:-1]
    opened_R: Ints = np.cumsum(opens_R)
    before_E: Ints = (opened_R - opens_R)[first_R]
    number_R: Ints = opened_R - before_E[np.cumsum(first_R) - 1] - 1
    return pl.Series(number_R, dtype=pl.Int32)


def _link_branches(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the sequences of one episode whose steps form a tree."""
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
    sequences = [
        rows[[numbers[step] for step in path]].with_columns(
            pl.lit(sequence, pl.Int32).alias("sequence"),
            pl.Series("repeated", [home[step] != sequence for step in path]),
        )
        for sequence, path in enumerate(paths)
    ]
    return pl.concat(sequences)


def _refuse(row: dict[str, Any], fault: str) -> NoReturn:
    raise ContractError(
        f"table `tokens`, row episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}: "
        f"{fault}; record the episode again"
    )


_OPEN_GROUPS = 8
"""Decoded row groups in memory; a sequence's rows are neighbours or nearly so."""


def hash_contexts(snapshot: Snapshot, members: pl.DataFrame) -> pl.DataFrame:
    """Hash the contexts and actions of some steps.

    Members are whole sequences, sorted, at least up to the last step with `wanted`. Returns one row per wanted member:
    episode_id, step_index, context_hash, action_hash (63 bits), context_tokens.
    """
    rows = _TokenReader(snapshot)
    keys = ("episode_id", "sequence")
    number = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in keys).cum_sum()
    with_numbers = members.with_columns(number=number)
    # Sequences come in the order of the files, each from its first row.
    position = [pl.col(name).first().over("number") for name in ("file", "row")]
    in_file_order = with_numbers.sort(*position, "number", maintain_order=True)
    hashes: list[tuple[int, int, int]] = []
    before, hasher, length = -1, hashlib.blake2b(digest_size=8), 0
    for sequence, file, row, is_wanted in in_file_order.select("number", "file", "row", "wanted").iter_rows():
        if sequence != before:
            before, hasher, length = sequence, hashlib.blake2b(digest_size=8), 0
        context, action = rows.read_row(file, row)
        hasher.update(context)
        length += len(context) // 4
        if is_wanted:
            context_hash = int.from_bytes(hasher.digest(), "little") & ids.MASK
            hashes.append((context_hash, ids.bytes_hash(action), length))
        hasher.update(action)
        length += len(action) // 4
    schema = {"context_hash": pl.Int64, "action_hash": pl.Int64, "context_tokens": pl.Int64}
    steps = in_file_order.filter("wanted").select("episode_id", "step_index")
    return pl.concat([steps, pl.DataFrame(hashes, schema=schema, orient="row")], how="horizontal")


class _TokenReader:
    """Reads token ids of rows of the table `tokens`, as bytes of int32."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._reader = RowGroupReader(snapshot.files("tokens"), snapshot.objects, masks=False, logprobs=False)
        self._group = lru_cache(_OPEN_GROUPS)(self._reader.read)
        self._starts = lru_cache(None)(self._reader.read_group_starts)

    def read_row(self, file: int, row: int) -> tuple[bytes, bytes]:
        """Return context and action of a row."""
        starts = self._starts(file)
        number = int(np.searchsorted(starts, row, side="right")) - 1
        group: RowGroup = self._group(file, number)
        inner = row - int(starts[number])
        context = group.context_C[group.context_starts[inner] : group.context_starts[inner + 1]]
        action = group.action_A[group.action_starts[inner] : group.action_starts[inner + 1]]
        return context.astype(np.int32, copy=False).tobytes(), action.astype(np.int32, copy=False).tobytes()
