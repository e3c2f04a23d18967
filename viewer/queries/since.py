"""What changed between two states of a lake: rows of every table, episodes, scores by series, signs of advantages."""

from dataclasses import dataclass

import polars as pl

from lake.read.history import Difference, difference
from lake.read.snapshot import Snapshot
from lake.tables import TABLES


@dataclass(frozen=True, slots=True)
class Changes:
    """What a state has that an earlier one has not, and the other way round."""

    episodes: Difference
    """`trajlake diff` shows the same."""
    tables: pl.DataFrame
    """Tables whose rows differ in number: table, before, after."""
    series: pl.DataFrame
    """Scores that differ, by what says them: scorer, series_id, new, gone, other (another value), those of most first.
    A score without a value counts as none."""
    flips: pl.DataFrame
    """Advantages whose sign differs: series_id, episodes, steps; those of most steps first."""


def changes(before: Snapshot, after: Snapshot) -> Changes:
    """Compare two states of one lake."""
    found = difference(before, after)
    rows = [(name, before.size(name)[1], after.size(name)[1]) for name in TABLES]
    counts = pl.DataFrame(rows, schema={"table": pl.String, "before": pl.Int64, "after": pl.Int64}, orient="row")
    was, now = pl.col("before").is_not_null(), pl.col("after").is_not_null()
    series = found.scores.group_by("scorer", "series_id").agg(
        (now & ~was).sum().alias("new"), (was & ~now).sum().alias("gone"), (was & now).sum().alias("other")
    )
    flips = found.flips.group_by("series_id").agg(
        pl.col("episode_id").n_unique().alias("episodes"), pl.len().alias("steps")
    )
    return Changes(
        found,
        counts.filter(pl.col("before") != pl.col("after")),
        series.sort(pl.sum_horizontal("new", "gone", "other"), "scorer", "series_id", descending=[True, False, False]),
        flips.sort("steps", "series_id", descending=[True, False]),
    )
