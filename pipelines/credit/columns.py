"""The columns a credit estimator reads and writes, and the check that an input has them.

Checked on the schema alone, before anything is read. What the values must satisfy is in `checks.py`.
"""

from collections.abc import Callable, Iterable

import polars as pl

from lake.errors import ContractError

KEYS = ("group_id", "episode_id", "step_index")
"""The canonical order of rows."""
STATUSES = ("completed", "truncated", "aborted", "failed")
"""How an episode can have ended."""


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
}
_DEFAULTS = {
    "reward": pl.lit(None, pl.Float64),
    "episode_score": pl.lit(None, pl.Float64),
    "status": pl.lit("completed"),
    "is_active": pl.lit(value=True),
    "is_action_valid": pl.lit(value=True),
}


def select_inputs(steps: pl.LazyFrame, *, needed: Iterable[str], anchor_columns: Iterable[str]) -> pl.LazyFrame:
    """The columns an estimator reads, in one type each, with the optional ones filled in.

    Args:
        steps: one row per step.
        needed: columns required beyond the keys.
        anchor_columns: columns the anchor definition reads.

    Returns:
        Keys, `reward` and `episode_score` (float64, NULL if absent), `status` (all completed if absent), `is_active`,
        `is_action_valid` (NULL and absent mean true), and the anchor columns.

    Raises:
        ContractError: a column is missing or has a type that cannot be meant.
    """
    schema = steps.collect_schema()
    anchor_columns = tuple(anchor_columns)
    required = list(dict.fromkeys((*KEYS, *needed, *anchor_columns)))
    missing = [name for name in required if name not in schema]
    if missing:
        msg = (
            f"steps: column {', '.join(missing)} is missing (found: {', '.join(schema.names()) or 'none'}). "
            f"This configuration reads {', '.join(required)}; join or rename the columns, or choose other sources."
        )
        raise ContractError(msg)
    for name in (*required, *_DEFAULTS):
        if name in schema and not _IS[_WANTED[name]](schema[name]):
            msg = f"steps: column {name} has type {schema[name]}, expected {_WANTED[name]}. Cast it first."
            raise ContractError(msg)
    present = {name: pl.col(name) if name in schema else default for name, default in _DEFAULTS.items()}
    return steps.select(
        *KEYS,
        present["reward"].cast(pl.Float64).alias("reward"),
        present["episode_score"].cast(pl.Float64).alias("episode_score"),
        present["status"].alias("status"),
        present["is_active"].fill_null(value=True).alias("is_active"),
        present["is_action_valid"].fill_null(value=True).alias("is_action_valid"),
        *anchor_columns,
    )


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
