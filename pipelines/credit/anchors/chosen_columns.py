"""Chosen columns: steps that agree in some columns of the tables, whatever the text of their states."""

from typing import ClassVar, Literal, Self

import polars as pl
from pydantic import Field, model_validator

from lake.errors import ContractError
from lake.ids import key_hash
from pipelines.credit.anchors.definition import Definition, States

STATE = "state"
"""Stands for the state as it is at this stage: with a chain, after what stands before."""
OF_THE_ACTION = ("action", "reasoning", "tool_calls", "is_action_valid", "is_active", "finish_reason", "latency")
OF_THE_OUTCOME = (
    *("reward", "status", "terminated", "stop_reason", "error", "env_return", "episode_score", "num_steps"),
    *("completion_tokens", "final_observation", "final_value_estimate", "ended_at"),
)
DECIDED_LATER = frozenset((*OF_THE_ACTION, *OF_THE_OUTCOME))
"""Columns that hold what happened after the policy saw the state: comparing actions by them would compare outcomes."""


class ChosenColumns(Definition):
    """Two steps share an anchor if they agree in every chosen column, value and type.

    A column of `steps`, or of `episodes` (the same for all steps of the episode; `steps` wins where both have it), such
    as `step_index`, `state_role` or `agent_id`; `state`; or a field inside a JSON column as `column:path` with a
    JSONPath, such as `context:$[-1].name`, the name of the tool that answered last.
    """

    kind: Literal["columns"] = "columns"
    """Name of the definition."""
    names: tuple[str, ...] = Field(min_length=1)
    """The columns. Not those that hold the action or what came of it."""
    nulls: Literal["unknown", "value"] = "unknown"
    """A NULL in a chosen column makes the state unknown, or counts as a value. (An unknown `state` stays unknown.)"""
    makes_key: ClassVar[bool] = True

    @model_validator(mode="after")
    def _known_before(self) -> Self:
        for chosen in self.names:
            name, _, path = chosen.partition(":")
            if name in DECIDED_LATER:
                msg = f"names: {name!r} is known only after the decision; an anchor is what the policy saw before it"
                raise ValueError(msg)
            if name == "state_hash":
                msg = "names: write 'state' for the state; its stored hash is used where there is one"
                raise ValueError(msg)
            if not name or (":" in chosen and not path.startswith("$")):
                msg = f"names: {chosen!r} is no column. Write a name, or name:$.path for a field of a JSON column"
                raise ValueError(msg)
        return self

    @property
    def reads_state(self) -> bool:
        """Whether `state` is among the columns."""
        return STATE in self.names

    def inputs(self) -> tuple[str, ...]:
        """The columns, without `state`."""
        return tuple(dict.fromkeys(name.partition(":")[0] for name in self.names if name != STATE))

    def apply(self, states: States) -> States:
        """Keys of the tuples of values."""
        chosen = pl.DataFrame([self._column(states, name).alias(name) for name in dict.fromkeys(self.names)])
        required = chosen.columns if self.nulls == "unknown" else [STATE] * self.reads_state
        known_N = states.codes_N.is_not_null()
        for name in required:
            known_N &= chosen[name].is_not_null()
        distinct = chosen.filter(known_N).unique()
        keys = pl.Series("key", [key_hash(*values) for values in distinct.iter_rows()], dtype=pl.Int64)
        found = chosen.join(
            distinct.with_columns(keys), on=chosen.columns, how="left", nulls_equal=True, maintain_order="left"
        )
        return states.keyed(found["key"]).kept(known_N)

    @staticmethod
    def _column(states: States, chosen: str) -> pl.Series:
        """One column's values, of a type that can be hashed."""
        if chosen == STATE:
            return states.keys()
        name, _, path = chosen.partition(":")
        values = states.batch.frame[name]
        if path:
            if values.dtype != pl.String:
                msg = f"anchors: column {name} has type {values.dtype}; a path needs JSON text"
                raise ContractError(msg)
            return values.str.json_path_match(path)
        if not (values.dtype.is_integer() or values.dtype.is_float() or values.dtype in (pl.String, pl.Boolean)):
            msg = f"anchors: column {name} has type {values.dtype}; valid: text, integers, floats, booleans"
            raise ContractError(msg)
        return values
