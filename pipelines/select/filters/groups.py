"""Filters of groups: dead ones, those without variety, and copies."""

from typing import Literal

import polars as pl
from pydantic import Field

from lake import ids
from pipelines.select.base import CREDIT_STATE, DROPS, UNKNOWN, Filter, Unknown, dropped, shown, unknown_test

_TOLERANCE = 1e-9


class DeadGroups(Filter):
    """Drops groups without signal as a whole: siblings that all scored the same say nothing about the outcome.

    A group is dead when two or more siblings are scored and max - min <= 1e-9 max(1, |max|) over their scores: sums of
    equal rewards differ in the last digit. The decision rests on the scored siblings that the filters before it left.
    Where the selection names a credit job, its groups and its flags decide instead: what the trainer would see.
    "Reward has non-zero deviation" elsewhere; dynamic sampling in DAPO (arXiv 2503.14476).
    """

    kind: Literal["dead_groups"] = "dead_groups"
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


class Diversity(Filter):
    """Drops groups with too few distinct responses.

    A response is an episode's sequence of actions with their tool calls (ids of calls left out). Groups are judged as
    the filters before left them.
    """

    kind: Literal["diversity"] = "diversity"
    min_distinct: int = Field(2, ge=1)
    """Distinct responses a group needs."""
    min_share: float = Field(0.0, ge=0, le=1)
    """Distinct responses per rollout a group needs."""

    def facts(self) -> frozenset[str]:
        """The sequence of actions."""
        return frozenset({"actions"})

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes of groups that are too uniform."""
        distinct, size = (e.over("group_id") for e in (pl.col("actions").n_unique(), pl.len()))
        summary = pl.format("{} distinct responses of {} siblings", distinct, size)
        return dropped(
            episodes,
            (distinct < self.min_distinct, pl.format("{}, below {}", summary, self.min_distinct)),
            (distinct < self.min_share * size, pl.format("{}, below {} of them", summary, shown(self.min_share))),
        )


_SCOPES = {"group": ["group_id"], "task": ["task_id"], "all": []}


class Dedup(Filter):
    """Keeps one of several episodes that did the same: the one with the smallest episode_id.

    `actions`: the same sequence of actions and tool calls (ids of calls left out). `decisions`: the same sequence of
    states and actions.
    """

    kind: Literal["dedup"] = "dedup"
    by: Literal["actions", "decisions"] = "actions"
    """What is compared."""
    within: Literal["group", "task", "all"] = "task"
    """Where copies are looked for."""

    def facts(self) -> frozenset[str]:
        """The hash that is compared."""
        return frozenset({self.by})

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """All but the first of each kind."""
        first = pl.col("episode_id").min().over([self.by, *_SCOPES[self.within]])
        found = episodes.with_columns(first=first).filter(
            (pl.col("first") != pl.col("episode_id")) & pl.col(self.by).is_not_null()
        )
        reason = pl.format("the same {} as {}", pl.lit(self.by), pl.col("first").map_elements(ids.to_text, pl.String))
        return found.select("episode_id", step_index=pl.lit(None, pl.Int32), reason=reason).select(list(DROPS))
