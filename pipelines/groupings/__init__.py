"""Groupings: counterfactual groups, the siblings of episodes under another definition.

    from pipelines.groupings import Grouping, Subsample, run_grouping

    run_grouping(lake, Grouping(name="half", steps=(Subsample(size=8, draws=4),)))

writes rows to the table `groupings`. Any estimator accepts them: `run_credit(lake, ..., grouping="half/0")`. The
collected groups do not change.

A grouping is a name and steps, applied in order. Members are rows with `episode_id`, `group_id` (at first the collected
one), `draw`, and the facts that the steps need. A step may drop rows, change `group_id`, or repeat rows under another
`draw`. It reads nothing else.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
import polars as pl
from pydantic import BaseModel, Field

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements import selections
from lake.judgements.selections import draw_lots, find_grouping_job, select_where
from lake.lake import Lake
from lake.settings import NAME

__all__ = ["DropFailed", "Grouping", "MergeRuns", "StalenessCap", "Subsample", "regroup", "run_grouping"]

FIRST_CONTEXT = "first_context"
"""Fact: hash of the policy's input before its first decision; NULL if the messages were not recorded."""


@dataclass(frozen=True, slots=True)
class StepMembers:
    """Result of a step."""

    members: pl.DataFrame
    """Remaining rows, with the columns of the input."""
    notes: dict[str, int] = field(default_factory=dict)
    """Description of dropped or unchanged rows -> number of rows over all draws."""


class Step(BaseModel, ABC, frozen=True, extra="forbid"):
    """Base of the steps."""

    kind: str
    """Name of the step."""
    facts: ClassVar[tuple[str, ...]] = ()
    """Columns of `episodes`, or FIRST_CONTEXT, that the step reads."""

    def required_facts(self) -> tuple[str, ...]:
        """Return the facts that this configuration reads."""
        return self.facts

    @abstractmethod
    def apply(self, members: pl.DataFrame) -> StepMembers:
        """Regroup the members (episode_id, group_id, draw, and the facts)."""


def drop_marked(members: pl.DataFrame, reasons: dict[str, pl.Expr]) -> StepMembers:
    """Drop the members that a test marks (NULL is false), and count them by the first matching test's description."""
    remaining, notes = members, {}
    for words, test in reasons.items():
        matches_none = remaining.filter(~test.fill_null(value=False))
        if matches_none.height < remaining.height:
            notes[words] = remaining.height - matches_none.height
        remaining = matches_none
    return StepMembers(remaining, notes)


Status = Literal["completed", "truncated", "aborted", "failed"]


class DropFailed(Step):
    """Keep the members whose `episodes.status` is not in `statuses`.

    The rest of a group stays together, also as a group of one, which estimators flag.
    """

    kind: Literal["drop_failed"] = "drop_failed"
    statuses: tuple[Status, ...] = Field(("failed", "aborted"), min_length=1)
    """Statuses of dropped episodes."""
    facts: ClassVar[tuple[str, ...]] = ("status",)

    def apply(self, members: pl.DataFrame) -> StepMembers:
        """Drop the members with these statuses."""
        return drop_marked(members, {f"status {status}": pl.col("status") == status for status in self.statuses})


class MergeRuns(Step):
    """Merge all groups with the same environment, task, start seed and first context, across runs and rounds.

    The first context is the policy's input before its first decision: the initial messages, the available tools, and
    the first step's state and context, compared by hash. Siblings with different starts are not a baseline for each
    other, even under one task and seed. A step never splits a group: a group with different starts, or without recorded
    initial messages, stays unchanged.
    """

    kind: Literal["merge_runs"] = "merge_runs"
    context: Literal["identical", "any"] = "identical"
    """Whether first contexts must be equal. `any` is for environments with a sampled first message, such as the
    simulated users of tau-bench, where task and seed define the start."""
    also_equal: tuple[Literal["policy", "policy_version", "split"], ...] = ()
    """Further columns that must be equal. Without `policy`, a group may have rollouts of different models."""
    facts: ClassVar[tuple[str, ...]] = ("environment", "task_id", "seed")

    def required_facts(self) -> tuple[str, ...]:
        """Return the facts of the key."""
        return (*self.facts, *((FIRST_CONTEXT,) if self.context == "identical" else ()), *self.also_equal)

    def apply(self, members: pl.DataFrame) -> StepMembers:
        """Set group_id to the hash of the merged groups' common key."""
        key, group = list(self.required_facts()), ["group_id", "draw"]
        uniform = pl.all_horizontal(pl.col(name).n_unique().over(group) == 1 for name in key)
        is_recorded = (
            pl.col(FIRST_CONTEXT).is_not_null().all().over(group) if self.context == "identical" else pl.lit(value=True)
        )
        members_with_start = members.with_columns(known=is_recorded, alike=is_recorded & uniform)
        starts = members_with_start.filter("alike").select(key).unique()
        hashes = pl.Series("merged", [ids.key_hash("merge_runs", *row) for row in starts.rows()], dtype=pl.Int64)
        merged_rows = members_with_start.join(
            starts.with_columns(hashes), on=key, how="left", nulls_equal=True, maintain_order="left"
        )
        merged_id = pl.when("alike").then("merged").otherwise("group_id")
        counts = {
            "first context not recorded, left as they were": members_with_start.filter(~pl.col("known")).height,
            "in groups that did not start alike, left as they were": members_with_start.filter(
                pl.col("known") & ~pl.col("alike")
            ).height,
        }
        notes = {words: rows for words, rows in counts.items() if rows}
        return StepMembers(merged_rows.with_columns(group_id=merged_id).select(members.columns), notes)


class StalenessCap(Step):
    """Keep the members whose policy is at most `max_behind` versions behind the newest one of the group.

    Versions are `episodes.policy_version`, that of the episode's start.
    """

    kind: Literal["staleness_cap"] = "staleness_cap"
    max_behind: int = Field(ge=0)
    """Maximum number of versions behind the newest one of the group."""
    unknown: Literal["drop", "keep"] = "drop"
    """Action for episodes whose policy version is NULL."""
    facts: ClassVar[tuple[str, ...]] = ("policy_version",)

    def apply(self, members: pl.DataFrame) -> StepMembers:
        """Drop the members of old policies."""
        version = pl.col("policy_version")
        behind = version.max().over("group_id", "draw") - version
        reasons = {f"more than {self.max_behind} versions behind": behind > self.max_behind}
        if self.unknown == "drop":
            reasons["policy version unknown"] = version.is_null()
        members_with_reasons = members.with_columns(reason.alias(words) for words, reason in reasons.items())
        result_of_drop = drop_marked(members_with_reasons, {words: pl.col(words) for words in reasons})
        return StepMembers(result_of_drop.members.select(members.columns), result_of_drop.notes)


class Subsample(Step):
    """Draw `size` members of each group without replacement, as a smaller collection would have.

    Each episode's lot depends on (seed, draw, episode_id) only; the members with the `size` smallest lots stay. A draw
    therefore depends neither on row order nor on other groups, and a new episode displaces at most one member of its
    group. Several draws give several groupings: `NAME/0`, `NAME/1`, ... An episode may be in several of them, once in
    each.
    """

    kind: Literal["subsample"] = "subsample"
    size: int = Field(ge=1)
    """Members per group."""
    draws: int = Field(1, ge=1, le=1000)
    """Number of independent draws."""
    seed: int = 0
    """Seed of the draws."""
    short: Literal["drop", "keep"] = "drop"
    """Action for groups with fewer than `size` members, which say nothing about that size."""

    def apply(self, members: pl.DataFrame) -> StepMembers:
        """Draw `size` members of every group."""
        group = ["group_id", "draw"]
        is_short = pl.len().over(group) < self.size
        full = members.filter(~is_short) if self.short == "drop" else members
        notes = {f"in groups of fewer than {self.size}": members.height - full.height}
        # Draws of draws are numbered consecutively: (0, 1, 2) x 2 becomes 0 ... 5.
        draws = pl.concat(
            full.with_columns(draw_lots(full["episode_id"], "subsample", self.seed, draw))
            .filter(pl.struct("lot", "episode_id").rank("ordinal").over(group) <= self.size)
            .with_columns((pl.col("draw") * self.draws + draw).cast(pl.Int32))
            for draw in range(self.draws)
        ).drop("lot")
        return StepMembers(draws, {words: rows for words, rows in notes.items() if rows})


AnyStep = Annotated[DropFailed | MergeRuns | StalenessCap | Subsample, Field(discriminator="kind")]
STEPS = {step.model_fields["kind"].default: step for step in (DropFailed, MergeRuns, StalenessCap, Subsample)}


class Grouping(BaseModel, frozen=True, extra="forbid"):
    """Definition of groups other than the collected ones."""

    name: str = Field(pattern=NAME)
    """Name for estimators. Several draws have the names `NAME/0`, `NAME/1`, ..."""
    steps: tuple[AnyStep, ...] = Field(min_length=1)
    """Steps, each applied to the result of the one before."""

    @property
    def facts(self) -> tuple[str, ...]:
        """Return the facts that the steps read, once each."""
        return tuple(dict.fromkeys(fact for step in self.steps for fact in step.required_facts()))

    @property
    def draws(self) -> int:
        """Return the number of resulting groupings."""
        product = 1
        for step in self.steps:
            product *= step.draws if isinstance(step, Subsample) else 1
        return product

    @property
    def names(self) -> list[str]:
        """Return the names of the resulting groupings by draw."""
        return [self.name] if self.draws == 1 else [f"{self.name}/{draw}" for draw in range(self.draws)]

    def definition(self) -> str:
        """Return the steps as canonical JSON, which decides the groups, without the name."""
        steps = [step.model_dump(mode="json") for step in self.steps]
        return msgspec.json.encode(steps, order="deterministic").decode()


class GroupingMembers(NamedTuple):
    """Result of `regroup`."""

    rows: pl.DataFrame
    """episode_id, group_id (new), draw, collected_group_id: one row per episode and draw it is in."""
    notes: list[tuple[str, str, int]]
    """(kind of the step, description of dropped or unchanged rows, rows), in the order of the steps."""


def regroup(grouping: Grouping, episodes: pl.DataFrame) -> GroupingMembers:
    """Group episodes (episode_id, collected group_id, and the facts) by a definition.

    A new group's id is the hash of (definition, original group, draw) only, so a growing group keeps its id. For merged
    runs the original group is the hash of the common key of their starts.
    """
    members = episodes.with_columns(collected_group_id=pl.col("group_id"), draw=pl.lit(0, pl.Int32))
    notes: list[tuple[str, str, int]] = []
    for step in grouping.steps:
        result = step.apply(members)
        members = result.members
        notes += [(step.kind, words, rows) for words, rows in result.notes.items()]
    members = members.select("episode_id", "group_id", "draw", "collected_group_id")
    definition = grouping.definition()
    groups = members.select("group_id", "draw").unique()
    new = [ids.key_hash("grouping", definition, group, draw) for group, draw in groups.rows()]
    new_ids = groups.with_columns(pl.Series("new", new, dtype=pl.Int64))
    rows = members.join(new_ids, on=["group_id", "draw"], how="left").drop("group_id").rename({"new": "group_id"})
    return GroupingMembers(rows.select(members.columns).sort("draw", "group_id", "episode_id"), notes)


KIND = "group"
_CODE = (sys.modules[__name__], selections)
"""Modules whose source decides the groups."""
_KEYS = ("episode_id", "group_id", "run_id", "write_id")
_CONTEXTS = """
SELECT
    e.episode_id,
    md5(e.initial_messages) || md5(coalesce(e.tools, '')) || md5(s.context) || s.state_hash AS first_context
FROM episodes AS e
JOIN steps AS s ON s.episode_id = e.episode_id AND s.group_id = e.group_id AND s.run_id = e.run_id
WHERE s.step_index = 0 AND e.initial_messages IS NOT NULL
"""
"""SQL: hashes of the initial messages, the tools, and the first step's context and state."""


@dataclass(frozen=True, slots=True)
class GroupingReport:
    """Result of a grouping job."""

    job_id: int
    series_id: int
    skipped: bool
    """Whether a result of the same episodes and definition existed."""
    table: pl.DataFrame
    """One row per grouping: grouping, groups, episodes, smallest, largest (members of a group)."""
    notes: list[tuple[str, str, int]]
    """(step, description of dropped or unchanged rows, rows over all draws), in the order of the steps."""


def run_grouping(lake: Lake, grouping: Grouping, *, where: str | None = None, force: bool = False) -> GroupingReport:
    """Group episodes by a definition and write the groups to `groupings`, unless this result exists.

    Raises:
        DataRefusedError: no episode is selected, or the definition puts no episode in a group.
        UsageError: `where` is not a SQL predicate over `episodes`.
    """
    snapshot = lake.snapshot()
    columns = dict.fromkeys((*_KEYS, *(fact for fact in grouping.facts if fact != FIRST_CONTEXT)))
    episodes = select_where(snapshot, tuple(columns), where)
    if FIRST_CONTEXT in grouping.facts:
        episodes = episodes.join(snapshot.sql(_CONTEXTS), on="episode_id", how="left", maintain_order="left")
    members_of_groups = regroup(grouping, episodes)
    rows, notes = members_of_groups.rows, members_of_groups.notes
    if rows.is_empty():
        why = "; ".join(f"{kind}: {count} {words}" for kind, words, count in notes)
        msg = f"grouping {grouping.name!r} leaves none of {episodes.height} episodes in a group ({why}); loosen a step"
        raise DataRefusedError(msg)
    names = pl.DataFrame(
        {"draw": range(grouping.draws), "grouping": grouping.names}, schema_overrides={"draw": pl.Int32}
    )
    named_rows = rows.join(names, on="draw", how="left").join(episodes.select("episode_id", "run_id"), on="episode_id")
    series = {"grouping": grouping.name, "steps": grouping.model_dump(mode="json")["steps"]}
    job = lake.job(
        kind=KIND,
        parameters=series | {"where": where},
        series=series,
        code=_CODE,
        fingerprint=snapshot.fingerprint(episodes),
        snapshot=snapshot,
    )
    members = pl.col("members")
    sizes = (
        named_rows.group_by("draw", "grouping", "group_id")
        .agg(members=pl.len().cast(pl.Int64))
        .group_by("draw", "grouping")
        .agg(groups=pl.len().cast(pl.Int64), episodes=members.sum(), smallest=members.min(), largest=members.max())
        .sort("draw")
        .drop("draw")
    )
    report = GroupingReport(job.job_id, job.series_id, skipped=False, table=sizes, notes=notes)
    earlier_job = None if force else lake.find_job(KIND, job.series_id, snapshot.fingerprint(episodes))
    # Skip a job of this definition and input if it is the newest of its name, which readers take.
    if earlier_job is not None and earlier_job == find_grouping_job(lake.snapshot(), grouping.name):
        return GroupingReport(earlier_job, job.series_id, skipped=True, table=report.table, notes=notes)
    with job:
        job.write("groupings", named_rows.drop("draw"))
        grouped_count = named_rows["episode_id"].n_unique()
        job.counts |= {
            "rows_in": episodes.height,
            "rows_out": named_rows.height,
            "rows_dropped": episodes.height - grouped_count,
            "notes": {f"{kind}: {words}": count for kind, words, count in notes},
        }
    return report
