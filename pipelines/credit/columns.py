"""The columns a credit estimator reads and writes, and the check that an input has them.

Checked on the schema alone, before anything is read. What the values must satisfy is in `checks.py` and `extras.py`.
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
    """Columns an estimator's configuration reads, beyond what every job gives.

    Every job gives the keys, and, where it has them, `reward`, `episode_score`, `status`, `is_active` and
    `is_action_valid`.
    """

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

    Args:
        steps: one row per step.
        needs: columns required beyond the keys.

    Returns:
        Keys, `reward` and `episode_score` (float64, NULL if absent), `status` (all completed if absent), `is_active`,
        `is_action_valid` (NULL and absent mean true), and the other needed columns: numbers as float64, the rest as
        they are.

    Raises:
        ContractError: a column is missing or has a type that cannot be meant.
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
