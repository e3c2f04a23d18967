"""Steps in canonical order, as arrays: what estimators compute on.

Groups are runs of consecutive rows: once rows are in canonical order every group (an episode, its siblings, an anchor)
is a run, and a reduction over all groups is one `ufunc.reduceat`. It adds in a fixed order that depends on the run's
own values alone, so the same rows give the same bits whatever order they came in and whatever other groups are present.

Rows are gathered by (group, key) with one sort of one array of integers: twice as fast as a sort by columns. A row's
group, as many bits of a hash of its key as there is room for, and its number are packed into 63 bits, so an unstable
sort leaves equal keys of a group side by side and in row order. Two different keys whose few bits agree are noticed,
and then the caller sorts by the columns themselves. A few groups are sorted at a time, inside the processor's cache:
three times as fast as all of them at once.

Axes: `_N` rows (active steps), `_E` episodes, `_P` task groups, `_M` rows gathered, `_K` runs of rows.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.credit.inputs.columns import KEYS, InputNeeds, check_extras, check_steps

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Bools: TypeAlias = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Segments:
    """A partition of one or more consecutive rows into runs."""

    starts_K: Ints
    """Index of each run's first row, ascending, `starts_K[0] == 0`."""
    lengths_K: Ints
    """Rows of each run, at least 1."""

    @classmethod
    def opening_at(cls, first_N: Bools) -> Self:
        """Runs that open wherever `first_N` is true."""
        starts_K = np.flatnonzero(first_N)
        return cls(starts_K, np.diff(starts_K, append=len(first_N)))

    @classmethod
    def of(cls, frame: pl.DataFrame, name: str) -> Self:
        """Runs of equal values of a column."""
        column = pl.col(name)
        return cls.opening_at(frame.select(column.ne_missing(column.shift())).to_series().to_numpy())

    @property
    def last_K(self) -> Ints:
        """Index of each run's last row."""
        return self.starts_K + self.lengths_K - 1

    def sum(self, values_N: Floats) -> Floats:
        """Sum of each run; NaN where a value is NaN."""
        sums_K: Floats = np.add.reduceat(values_N, self.starts_K)
        return sums_K

    def count(self, mask_N: Bools) -> npt.NDArray[np.int32]:
        """True values of each run."""
        counts_K: npt.NDArray[np.int32] = np.add.reduceat(mask_N, self.starts_K, dtype=np.int32)
        return counts_K

    def any(self, mask_N: Bools) -> Bools:
        """Whether a run has a true value."""
        return np.logical_or.reduceat(mask_N, self.starts_K)

    def min(self, values_N: Floats) -> Floats:
        """Smallest value of each run."""
        return np.minimum.reduceat(values_N, self.starts_K)

    def max(self, values_N: Floats) -> Floats:
        """Largest value of each run."""
        return np.maximum.reduceat(values_N, self.starts_K)

    def spread(self, values_K: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """Each run's value, repeated for its rows."""
        return np.repeat(values_K, self.lengths_K)

    def ids_N(self) -> npt.NDArray[np.int32]:
        """Number of the run each row lies in: 0, 1, 2, ..."""
        return self.spread(np.arange(len(self.starts_K), dtype=np.int32))


def scatter(values_M: npt.NDArray[Scalar], order_M: Ints) -> npt.NDArray[Scalar]:
    """Undo a gathering: the value of gathered row m goes to row `order_M[m]`."""
    values_N = np.empty_like(values_M)
    values_N[order_M] = values_M
    return values_N


_WORD_BITS = 63
_FEWEST_HASH_BITS = 12
_PIECE = 4096
"""Rows sorted at a time, about; 32 KB."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that multiplying loses nothing; its high bits depend on all of the key's."""
Words: TypeAlias = npt.NDArray[np.uint64]
Gathered: TypeAlias = tuple[npt.NDArray[np.int64], Bools]
"""Row number of each gathered row, and whether it opens a new (group, key)."""


def gather(keys_N: npt.NDArray[np.int64], groups: Segments) -> Gathered | None:
    """Rows by group, equal keys together, rows of a key in their order; None if it cannot be told this way."""
    rows, runs = len(keys_N), len(groups.starts_K)
    row_bits, run_bits = (max(1, (count - 1).bit_length()) for count in (rows, runs))
    hash_bits = _WORD_BITS - row_bits - run_bits
    if hash_bits < _FEWEST_HASH_BITS:
        return None
    packed_N = (keys_N.view(np.uint64) * _SPREAD) >> np.uint64(64 - hash_bits)
    packed_N <<= np.uint64(row_bits)
    packed_N |= groups.spread(np.arange(runs, dtype=np.uint64) << np.uint64(row_bits + hash_bits))
    packed_N |= np.arange(rows, dtype=np.uint64)
    _sort_within(packed_N, groups)
    order_M = (packed_N & np.uint64((1 << row_bits) - 1)).view(np.int64)
    packed_N >>= np.uint64(row_bits)
    opens_M = np.ones(rows, np.bool_)
    np.not_equal(packed_N[1:], packed_N[:-1], out=opens_M[1:])
    keys_M = keys_N[order_M]
    if ((keys_M[1:] != keys_M[:-1]) & ~opens_M[1:]).any():
        return None
    return order_M, opens_M


def distinct(values_M: Words, runs: Segments) -> npt.NDArray[np.int64]:
    """How many different values (64-bit hashes) each run has, by as many of their bits as there is room for."""
    run_bits = max(1, (len(runs.starts_K) - 1).bit_length())
    packed_M = values_M >> np.uint64(run_bits)
    packed_M |= runs.spread(np.arange(len(runs.starts_K), dtype=np.uint64) << np.uint64(64 - run_bits))
    _sort_within(packed_M, runs)
    new_M = np.ones(len(packed_M), np.bool_)
    np.not_equal(packed_M[1:], packed_M[:-1], out=new_M[1:])
    return np.add.reduceat(new_M, runs.starts_K, dtype=np.int64)


def _sort_within(packed_N: Words, runs: Segments) -> None:
    """Sort values whose highest bits are the number of their run, in place."""
    ends_K = runs.starts_K + runs.lengths_K
    cuts = ends_K[np.searchsorted(ends_K, np.arange(_PIECE, len(packed_N), _PIECE))]
    bounds = np.unique(np.concatenate([[0], cuts, [len(packed_N)]]))
    for start, end in pairwise(bounds.tolist()):
        packed_N[start:end].sort()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Checked, active steps sorted by (group, episode, step), and the runs of rows they form."""

    frame: pl.DataFrame
    """Keys, anchor columns and what else the estimator needs, one row per active step."""
    episodes: Segments
    """Rows -> episodes."""
    groups: Segments
    """Rows -> task groups."""
    siblings: Segments
    """Episodes -> task groups."""
    reward_N: Floats
    """Environment reward, NaN where NULL."""
    invalid_N: Bools
    """The action was malformed."""
    score_E: Floats
    """NaN where NULL."""
    truncated_E: Bools
    """The episode was cut off by a limit."""
    broken_E: Bools
    """The episode was aborted or failed."""

    @classmethod
    def of(cls, inputs: pl.DataFrame, needs: InputNeeds | None = None) -> Self | None:
        """Sort, check (`check_steps`, and `check_extras` if needs are given) and drop inactive rows; None without any.

        The columns are as `select_inputs` gives them.
        """
        if not _is_sorted(inputs):
            inputs = inputs.sort(KEYS)
        check_steps(inputs)
        frame = inputs if inputs["is_active"].all() else inputs.filter("is_active")
        if frame.is_empty():
            return None
        if needs is not None:
            check_extras(frame, needs)
        episodes, groups = Segments.of(frame, "episode_id"), Segments.of(frame, "group_id")
        firsts = frame.select("episode_score", "status").gather(episodes.starts_K)
        opens_group_N = np.zeros(len(frame), np.bool_)
        opens_group_N[groups.starts_K] = True
        return cls(
            frame=frame.drop("reward", "is_action_valid", "is_active", "episode_score", "status"),
            episodes=episodes,
            groups=groups,
            siblings=Segments.opening_at(opens_group_N[episodes.starts_K]),
            reward_N=floats(frame["reward"]),
            invalid_N=~frame["is_action_valid"].to_numpy(),
            score_E=floats(firsts["episode_score"]),
            truncated_E=(firsts["status"] == "truncated").to_numpy(),
            broken_E=firsts["status"].is_in(["aborted", "failed"]).to_numpy(),
        )

    def step_numbers(self, name: str) -> Floats:
        """A numeric column of the frame, NaN where NULL."""
        return floats(self.frame[name])

    def episode_numbers(self, name: str) -> Floats:
        """A numeric column whose value belongs to the whole episode: one per episode, NaN where NULL."""
        return floats(self.frame[name].gather(self.episodes.starts_K))


def _is_sorted(frame: pl.DataFrame) -> bool:
    """Whether rows are in canonical order already, as the lake's files are: a check costs a tenth of a sort."""
    group, episode, step = (pl.col(name) for name in KEYS)
    ascending = (group > group.shift()) | (
        (group == group.shift())
        & ((episode > episode.shift()) | ((episode == episode.shift()) & (step >= step.shift())))
    )
    return bool(frame.lazy().select(ascending.slice(1).fill_null(value=False).all()).collect().item())


def floats(column: pl.Series) -> Floats:
    """The column's values, NaN where NULL."""
    return column.fill_null(np.nan).to_numpy()
