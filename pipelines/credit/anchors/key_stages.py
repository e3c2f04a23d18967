"""Key stages: chosen columns, whatever the text of the states, and the last k states.

Axes: `_N` rows in canonical order.
"""

from typing import ClassVar, Literal, Self

import numpy as np
import polars as pl
from pydantic import Field, model_validator

from lake.errors import ContractError
from lake.ids import bytes_hash, key_hash
from pipelines.credit.anchors.definition import Definition, Reads, States
from pipelines.credit.inputs.batch import Segments

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


class LastStates(Definition):
    """Two steps share an anchor if their last k states are equal, in order: this one and the k - 1 before it.

    They came to the same place the same way: the groups of HGPO (arXiv 2602.22817).

    A window never leaves its episode. With `short="keep"` the first k - 1 steps of an episode go by the states there
    are, and so are comparable with the first steps of a sibling only; with `unknown` they have no key. A window that
    holds an unknown state has none either. In a chain the states are those that the stages before have left.
    """

    kind: Literal["last_states"] = "last_states"
    k: int = Field(default=2, ge=1, le=64)
    """Number of states. 1 is the state alone."""
    short: Literal["keep", "unknown"] = "keep"
    """What the first k - 1 steps of an episode get: the key of the states there are, or none."""
    makes_key: ClassVar[bool] = True
    reads: ClassVar[Reads] = "state"

    def apply(self, states: States) -> States:
        """Keys of the windows."""
        keys_N = history_keys(states.keys(), states.batch.episodes, self.k)
        if self.short == "unknown":
            is_whole_N = _positions(states.batch.episodes) >= self.k - 1
            return states.keyed(keys_N).kept(pl.Series(is_whole_N))
        return states.keyed(keys_N)


def history_keys(keys_N: pl.Series, episodes: Segments, k: int) -> pl.Series:
    """Key of the last k keys inside each row's episode, of fewer at its beginning: Int64, NULL if any of them is NULL.

    For k = 1 the keys as they are; else the hash of the window's keys, 8 bytes each, little-endian, oldest first.
    """
    if k == 1:
        return keys_N
    values_N = keys_N.fill_null(0).to_numpy()
    unknown_N = keys_N.is_null().to_numpy()
    position_N = _positions(episodes)
    window_N = np.zeros((len(values_N), k), "<i8")
    holes_N = np.zeros(len(values_N), np.bool_)
    for back in range(k):
        rows = np.flatnonzero(position_N >= back)
        window_N[rows, k - 1 - back] = values_N[rows - back]
        holes_N[rows] |= unknown_N[rows - back]
    columns = {f"key_{at}": window_N[:, at] for at in range(k)} | {"length": np.minimum(position_N + 1, k)}
    windows = pl.DataFrame(columns)
    distinct = windows.filter(pl.Series(~holes_N)).unique()
    packed = np.ascontiguousarray(distinct.drop("length").to_numpy().astype("<i8")).tobytes()
    ends = zip(range(8 * k, len(packed) + 1, 8 * k), distinct["length"], strict=True)
    hashes = [bytes_hash(packed[end - 8 * length : end]) for end, length in ends]
    table = distinct.with_columns(key=pl.Series(hashes, dtype=pl.Int64))
    found = windows.join(table, on=windows.columns, how="left", maintain_order="left")["key"]
    return pl.select(pl.when(pl.Series(~holes_N)).then(found).alias("anchor_key")).to_series()


def _positions(episodes: Segments) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Number of active steps before each row in its episode."""
    return np.arange(int(episodes.lengths_K.sum())) - episodes.spread(episodes.starts_K.astype(np.int64))
