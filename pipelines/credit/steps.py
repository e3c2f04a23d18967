"""Input of estimators: its columns, its checks, and the steps as arrays in canonical order.

The checks test the schema before any value is read, and the values with a few vectorised passes. Row order is not time,
and NaN is not a number here: every fault is an error that names the episode and the remedy. NULL means unknown.

In canonical order each group (an episode, its siblings, an anchor) is a run of consecutive rows. One `ufunc.reduceat`
then reduces all groups. It adds in an order that only the run decides, so equal rows give equal bits.

`gather` sorts rows by (group, key) with one sort of one integer array, twice as fast as a sort by columns. It packs a
row's group, some bits of a hash of its key, and its number into 63 bits. An unstable sort then leaves equal keys of a
group together and in row order. It detects different keys with equal bits; the caller then sorts by the columns. It
sorts a few groups at a time, inside the processor's cache, which is three times as fast.

Axes: `_N` rows (active steps), `_E` episodes, `_P` task groups, `_M` rows gathered, `_K` runs of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from lake.errors import ContractError

KEYS = ("group_id", "episode_id", "step_index")
"""The canonical order of rows."""
STATUSES = ("completed", "truncated", "aborted", "failed")
"""Valid values of `status`."""
COMPONENT = "score_"
"""Prefix of the columns with the episode score of one scorer or reward: `score_<name>`."""


@dataclass(frozen=True, slots=True)
class InputNeeds:
    """Columns that an estimator reads in addition to the keys and to those of `_DEFAULTS`."""

    step_columns: tuple[str, ...] = ()
    """Columns of the table `steps`, with `reward` if it is required."""
    anchor_columns: tuple[str, ...] = ()
    """Columns that the anchor definition reads, in any type."""
    episode_columns: tuple[str, ...] = ()
    """Columns of the table `episodes`, repeated for every step of the episode. Includes the batch key."""
    components: tuple[str, ...] = ()
    """Names of scorers or rewards, whose scores are the columns `score_<name>`."""
    episode_score: bool = False
    """Whether the job's episode score is required."""
    values: str | None = None
    """Scorer whose scores replace `value_estimate` and `final_value_estimate`; None reads the columns."""

    @property
    def of_episodes(self) -> tuple[str, ...]:
        """Names of `episode_columns` and of the component scores."""
        return (*self.episode_columns, *(COMPONENT + name for name in self.components))

    @property
    def required(self) -> tuple[str, ...]:
        """Names of all required columns, keys included, once each."""
        score = ("episode_score",) * self.episode_score
        names = (*KEYS, *self.step_columns, *score, *self.anchor_columns, *self.of_episodes)
        return tuple(dict.fromkeys(names))


_TYPE_TESTS: dict[str, Callable[[pl.DataType], bool]] = {
    "integer or string": lambda dtype: dtype.is_integer() or dtype == pl.String,
    "signed integer": lambda dtype: dtype.is_signed_integer(),
    "number": lambda dtype: dtype.is_numeric() or dtype == pl.Null,
    "string": lambda dtype: dtype == pl.String,
    "boolean": lambda dtype: dtype in (pl.Boolean, pl.Null),
}
_EXPECTED_TYPES = {
    "episode_id": "integer or string",
    "group_id": "integer or string",
    "step_index": "signed integer",
    "reward": "number",
    "episode_score": "number",
    "status": "string",
    "is_active": "boolean",
    "is_action_valid": "boolean",
    "state": "string",
    "state_hash": "signed integer",
    "state_role": "string",
    "state_is_error": "boolean",
    "value_estimate": "number",
    "final_value_estimate": "number",
    "completion_tokens": "number",
}
_DEFAULTS = {
    "reward": pl.lit(None, pl.Float64),
    "episode_score": pl.lit(None, pl.Float64),
    "status": pl.lit("completed"),
    "is_active": pl.lit(value=True),
    "is_action_valid": pl.lit(value=True),
}


def select_inputs(steps: pl.LazyFrame, needs: InputNeeds) -> pl.LazyFrame:
    """Select the columns that an estimator reads, cast them, and fill in the optional ones.

    The result has the keys, `reward` and `episode_score` (float64, NULL if absent), `status` (all completed if absent),
    `is_active` and `is_action_valid` (NULL and absent mean true), and the other needed columns. Numbers become float64.

    Raises:
        ContractError: a column is missing or has a wrong type.
    """
    schema = steps.collect_schema()
    missing = [name for name in needs.required if name not in schema]
    if missing:
        msg = (
            f"steps: column {', '.join(missing)} is missing (found: {', '.join(schema.names()) or 'none'}). "
            f"This configuration reads {', '.join(needs.required)}; join or rename the columns, or choose other "
            "sources."
        )
        raise ContractError(msg)
    for name in (*needs.required, *_DEFAULTS):
        expected = _find_expected_type(name)
        if name in schema and expected and not _TYPE_TESTS[expected](schema[name]):
            msg = f"steps: column {name} has type {schema[name]}, expected {expected}. Cast it first."
            raise ContractError(msg)
    present = {name: pl.col(name) if name in schema else default for name, default in _DEFAULTS.items()}
    extras = (name for name in needs.required if name not in KEYS and name not in _DEFAULTS)
    return steps.select(
        *KEYS,
        present["reward"].cast(pl.Float64).alias("reward"),
        present["episode_score"].cast(pl.Float64).alias("episode_score"),
        present["status"].alias("status"),
        present["is_active"].fill_null(value=True).alias("is_active"),
        present["is_action_valid"].fill_null(value=True).alias("is_action_valid"),
        *(pl.col(name).cast(pl.Float64) if _find_expected_type(name) == "number" else name for name in extras),
    )


def _find_expected_type(name: str) -> str | None:
    """Return the kind of type that a column must have, or None if any type will do."""
    return "number" if name.startswith(COMPONENT) else _EXPECTED_TYPES.get(name)


def make_output_schema(inputs: pl.Schema) -> pl.Schema:
    """Return the columns of an estimator's result; ids and step index keep their input types."""
    return pl.Schema(
        {
            "episode_id": inputs["episode_id"],
            "step_index": inputs["step_index"],
            "group_id": inputs["group_id"],
            "anchor_key": pl.Int64(),
            "return_to_go": pl.Float64(),
            "a_episode": pl.Float64(),
            "a_step": pl.Float64(),
            "advantage": pl.Float64(),
            "group_size": pl.Int32(),
            "anchor_size": pl.Int32(),
            "anchor_episodes": pl.Int32(),
            "flags": pl.String(),
        }
    )


LARGEST = 1e100
"""Limit of rewards and scores: larger ones overflow when squared and summed."""


def check_steps(frame: pl.DataFrame) -> None:
    """Check a frame that is sorted by `KEYS`.

    Raises:
        ContractError: a NULL key; an episode in two groups; step_index not 0, 1, 2, ... ; an invalid status; a score or
            status that changes within an episode; a reward (of an active row) or score that is NaN, infinite or beyond
            1e100.
    """
    for name in KEYS:
        if nulls := frame[name].null_count():
            msg = f"steps: {name} is NULL in {nulls} rows. Every step needs its episode, its group and its number."
            raise ContractError(msg)
    opens = pl.col("episode_id").ne_missing(pl.col("episode_id").shift()) | pl.col("group_id").ne_missing(
        pl.col("group_id").shift()
    )
    expected = pl.when(opens).then(0).otherwise(pl.col("step_index").shift().cast(pl.Int64) + 1)
    within = ~opens
    active = pl.col("is_active")
    # The first mask counts rows; each of the others marks the rows of one fault.
    faults = frame.lazy().select(
        opens.alias("opens"),
        (pl.col("step_index") != expected).alias("step"),
        (~pl.col("status").is_in(STATUSES)).fill_null(value=True).alias("status"),
        (within & pl.col("status").ne_missing(pl.col("status").shift())).alias("status_changes"),
        (within & pl.col("episode_score").ne_missing(pl.col("episode_score").shift())).alias("score_changes"),
        (active & ~(pl.col("reward").abs() <= LARGEST)).fill_null(value=False).alias("reward"),
        (~(pl.col("episode_score").abs() <= LARGEST)).fill_null(value=False).alias("score"),
    )
    counts = faults.sum().collect().row(0, named=True)
    episodes = counts.pop("opens")
    for fault, rows in counts.items():
        if rows:
            raise ContractError(_describe_fault(fault, frame, faults))
    if frame["episode_id"].n_unique() != episodes:
        groups = frame.group_by("episode_id").agg(pl.col("group_id").unique().sort())
        row = groups.filter(pl.col("group_id").list.len() > 1).sort("episode_id").row(0, named=True)
        msg = (
            f"steps: episode {row['episode_id']!r} is in {len(row['group_id'])} groups "
            f"({', '.join(map(repr, row['group_id'][:3]))}). An episode belongs to one group: give each grouping a job."
        )
        raise ContractError(msg)


def _describe_fault(fault: str, frame: pl.DataFrame, faults: pl.LazyFrame) -> str:
    row = frame.filter(faults.select(fault).collect().to_series()).row(0, named=True)
    before = f"steps: episode {row['episode_id']!r}"
    at = f"{before}, step_index {row['step_index']}"
    return {
        "step": f"{at}: duplicate, missing or negative step. An episode's steps are numbered 0, 1, 2, ... once each, "
        "inactive ones included; remove duplicates or ingest the whole episode.",
        "status": f"{at}: status {row['status']!r} is invalid; valid: {', '.join(STATUSES)}. Map it to one of them.",
        "status_changes": f"{at}: status {row['status']!r} differs from the step before. A status belongs to the "
        "whole episode; join it by episode_id.",
        "score_changes": f"{at}: episode_score {row['episode_score']} differs from the step before. A score belongs "
        "to the whole episode; join it by episode_id.",
        "reward": f"{at}: reward {row['reward']} is not a finite number below 1e100. Write NULL where the reward is "
        "not known, or repair the source.",
        "score": f"{before}: episode_score {row['episode_score']} is not a finite number below 1e100. Write NULL where "
        "the episode is not scored, or repair the scorer.",
    }[fault]


def check_extras(frame: pl.DataFrame, needs: InputNeeds) -> None:
    """Check the numbers of an estimator's further columns in active rows sorted by `KEYS`.

    Raises:
        ContractError: a number is NaN, infinite or beyond 1e100, or a value of the episode changes within it.
    """
    names = dict.fromkeys((*needs.step_columns, *needs.of_episodes))
    floats = [name for name in names if name != "reward" and frame.schema[name] == pl.Float64]
    if not floats and not needs.of_episodes:
        return
    within = pl.col("episode_id") == pl.col("episode_id").shift()
    faults = frame.lazy().select(
        *((~(pl.col(name).abs() <= LARGEST)).fill_null(value=False).alias(f"{name} is not finite") for name in floats),
        *((within & pl.col(n).ne_missing(pl.col(n).shift())).alias(f"{n} changes") for n in needs.of_episodes),
    )
    for fault, rows in faults.sum().collect().row(0, named=True).items():
        if rows:
            row = frame.filter(faults.select(fault).collect().to_series()).row(0, named=True)
            name, kind = fault.split(" ", 1)
            msg = f"steps: episode {row['episode_id']!r}, step_index {row['step_index']}: {name} {row[name]!r} "
            if kind == "changes":
                msg += "differs from the step before. It belongs to the whole episode; join it by episode_id."
            else:
                msg += "is not a finite number below 1e100. Write NULL where it is not known, or repair the source."
            raise ContractError(msg)


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
        """Return the runs whose first rows are marked."""
        starts_K = np.flatnonzero(first_N)
        return cls(starts_K, np.diff(starts_K, append=len(first_N)))

    @classmethod
    def of(cls, frame: pl.DataFrame, name: str) -> Self:
        """Return the runs of equal values of a column."""
        column = pl.col(name)
        return cls.opening_at(frame.select(column.ne_missing(column.shift())).to_series().to_numpy())

    @property
    def last_K(self) -> Ints:
        """Index of each run's last row."""
        return self.starts_K + self.lengths_K - 1

    def sum(self, values_N: Floats) -> Floats:
        """Return the sum of each run; NaN where a value is NaN."""
        sums_K: Floats = np.add.reduceat(values_N, self.starts_K)
        return sums_K

    def count(self, mask_N: Bools) -> npt.NDArray[np.int32]:
        """Count the true values of each run."""
        counts_K: npt.NDArray[np.int32] = np.add.reduceat(mask_N, self.starts_K, dtype=np.int32)
        return counts_K

    def any(self, mask_N: Bools) -> Bools:
        """Return whether each run has a true value."""
        return np.logical_or.reduceat(mask_N, self.starts_K)

    def min(self, values_N: Floats) -> Floats:
        """Return the smallest value of each run."""
        return np.minimum.reduceat(values_N, self.starts_K)

    def max(self, values_N: Floats) -> Floats:
        """Return the largest value of each run."""
        return np.maximum.reduceat(values_N, self.starts_K)

    def spread(self, values_K: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """Repeat each run's value for its rows."""
        return np.repeat(values_K, self.lengths_K)

    def ids_N(self) -> npt.NDArray[np.int32]:
        """Return the number of each row's run: 0, 1, 2, ..."""
        return self.spread(np.arange(len(self.starts_K), dtype=np.int32))


def scatter(values_M: npt.NDArray[Scalar], order_M: Ints) -> npt.NDArray[Scalar]:
    """Undo a gathering: write the value of gathered row m to row `order_M[m]`."""
    values_N = np.empty_like(values_M)
    values_N[order_M] = values_M
    return values_N


_WORD_BITS = 63
_FEWEST_HASH_BITS = 12
_PIECE = 4096
"""Approximate rows sorted at a time; 32 KB."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd multiplier: the product keeps all information, and its high bits depend on all bits of the key."""
Words: TypeAlias = npt.NDArray[np.uint64]
Gathered: TypeAlias = tuple[npt.NDArray[np.int64], Bools]
"""Row number of each gathered row, and whether it opens a new (group, key)."""


def gather(keys_N: npt.NDArray[np.int64], groups: Segments) -> Gathered | None:
    """Order rows by group with equal keys together, in row order; return None if the hash bits are too few."""
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


def count_distinct(values_M: Words, runs: Segments) -> npt.NDArray[np.int64]:
    """Count the distinct values (64-bit hashes) of each run, by the high bits that fit next to the run number."""
    run_bits = max(1, (len(runs.starts_K) - 1).bit_length())
    packed_M = values_M >> np.uint64(run_bits)
    packed_M |= runs.spread(np.arange(len(runs.starts_K), dtype=np.uint64) << np.uint64(64 - run_bits))
    _sort_within(packed_M, runs)
    new_M = np.ones(len(packed_M), np.bool_)
    np.not_equal(packed_M[1:], packed_M[:-1], out=new_M[1:])
    return np.add.reduceat(new_M, runs.starts_K, dtype=np.int64)


def _sort_within(packed_N: Words, runs: Segments) -> None:
    """Sort values in place; their highest bits are the run number."""
    ends_K = runs.starts_K + runs.lengths_K
    cuts = ends_K[np.searchsorted(ends_K, np.arange(_PIECE, len(packed_N), _PIECE))]
    bounds = np.unique(np.concatenate([[0], cuts, [len(packed_N)]]))
    for start, end in pairwise(bounds.tolist()):
        packed_N[start:end].sort()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Checked, active steps sorted by (group, episode, step), and the runs of rows."""

    frame: pl.DataFrame
    """Keys, anchor columns and the estimator's further columns, one row per active step."""
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
    """Episode score, NaN where NULL."""
    truncated_E: Bools
    """The episode was cut off by a limit."""
    broken_E: Bools
    """The episode was aborted or failed."""

    @classmethod
    def of(cls, inputs: pl.DataFrame, needs: InputNeeds | None = None) -> Self | None:
        """Sort and check the result of `select_inputs` and drop inactive rows; return None if no row is active."""
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
            reward_N=to_floats(frame["reward"]),
            invalid_N=~frame["is_action_valid"].to_numpy(),
            score_E=to_floats(firsts["episode_score"]),
            truncated_E=(firsts["status"] == "truncated").to_numpy(),
            broken_E=firsts["status"].is_in(["aborted", "failed"]).to_numpy(),
        )

    def episode_numbers(self, name: str) -> Floats:
        """Return a numeric column of `episodes`, one value per episode, NaN where NULL."""
        return to_floats(self.frame[name].gather(self.episodes.starts_K))


def _is_sorted(frame: pl.DataFrame) -> bool:
    """Return whether rows are in canonical order, as in the lake's files; this costs a tenth of a sort."""
    group, episode, step = (pl.col(name) for name in KEYS)
    ascending = (group > group.shift()) | (
        (group == group.shift())
        & ((episode > episode.shift()) | ((episode == episode.shift()) & (step >= step.shift())))
    )
    return bool(frame.lazy().select(ascending.slice(1).fill_null(value=False).all()).collect().item())


def to_floats(column: pl.Series) -> Floats:
    """Return the column's values, NaN where NULL."""
    return column.fill_null(np.nan).to_numpy()
