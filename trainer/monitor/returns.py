"""What the episodes of an optimizer step earned: shows whether its metrics belong to good or to bad episodes."""

import numpy as np
import polars as pl

from lake.reading import collected
from lake.snapshot import Snapshot
from trainer.data.plan import OptimizerStep, Plan


class Returns:
    """Mean returns by optimizer step.

    Args:
        snapshot: the snapshot the plan was made on.
        plan: its optimizer steps.
    """

    def __init__(self, snapshot: Snapshot, plan: Plan) -> None:
        ids_E = pl.DataFrame({"episode_id": plan.episode_ids_E})
        returns = snapshot.scan("episodes").select("episode_id", "env_return")
        wanted = returns.filter(pl.col("episode_id").is_in(ids_E["episode_id"].unique().implode()))
        known = ids_E.join(collected(wanted), on="episode_id", how="left", maintain_order="left")
        self._return_E = known["env_return"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        """NaN where it is unknown."""

    def mean(self, step: OptimizerStep) -> float | None:
        """Mean return of the step's episodes whose return is known; None where none is."""
        return_E = self._return_E[step.episodes_E]
        known_E = return_E[~np.isnan(return_E)]
        return float(known_E.mean()) if len(known_E) else None
