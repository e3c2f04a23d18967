"""What changed between two states of a lake: rows of every table, episodes, scores by series, signs of advantages."""

from dataclasses import dataclass
from typing import Protocol

import polars as pl

from lake.read.history import Difference, difference
from lake.read.snapshot import Reads, Snapshot
from lake.read.text_table import counted
from lake.tables import TABLES

_NEWER = {
    "newer scores": ("scores",),
    "newer credit": ("advantages", "credit_groups"),
    "newer annotations": ("annotations",),
    "newer training": ("batches", "checkpoints", "metrics"),
}
"""What a page would show otherwise, by the tables that tell it."""


class Counted(Reads, Protocol):
    """A state of a lake that says how many rows its tables have, without reading them."""

    def rows(self, table: str) -> int:
        """Rows of a table, hidden ones among them."""


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


def newer(before: Counted, after: Counted) -> str | None:
    """What a state has that an earlier one has not, in a few words: new episodes, or else all that differs.

    Rows are only ever added, so their number tells. Episodes are compared only where theirs, or that of retractions,
    differs.
    """

    def differ(*tables: str) -> bool:
        return any(before.rows(table) != after.rows(table) for table in tables)

    found = []
    if differ("episodes", "retractions"):
        were, are = (state.sql("SELECT episode_id FROM episodes")["episode_id"] for state in (before, after))
        added, gone = (int((~one.is_in(other.implode())).sum()) for one, other in ((are, were), (were, are)))
        if added:
            return counted(added, "new episode")
        found += [f"{counted(gone, 'episode')} taken back"] if gone else []
    found += [words for words, tables in _NEWER.items() if differ(*tables)]
    return ", ".join(found) or None
