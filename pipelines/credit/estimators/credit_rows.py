"""What an estimator found, as the rows of the table `advantages`: the same columns for every estimator."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.credit.estimators.anchor_groups import StepCredit
from pipelines.credit.flags import Flag, join_flags
from pipelines.credit.inputs.batch import Bools, Floats, StepBatch


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
