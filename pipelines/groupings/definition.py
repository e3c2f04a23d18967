"""A grouping's definition: a name and steps that are applied in order. Order matters and is part of the definition."""

from typing import Annotated, NamedTuple

import msgspec
import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from lake import ids
from lake.settings import NAME
from pipelines.groupings.steps import DropFailed, MergeRuns, StalenessCap, Subsample

AnyStep = Annotated[DropFailed | MergeRuns | StalenessCap | Subsample, Field(discriminator="kind")]
STEPS = {step.model_fields["kind"].default: step for step in (DropFailed, MergeRuns, StalenessCap, Subsample)}


class Grouping(BaseModel):
    """Groups under another definition than the one they were collected with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
