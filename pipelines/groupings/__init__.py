"""Counterfactual groups: which siblings an episode would have had under another definition.

    from pipelines.groupings import Grouping, Subsample, run_grouping

    run_grouping(lake, Grouping(name="half", steps=(Subsample(size=8, draws=4),)))

writes rows to the table `groupings`; any estimator then takes them: `run_credit(lake, ..., grouping="half/0")`. The
groups that episodes were collected in stay as they are.
"""

from pipelines.groupings.definition import Grouping, Members, regroup
from pipelines.groupings.job import GroupingReport, run_grouping
from pipelines.groupings.steps import DropFailed, MergeRuns, StalenessCap, Subsample

__all__ = [
    "DropFailed",
    "Grouping",
    "GroupingReport",
    "Members",
    "MergeRuns",
    "StalenessCap",
    "Subsample",
    "regroup",
    "run_grouping",
]
