"""Merge runs: one group of all rollouts that started alike, whichever run they belong to."""

from typing import ClassVar, Literal

import polars as pl

from lake import ids
from pipelines.groupings.step import FIRST_CONTEXT, Regrouped, Step


class MergeRuns(Step):
    """One group for all groups with the same environment, task, start seed and first context, across runs and rounds.

    The first context is all that the policy saw before its first decision: the initial messages, the tools on offer,
    and the first step's state and context, compared by hash. Siblings that started differently are no baseline for each
    other, even under one task and seed. Groups are merged, never torn apart: one whose members did not start alike, or
    whose initial messages were not recorded, stays as it is.
    """

    kind: Literal["merge_runs"] = "merge_runs"
    """Name of the step."""
    context: Literal["identical", "any"] = "identical"
    """Whether first contexts must be equal. `any` is for environments whose first message is sampled, such as the
    simulated users of tau-bench: there task and seed alone say what a start is."""
    also_equal: tuple[Literal["policy", "policy_version", "split"], ...] = ()
    """What else must be equal, for example `policy`: else rollouts of different models meet in one group."""
    facts: ClassVar[tuple[str, ...]] = ("environment", "task_id", "seed")

    def needed(self) -> tuple[str, ...]:
        """The facts that make up the key."""
        return (*self.facts, *((FIRST_CONTEXT,) if self.context == "identical" else ()), *self.also_equal)

    def apply(self, members: pl.DataFrame) -> Regrouped:
        """The same rows; group_id is the hash of what the merged groups have in common."""
        key, group = list(self.needed()), ["group_id", "draw"]
        uniform = pl.all_horizontal(pl.col(name).n_unique().over(group) == 1 for name in key)
        known = (
            pl.col(FIRST_CONTEXT).is_not_null().all().over(group) if self.context == "identical" else pl.lit(value=True)
        )
        marked = members.with_columns(known=known, alike=known & uniform)
        starts = marked.filter("alike").select(key).unique()
        hashes = pl.Series("merged", [ids.key_hash("merge_runs", *row) for row in starts.rows()], dtype=pl.Int64)
        found = marked.join(starts.with_columns(hashes), on=key, how="left", nulls_equal=True, maintain_order="left")
        merged = pl.when("alike").then("merged").otherwise("group_id")
        counts = {
            "first context not recorded, left as they were": marked.filter(~pl.col("known")).height,
            "in groups that did not start alike, left as they were": marked.filter(
                pl.col("known") & ~pl.col("alike")
            ).height,
        }
        notes = {words: rows for words, rows in counts.items() if rows}
        return Regrouped(found.with_columns(group_id=merged).select(members.columns), notes)
