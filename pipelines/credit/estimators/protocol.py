"""What every estimator is: a frozen configuration that turns a frame of steps into a frame of advantages.

The job over a lake knows estimators by this class alone. An estimator file holds its options, its formula and
`credit()`; selecting, checking, sorting and the output are done here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import modules
from types import ModuleType
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import BaseModel

from pipelines.credit.estimators.anchor_groups import StepCredit
from pipelines.credit.flags import Flag, join_flags
from pipelines.credit.inputs.batch import Bools, Floats, StepBatch
from pipelines.credit.inputs.columns import InputNeeds, output_schema, select_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRows:
    """Advantages over the rows of a batch, and what they rest on. What an estimator does not compute is None."""

    advantage_N: Floats
    """NaN where unknown."""
    size_P: npt.NDArray[np.int32]
    """Siblings of each group that take part."""
    flags: Mapping[Flag, Bools]
    return_N: Floats | None = None
    """Return-to-go, NaN where unknown."""
    a_episode_N: Floats | None = None
    a_step_N: Floats | None = None
    anchor_key: pl.Series | None = None
    """NULL where unknown."""
    anchors: StepCredit | None = None

    def frame(self, batch: StepBatch) -> pl.DataFrame:
        """The rows, in the columns of `output_schema`."""
        none_N = np.zeros(len(self.advantage_N), np.int32)
        key = pl.lit(None, pl.Int64) if self.anchor_key is None else self.anchor_key
        return batch.frame.select("episode_id", "step_index", "group_id").with_columns(
            key.alias("anchor_key"),
            _nullable("return_to_go", self.return_N),
            _nullable("a_episode", self.a_episode_N),
            _nullable("a_step", self.a_step_N),
            _nullable("advantage", self.advantage_N),
            pl.Series("group_size", batch.groups.spread(self.size_P)),
            pl.Series("anchor_size", none_N if self.anchors is None else self.anchors.size_N),
            pl.Series("anchor_episodes", none_N if self.anchors is None else self.anchors.episodes_N),
            join_flags(self.flags),
        )


def _nullable(name: str, values_N: Floats | None) -> pl.Series | pl.Expr:
    if values_N is None:
        return pl.lit(None, pl.Float64).alias(name)
    return pl.Series(name, values_N, nan_to_null=True)


STATE_COLUMNS = ("state", "state_hash")
"""What the table `steps` holds of a state."""


class Estimator(BaseModel, ABC, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of all estimators."""

    name: ClassVar[str]
    """Its name on the command line and in a job's parameters."""
    incremental: ClassVar[bool] = True
    """A group's advantages depend on that group alone. False: on the whole batch, which `batch_key` then names."""

    @abstractmethod
    def needed(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Columns that must be there; an anchor definition may choose among those that are present."""

    @abstractmethod
    def credit(self, batch: StepBatch) -> CreditRows:
        """Advantages of checked, sorted, active steps that fit in memory."""

    def advantages(self, steps: pl.LazyFrame) -> pl.LazyFrame:
        """Advantages of every active step. Lazy: values are read and checked when the result is collected.

        Args:
            steps: one row per step, in any order: `episode_id`, `group_id` (integer or string), `step_index`
                (0, 1, 2, ... within the episode), the columns of `needed()`, `reward` and `episode_score` (nullable
                numbers, where the sources need them), and optionally `status` (all completed), `is_active` (all
                active; inactive rows are dropped first), `is_action_valid` (all valid).

        Returns:
            One row per active step, sorted by (group_id, episode_id, step_index): `episode_id`, `step_index`,
            `group_id`, `anchor_key` (int64), `return_to_go`, `a_episode`, `a_step`, `advantage` (float64, NULL where
            unknown, and in every row of a column that the estimator does not compute), `group_size` (scored siblings
            that take part), `anchor_size` (rows the step is compared with, itself included; 0 without a comparison of
            steps), `anchor_episodes` (distinct trajectories among them; all int32), `flags` (see `Flag`). The bits do
            not depend on the order of the input rows.

        Raises:
            ContractError: a column is missing or of a wrong type (at once), or values break the contract (on
                collecting; see `check_steps`).
        """
        needs = self.needed(steps.collect_schema().names())
        inputs = select_inputs(steps, needs)
        schema = output_schema(inputs.collect_schema())
        # The rows of a group depend on each other: filters stay above this step (Polars' default for map_batches).
        return inputs.map_batches(lambda frame: self._rows(frame, needs, schema), schema=schema)

    @classmethod
    def code(cls) -> tuple[ModuleType, ...]:
        """Modules of the estimator's own classes: their source belongs to what decides the numbers."""
        own = {home.__module__ for home in cls.__mro__ if home.__module__.startswith("pipelines.")}
        return tuple(modules[name] for name in sorted(own))

    def _rows(self, inputs: pl.DataFrame, needs: InputNeeds, schema: pl.Schema) -> pl.DataFrame:
        batch = StepBatch.of(inputs, needs)
        return pl.DataFrame(schema=schema) if batch is None else self.credit(batch).frame(batch)
