"""What every estimator is: a frozen configuration that turns a frame of steps into a frame of advantages.

The job over a lake knows estimators by this class alone. An estimator file holds its options, its formula and
`credit()`; selecting, checking, sorting and the output are done here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from sys import modules
from types import ModuleType
from typing import ClassVar

import polars as pl
from pydantic import BaseModel, ConfigDict

from pipelines.credit.estimators.credit_rows import CreditRows
from pipelines.credit.inputs.batch import StepBatch
from pipelines.credit.inputs.columns import InputNeeds, output_schema, select_inputs

STATE_COLUMNS = ("state", "state_hash")
"""What the table `steps` holds of a state."""


class Estimator(BaseModel, ABC):
    """Base of all estimators."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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
