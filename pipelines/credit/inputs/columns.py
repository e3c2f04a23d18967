"""The columns a credit estimator reads and writes, and the check that an input has them and may be used.

Columns are checked on the schema, before anything is read; values with a few vectorised passes. The reference code
takes row order for time and lets NaN through: both go wrong in silence. Here every fault is an error that names the
episode and says what to do. NULL is not a fault: it means unknown.
"""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from lake.errors import ContractError

KEYS = ("group_id", "episode_id", "step_index")
"""The canonical order of rows."""
STATUSES = ("completed", "truncated", "aborted", "failed")
"""How an episode can have ended."""
COMPONENT = "score_"
"""A column `score_<name>` holds the score that the scorer or reward of that name gave the episode."""


@dataclass(frozen=True, slots=True)
class InputNeeds:
    """Columns an estimator reads beyond the keys, and what jobs give where they have it (those of `_DEFAULTS`)."""

    step_columns: tuple[str, ...] = ()
    """Of the table `steps`; `reward` is named if it must be there."""
    anchor_columns: tuple[str, ...] = ()
    """That the anchor definition reads, with the types they have."""
    episode_columns: tuple[str, ...] = ()
    """Of the table `episodes`, repeated for every step of the episode. Includes the batch key."""
    components: tuple[str, ...] = ()
    """Scorers or rewards; the score that `<name>` gave the episode is the column `score_<name>`."""
    episode_score: bool = False
    """The score of the job must be there."""

    @property
    def of_episodes(self) -> tuple[str, ...]:
        """Column names beyond the usual ones whose value belongs to the whole episode."""
        return (*self.episode_columns, *(COMPONENT + name for name in self.components))

    @property
    def required(self) -> tuple[str, ...]:
        """Every column that must be there, keys included, once each."""
        score = ("episode_score",) * self.episode_score
        names = (*KEYS, *self.step_columns, *score, *self.anchor_columns, *self.of_episodes)
        return tuple(dict.fromkeys(names))


_IS: dict[str, Callable[[pl.DataType], bool]] = {
    "integer or string": lambda dtype: dtype.is_integer() or dtype == pl.String,
    "signed integer": lambda dtype: dtype.is_signed_integer(),
    "number": lambda dtype: dtype.is_numeric() or dtype == pl.Null,
    "string": lambda dtype: dtype == pl.String,
    "boolean": lambda dtype: dtype in (pl.Boolean, pl.Null),
}
_WANTED = {
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
    """The columns an estimator reads, in one type each, with the optional ones filled in.

    Keys, `reward` and `episode_score` (float64, NULL if absent), `status` (all completed if absent), `is_active`,
    `is_action_valid` (NULL and absent mean true), and the other needed columns: numbers as float64, the rest as they
    are. ContractError if a column is missing or has a type that cannot be meant.
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
        wanted = _wanted(name)
        if name in schema and wanted and not _IS[wanted](schema[name]):
            msg = f"steps: column {name} has type {schema[name]}, expected {wanted}. Cast it first."
            raise ContractError(msg)
    present = {name: pl.col(name) if name in schema else default for name, default in _DEFAULTS.items()}
    others = (name for name in needs.required if name not in KEYS and name not in _DEFAULTS)
    return steps.select(
        *KEYS,
        present["reward"].cast(pl.Float64).alias("reward"),
        present["episode_score"].cast(pl.Float64).alias("episode_score"),
        present["status"].alias("status"),
        present["is_active"].fill_null(value=True).alias("is_active"),
        present["is_action_valid"].fill_null(value=True).alias("is_action_valid"),
        *(pl.col(name).cast(pl.Float64) if _wanted(name) == "number" else name for name in others),
    )


def _wanted(name: str) -> str | None:
    """The kind of type a column must have; None for columns that only a definition of the user's reads."""
    return "number" if name.startswith(COMPONENT) else _WANTED.get(name)


def output_schema(inputs: pl.Schema) -> pl.Schema:
    """Columns and types of an estimator's result; ids and step index keep the types they came in."""
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
"""Rewards and scores beyond this overflow when squared and summed; they are a fault, like NaN and infinity."""


def check_steps(frame: pl.DataFrame) -> None:
    """Check a frame that is sorted by `KEYS`.

    Raises:
        ContractError: a NULL key; an episode in two groups; step_index not 0, 1, 2, ... ; a status outside the closed
            set; a score or status that changes within an episode; a reward or score that is NaN, infinite or beyond
            1e100 (rewards of inactive rows are not looked at).
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
            raise ContractError(_message(fault, frame, faults))
    if frame["episode_id"].n_unique() != episodes:
        raise ContractError(_two_groups(frame))


def _message(fault: str, frame: pl.DataFrame, faults: pl.LazyFrame) -> str:
    row = frame.filter(faults.select(fault).collect().to_series()).row(0, named=True)
    before = f"steps: episode {row['episode_id']!r}"
    at = f"{before}, step_index {row['step_index']}"
    return {
        "step": f"{at}: duplicate, missing or negative step. An episode's steps are numbered 0, 1, 2, ... once each, "
        "inactive ones included; remove duplicates or ingest the whole episode.",
        "status": f"{at}: status {row['status']!r} is none of {', '.join(STATUSES)}. Map it to one of them.",
        "status_changes": f"{at}: status {row['status']!r} differs from the step before. A status belongs to the "
        "whole episode; join it by episode_id.",
        "score_changes": f"{at}: episode_score {row['episode_score']} differs from the step before. A score belongs "
        "to the whole episode; join it by episode_id.",
        "reward": f"{at}: reward {row['reward']} is not a finite number below 1e100. Write NULL where the reward is "
        "not known, or repair the source.",
        "score": f"{before}: episode_score {row['episode_score']} is not a finite number below 1e100. Write NULL where "
        "the episode is not scored, or repair the scorer.",
    }[fault]


def _two_groups(frame: pl.DataFrame) -> str:
    groups = frame.group_by("episode_id").agg(pl.col("group_id").unique().sort())
    row = groups.filter(pl.col("group_id").list.len() > 1).sort("episode_id").row(0, named=True)
    return (
        f"steps: episode {row['episode_id']!r} is in {len(row['group_id'])} groups "
        f"({', '.join(map(repr, row['group_id'][:3]))}). An episode belongs to one group: give each grouping a job of "
        "its own."
    )


def check_extras(frame: pl.DataFrame, needs: InputNeeds) -> None:
    """ContractError if an active row sorted by `KEYS` has, in the columns beyond the usual ones, a faulty number.

    Faulty is NaN, infinite or beyond 1e100, and a value of the whole episode that changes within it.
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
