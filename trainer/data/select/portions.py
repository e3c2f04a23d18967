"""The selected episodes in portions, so that few of their steps are held as wide rows at a time.

What is decided of a step depends on its own episode, but for a few numbers of all of them. A portion is a range of
episode ids with a certain number of steps. Ids are hashes, so a file has rows of every portion: a table is gone through
once, in batches whose rows are dealt out to the portions. Between two stages a column that has one value throughout
(the encoding, usually the temperature, what nobody recorded) is held as that value.

Axes: `_E` selected episodes, `_N` rows of a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from lake.read.parquet import blamed, collected
from lake.read.visibility import DataFile

PORTION = 1 << 18
"""Steps of a portion, but for those of its last episode; rows of a batch."""


class Portions:
    """Episodes, cut into portions.

    Args:
        episodes: episode_id and num_steps, sorted by episode_id, each once.
    """

    def __init__(self, episodes: pl.DataFrame) -> None:
        self._ids_E = episodes["episode_id"].to_numpy()
        steps_E = episodes["num_steps"].to_numpy().astype(np.int64)
        portion_E = (np.cumsum(steps_E) - steps_E) // PORTION
        firsts = np.flatnonzero(np.diff(portion_E, prepend=-1))
        self.episodes = [episodes[low:high] for low, high in pairwise([0, *firsts[1:].tolist(), len(portion_E)])]
        """The episodes of each portion; at least one portion."""
        self._later_ids = self._ids_E[firsts[1:]]
        """First id of each portion but the first."""

    def groups(self, files: Sequence[DataFile]) -> list[tuple[list[DataFile], int]]:
        """Neighbouring files to be read at once, and the rows before them; all files where there is one portion.

        Of several files Polars reads ahead as many as it has room for threads, whatever their size.
        """
        found: list[tuple[list[DataFile], int]] = [([], 0)]
        before = held = 0
        for file in files:
            if held and held + file.rows > PORTION and len(self.episodes) > 1:
                found.append(([], before))
                held = 0
            found[-1][0].append(file)
            before, held = before + file.rows, held + file.rows
        return found

    def read(self, frames: Sequence[pl.LazyFrame]) -> Iterator[pl.DataFrame]:
        """The rows of the selected episodes, portion by portion; a LakeAccessError where a file cannot be read.

        Args:
            frames: rows of a lake's files with a column episode_id, in the same columns; read one after the other.
        """
        if len(self.episodes) == 1:
            # Few ids are looked for while files are read; a set of many would take more memory than their rows.
            mine = pl.col("episode_id").is_in(self.episodes[0]["episode_id"].implode())
            yield pl.concat(collected(frame.filter(mine)) for frame in frames)
            return
        pieces: list[list[pl.DataFrame]] = [[] for _ in self.episodes]
        for frame in frames:
            for batch in _batches(frame):
                for number, piece in enumerate(self.deal(batch)):
                    if piece.height:
                        pieces[number].append(compact(piece))
        empty = pl.DataFrame(schema=frames[0].collect_schema())
        for number, parts in enumerate(pieces):
            pieces[number] = []
            yield pl.concat(parts) if parts else empty

    def deal(self, rows: pl.DataFrame) -> list[pl.DataFrame]:
        """The rows of the selected episodes among some, portion by portion."""
        ids_N = rows["episode_id"].to_numpy()
        order_N = np.argsort(ids_N, kind="stable")
        sorted_N = ids_N[order_N]
        # Sorted ids are found in one walk through the memory of all ids.
        place_N = np.minimum(np.searchsorted(self._ids_E, sorted_N), len(self._ids_E) - 1)
        is_mine_N = self._ids_E[place_N] == sorted_N
        mine = order_N[is_mine_N]
        edges = np.searchsorted(sorted_N[is_mine_N], self._later_ids).tolist()
        return [rows[mine[low:high]] for low, high in pairwise([0, *edges, len(mine)])]


def _batches(frame: pl.LazyFrame) -> Iterator[pl.DataFrame]:
    """As `collected`, in order, in batches of about `PORTION` rows, of which few are held at a time."""
    try:
        yield from frame.collect_batches(chunk_size=PORTION)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise blamed(frame, error) from error


def compact(frame: pl.DataFrame) -> pl.DataFrame:
    """The same rows; columns of one value, or of NULL alone, are held as that."""
    return frame.with_columns(_literals(_constants(frame), frame.schema))


def only(frame: pl.DataFrame, condition: pl.Expr) -> pl.DataFrame:
    """The rows that satisfy a condition; the frame itself, and no copy of it, where all do."""
    is_kept = frame.select(condition.fill_null(value=False)).to_series()
    return frame if is_kept.all() else frame.filter(is_kept)


def joined(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """The rows of some portions, which lose them meanwhile: column by column, each in one piece of memory."""
    filled = [part for part in parts if part.height] or parts[:1]
    if len(filled) == 1:
        return compact(filled[0].rechunk())
    schema, constants = filled[0].schema, [_constants(part) for part in filled]
    shared = {name: value for name, value in constants[0].items() if all((name, value) in c.items() for c in constants)}
    columns = []
    for name in schema:
        mine = [part.select(name) for part in filled]
        for part in filled:
            part.drop_in_place(name)
        if name not in shared:
            columns.append(pl.concat(mine, rechunk=True))
    return pl.concat(columns, how="horizontal").with_columns(_literals(shared, schema)).select(schema.names())


def _constants(frame: pl.DataFrame) -> dict[str, Any]:
    """Value of each column that has one alone, bit for bit: 0.0 may stand beside -0.0, NaN beside another NaN."""
    if frame.is_empty():
        return {}
    # Expressions leave a column that is held as one value as it is; `frame[name]` would lay it out for good.
    values = frame.select(pl.all().first()).row(0, named=True)
    is_alike = frame.select(pl.all().eq_missing(pl.all().first()).all()).row(0, named=True)
    unsure = [name for name, value in values.items() if isinstance(value, float) and not abs(value) > 0]
    return {name: value for name, value in values.items() if is_alike[name] and name not in unsure}


def _literals(values: Mapping[str, Any], schema: Mapping[str, pl.DataType]) -> list[pl.Expr]:
    return [pl.lit(value, schema[name]).alias(name) for name, value in values.items()]
