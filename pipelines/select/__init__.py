"""Selections: the episodes and steps to train on, and the reasons of the dropped ones, as rows of `selections`.

    from pipelines.select import DeadGroups, Length, Selection, run_select

    run_select(lake, Selection(name="clean", filters=(DeadGroups(), Length(max_steps=30))))

There is one row per episode, kept or dropped, and one per dropped step of a kept episode. Each drop has its filter and
figures. `trajlake train --set selection=clean` trains on the selection.
"""

from pipelines.select.filters import (
    FILTERS,
    Combined,
    DeadGroups,
    Dedup,
    Diversity,
    Filter,
    Length,
    MinReward,
    OverLong,
    Staleness,
    Status,
    SuccessBalance,
    TopQ,
)
from pipelines.select.job import Selection, SelectionOutcome, SelectReport, apply, run_select

__all__ = [
    "FILTERS",
    "Combined",
    "DeadGroups",
    "Dedup",
    "Diversity",
    "Filter",
    "Length",
    "MinReward",
    "OverLong",
    "SelectReport",
    "Selection",
    "SelectionOutcome",
    "Staleness",
    "Status",
    "SuccessBalance",
    "TopQ",
    "apply",
    "run_select",
]
