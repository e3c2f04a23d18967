"""Counterfactual groups: which siblings an episode would have had under another definition.

    from pipelines.groupings import Grouping, Subsample, run_grouping

    run_grouping(lake, Grouping(name="half", steps=(Subsample(size=8, draws=4),)))

writes rows to the table `groupings`; any estimator then takes them: `run_credit(lake, ..., grouping="half/0")`. The
groups that episodes were collected in stay as they are.
"""

from pipelines.groupings.definition import DropFailed, Grouping, MergeRuns, StalenessCap, Subsample, regroup
from pipelines.groupings.job import run_grouping

__all__ = ["DropFailed", "Grouping", "MergeRuns", "StalenessCap", "Subsample", "regroup", "run_grouping"]
