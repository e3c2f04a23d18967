"""Filters, one file each. `FILTERS` maps their names to their classes, `AnyFilter` validates one from a mapping."""

from typing import Annotated

from pydantic import Field

from pipelines.select.base import Filter
from pipelines.select.filters.combined import Combined, SimpleFilter
from pipelines.select.filters.dead_groups import DeadGroups
from pipelines.select.filters.dedup import Dedup
from pipelines.select.filters.diversity import Diversity
from pipelines.select.filters.length import Length
from pipelines.select.filters.min_reward import MinReward
from pipelines.select.filters.over_long import OverLong
from pipelines.select.filters.staleness import Staleness
from pipelines.select.filters.status import Status
from pipelines.select.filters.success_balance import SuccessBalance
from pipelines.select.filters.top_q import TopQ

AnyFilter = Annotated[SimpleFilter | Combined, Field(discriminator="kind")]
FILTERS: dict[str, type[Filter]] = {
    cls.model_fields["kind"].default: cls
    for cls in (
        DeadGroups,
        MinReward,
        Diversity,
        Length,
        OverLong,
        Staleness,
        SuccessBalance,
        TopQ,
        Dedup,
        Status,
        Combined,
    )
}
"""Name -> class, in the order of the documentation."""

__all__ = [
    "FILTERS",
    "AnyFilter",
    "Combined",
    "DeadGroups",
    "Dedup",
    "Diversity",
    "Filter",
    "Length",
    "MinReward",
    "OverLong",
    "Staleness",
    "Status",
    "SuccessBalance",
    "TopQ",
]
