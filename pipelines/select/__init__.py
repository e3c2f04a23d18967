"""Select: which episodes and steps are trained on, and why the others are not, as rows of `selections`.

    from pipelines.select import DeadGroups, Length, Selection, run_select

    run_select(lake, Selection(name="clean", filters=(DeadGroups(), Length(max_steps=30))))

One row per episode, kept or dropped, and one per step that is dropped out of a kept episode; each drop names its filter
and the figures. A trainer takes it with `trajlake train --selection clean`.
"""

from pipelines.select.base import Filter
from pipelines.select.filters import FILTERS, Combined
from pipelines.select.filters.groups import DeadGroups, Dedup, Diversity
from pipelines.select.filters.lengths import Length, OverLong
from pipelines.select.filters.outcomes import MinReward, Staleness, Status, SuccessBalance, TopQ
from pipelines.select.job import Outcome, Selection, SelectReport, apply, run_select

__all__ = [
    "FILTERS",
    "Combined",
    "DeadGroups",
    "Dedup",
    "Diversity",
    "Filter",
    "Length",
    "MinReward",
    "Outcome",
    "OverLong",
    "SelectReport",
    "Selection",
    "Staleness",
    "Status",
    "SuccessBalance",
    "TopQ",
    "apply",
    "run_select",
]
