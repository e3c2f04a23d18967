"""Dead groups: siblings that all scored the same say nothing about the outcome.

"Reward has non-zero deviation" elsewhere; dynamic sampling in DAPO (arXiv 2503.14476).
"""

from typing import Literal

import polars as pl

from pipelines.select.base import UNKNOWN, Filter, Unknown, dropped, shown, unknown_test
from pipelines.select.facts import CREDIT_STATE

_TOLERANCE = 1e-9


class DeadGroups(Filter):
    """Drops groups without signal as a whole.

    A group is dead when two or more siblings are scored and max - min <= 1e-9 max(1, |max|) over their scores: sums of
    equal rewards differ in the last digit. The decision rests on the scored siblings that the filters before it left.
    Where the selection names a credit job, its groups and its flags decide instead: what the trainer would see.
    """

    kind: Literal["dead_groups"] = "dead_groups"
    """Name of the filter."""
    singletons: Unknown = "drop"
    """Groups with one scored sibling, which has nothing to be compared with."""
    unknown: Unknown = "drop"
    """Episodes that are not scored."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes of dead groups, lone ones, unscored ones."""
        unscored = unknown_test("score", self.unknown)
        if CREDIT_STATE in episodes.columns:
            state = pl.col(CREDIT_STATE)
            tests = [(state == "dead", pl.lit("its group is dead in the credit job"))]
            if self.singletons == "drop":
                tests.append((state == "singleton", pl.lit("the only scored one of its group in the credit job")))
            if self.unknown == "drop":
                tests.append((state == "unscored", pl.lit(UNKNOWN[CREDIT_STATE])))
            return dropped(episodes, *tests)
        score = pl.col("score")
        low, high, scored = (e.over("group_id") for e in (score.min(), score.max(), score.count()))
        is_dead = (scored >= 2) & (high - low <= _TOLERANCE * pl.max_horizontal(pl.lit(1.0), high.abs()))
        tests = [*unscored, (is_dead, pl.format("{} scored siblings, all at {}", scored, shown(high)))]
        if self.singletons == "drop":
            tests.append((scored == 1, pl.lit("1 scored sibling, nothing to compare with")))
        return dropped(episodes, *tests)
