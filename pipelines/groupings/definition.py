"""A grouping's definition: a name and steps that are applied in order, which is part of the definition.

Members are rows `episode_id`, `group_id` (of this step, at first the collected one), `draw`, and the facts that the
steps ask for. A step may drop rows, change `group_id`, or repeat rows under another `draw`; it looks at nothing else.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
import polars as pl
from pydantic import BaseModel, Field

from lake import ids
from lake.judgements.seeded_draws import draw_lots
from lake.settings import NAME

FIRST_CONTEXT = "first_context"
"""Fact: hash of all that the policy saw before its first decision; NULL if the messages were not recorded."""


@dataclass(frozen=True, slots=True)
class Regrouped:
    """What a step made of its members."""

    members: pl.DataFrame
    """The rows that are left, with the columns of the input."""
    notes: dict[str, int] = field(default_factory=dict)
    """What it left out or left alone, in words, with the number of rows (each draw counted)."""


class Step(BaseModel, ABC, frozen=True, extra="forbid"):
    """Base of the steps: a frozen configuration with one method."""

    kind: str
    """Name of the step."""
    facts: ClassVar[tuple[str, ...]] = ()
    """Columns of `episodes`, or FIRST_CONTEXT, that the step reads."""

    def needed(self) -> tuple[str, ...]:
        """The facts that this configuration reads."""
        return self.facts

    @abstractmethod
    def apply(self, members: pl.DataFrame) -> Regrouped:
        """The members (episode_id, group_id, draw, and the facts) regrouped."""


def without(members: pl.DataFrame, reasons: dict[str, pl.Expr]) -> Regrouped:
    """Members that no test marks (NULL is false), and how many each left out, in words; the first counts."""
    left, notes = members, {}
    for words, test in reasons.items():
        kept = left.filter(~test.fill_null(value=False))
        if kept.height < left.height:
            notes[words] = left.height - kept.height
        left = kept
    return Regrouped(left, notes)


Status = Literal["completed", "truncated", "aborted", "failed"]


class DropFailed(Step):
    """The group of those members whose `episodes.status` is none of `statuses`.

    What is left of a group stays together, however few they are: an estimator flags a group of one by itself.
    """

    kind: Literal["drop_failed"] = "drop_failed"
    statuses: tuple[Status, ...] = Field(("failed", "aborted"), min_length=1)
    """How an episode that is left out ended."""
    facts: ClassVar[tuple[str, ...]] = ("status",)

    def apply(self, members: pl.DataFrame) -> Regrouped:
        """Members that ended otherwise."""
        return without(members, {f"status {status}": pl.col("status") == status for status in self.statuses})


class MergeRuns(Step):
    """One group for all groups with the same environment, task, start seed and first context, across runs and rounds.

    The first context is all that the policy saw before its first decision: the initial messages, the tools on offer,
    and the first step's state and context, compared by hash. Siblings that started differently are no baseline for each
    other, even under one task and seed. Groups are merged, never torn apart: one whose members did not start alike, or
    whose initial messages were not recorded, stays as it is.
    """

    kind: Literal["merge_runs"] = "merge_runs"
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


class StalenessCap(Step):
    """The group of those members whose policy is at most `max_behind` versions behind the newest one in the group.

    Counted in `episodes.policy_version`, the version that the episode began with.
    """

    kind: Literal["staleness_cap"] = "staleness_cap"
    max_behind: int = Field(ge=0)
    """Versions behind the newest one of the group."""
    unknown: Literal["drop", "keep"] = "drop"
    """Episodes whose policy version is NULL."""
    facts: ClassVar[tuple[str, ...]] = ("policy_version",)

    def apply(self, members: pl.DataFrame) -> Regrouped:
        """Members that are recent enough."""
        version = pl.col("policy_version")
        behind = version.max().over("group_id", "draw") - version
        reasons = {f"more than {self.max_behind} versions behind": behind > self.max_behind}
        if self.unknown == "drop":
            reasons["policy version unknown"] = version.is_null()
        marked = members.with_columns(reason.alias(words) for words, reason in reasons.items())
        found = without(marked, {words: pl.col(words) for words in reasons})
        return Regrouped(found.members.select(members.columns), found.notes)


class Subsample(Step):
    """The group a smaller collection would have given: `size` of its members, drawn without replacement.

    Every episode draws a lot from (seed, draw, episode_id) alone; the members with the `size` smallest lots stay. So a
    draw depends neither on row order nor on other groups, and a new episode displaces at most one member of its group.
    Several draws are several groupings: `NAME/0`, `NAME/1`, ...; an episode may be in several of them, never twice in
    one.
    """

    kind: Literal["subsample"] = "subsample"
    size: int = Field(ge=1)
    """Members a group keeps."""
    draws: int = Field(1, ge=1, le=1000)
    """How many times, independently."""
    seed: int = 0
    """Decides the draws."""
    short: Literal["drop", "keep"] = "drop"
    """Groups with fewer than `size` members say nothing about that size: left out, or (`keep`) taken as they are."""

    def apply(self, members: pl.DataFrame) -> Regrouped:
        """`size` members of every group and draw."""
        group = ["group_id", "draw"]
        is_short = pl.len().over(group) < self.size
        full = members.filter(~is_short) if self.short == "drop" else members
        notes = {f"in groups of fewer than {self.size}": members.height - full.height}
        # A draw of draws is numbered through: (0, 1, 2) x 2 becomes 0 ... 5.
        drawn = pl.concat(
            full.with_columns(draw_lots(full["episode_id"], "subsample", self.seed, draw))
            .filter(pl.struct("lot", "episode_id").rank("ordinal").over(group) <= self.size)
            .with_columns((pl.col("draw") * self.draws + draw).cast(pl.Int32))
            for draw in range(self.draws)
        ).drop("lot")
        return Regrouped(drawn, {words: rows for words, rows in notes.items() if rows})


AnyStep = Annotated[DropFailed | MergeRuns | StalenessCap | Subsample, Field(discriminator="kind")]
STEPS = {step.model_fields["kind"].default: step for step in (DropFailed, MergeRuns, StalenessCap, Subsample)}


class Grouping(BaseModel, frozen=True, extra="forbid"):
    """Groups under another definition than the one they were collected with."""

    name: str = Field(pattern=NAME)
    """What estimators call it. With several draws each has a name of its own: `NAME/0`, `NAME/1`, ..."""
    steps: tuple[AnyStep, ...] = Field(min_length=1)
    """Applied in order, each to what the one before made."""

    @property
    def facts(self) -> tuple[str, ...]:
        """What the steps read about episodes, each once."""
        return tuple(dict.fromkeys(fact for step in self.steps for fact in step.needed()))

    @property
    def draws(self) -> int:
        """How many groupings it makes."""
        product = 1
        for step in self.steps:
            product *= step.draws if isinstance(step, Subsample) else 1
        return product

    @property
    def names(self) -> list[str]:
        """The names of what it makes, by draw."""
        return [self.name] if self.draws == 1 else [f"{self.name}/{draw}" for draw in range(self.draws)]

    def definition(self) -> str:
        """The steps as canonical JSON: what decides the groups, their name left out."""
        steps = [step.model_dump(mode="json") for step in self.steps]
        return msgspec.json.encode(steps, order="deterministic").decode()


class Members(NamedTuple):
    """Result of `regroup`."""

    rows: pl.DataFrame
    """episode_id, group_id (new), draw, collected_group_id: one row per episode and draw it is in."""
    notes: list[tuple[str, str, int]]
    """(kind of the step, what it left out or left alone, rows), in the order of the steps."""


def regroup(grouping: Grouping, episodes: pl.DataFrame) -> Members:
    """Members of the groups that a definition makes of episodes: episode_id, group_id (collected), and its facts.

    A new group's id is the hash of (definition, original group, draw); for merged runs the original group is the hash
    of what their starts have in common. It depends on nothing else, so a group keeps its id when it grows.
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
    named = groups.with_columns(pl.Series("new", new, dtype=pl.Int64))
    rows = members.join(named, on=["group_id", "draw"], how="left").drop("group_id").rename({"new": "group_id"})
    return Members(rows.select(members.columns).sort("draw", "group_id", "episode_id"), notes)
