"""A selection: a name and filters that are applied in order, each to what the one before left."""

from dataclasses import dataclass

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from lake.errors import ContractError
from lake.settings import NAME
from pipelines.select.base import DROPS
from pipelines.select.filters import AnyFilter

_KEYS = ["episode_id", "step_index"]


class Selection(BaseModel):
    """What is kept of the episodes, and why the rest is not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME)
    """What trainers and people call it."""
    filters: tuple[AnyFilter, ...] = Field(min_length=1)
    """Applied in order. The order is part of the selection: the best half of what is completed is not what is completed
    of the best half."""

    @property
    def facts(self) -> frozenset[str]:
        """What the filters read about episodes."""
        return frozenset[str]().union(*(part.facts() for part in self.filters))

    @property
    def labels(self) -> list[str]:
        """The filters' names in the table: their kind, with a number from the second of a kind on (`length#2`)."""
        kinds = [part.kind for part in self.filters]
        counts = [kinds[: n + 1].count(kind) for n, kind in enumerate(kinds)]
        return [kind if count == 1 else f"{kind}#{count}" for kind, count in zip(kinds, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a selection made of its episodes."""

    rows: pl.DataFrame
    """episode_id, step_index, kept, filter, reason. One row per episode (step_index NULL), kept or not, and one per
    step that was dropped out of an episode that was kept up to then."""
    report: pl.DataFrame
    """One row per filter, in order: filter, dropped_episodes, dropped_steps (single ones and those of the dropped
    episodes), episodes_left, steps_left."""


def apply(selection: Selection, episodes: pl.DataFrame, steps: pl.LazyFrame) -> Outcome:
    """Apply the filters in order to the episodes' facts (`pipelines.select.facts`) and the table `steps`.

    An episode none of whose active steps is left is dropped as a whole by the filter that took the last one.
    ContractError if a filter named a row twice, or one that was gone.
    """
    left = episodes
    active = steps.filter(pl.col("is_active"))
    gone = pl.DataFrame(schema={name: DROPS[name] for name in _KEYS})
    drops, report = [], []
    for label, part in zip(selection.labels, selection.filters, strict=True):
        steps_left = active if gone.is_empty() else active.join(gone.lazy(), on=_KEYS, how="anti")
        found = part.drops(left, steps_left).select(list(DROPS))
        whole, single = (found.filter(pl.col("step_index").is_null() == whole) for whole in (True, False))
        whole = pl.concat([whole, _emptied(single, steps_left, label)])
        _check(label, whole, single, left)
        before = _steps(left, gone)
        left = left.join(whole, on="episode_id", how="anti", maintain_order="left")
        gone = pl.concat([gone, single.select(_KEYS)])
        drops.append(pl.concat([whole, single]).with_columns(filter=pl.lit(label)))
        after = _steps(left, gone)
        report.append((label, whole.height, before - after, left.height, after))
    kept = left.select("episode_id", step_index=pl.lit(None, pl.Int32), reason=pl.lit(None, pl.String))
    rows = pl.concat([*drops, kept.with_columns(filter=pl.lit(None, pl.String))])
    columns = ["filter", "dropped_episodes", "dropped_steps", "episodes_left", "steps_left"]
    return Outcome(
        rows.select(*_KEYS, kept=pl.col("filter").is_null(), filter="filter", reason="reason"),
        pl.DataFrame(report, schema=dict.fromkeys(columns, pl.Int64) | {"filter": pl.String}, orient="row"),
    )


def _emptied(single: pl.DataFrame, steps_left: pl.LazyFrame, label: str) -> pl.DataFrame:
    """Episodes that lose their last active steps."""
    if single.is_empty():
        return single.clear()
    lost = single.group_by("episode_id").agg(lost=pl.len())
    had = steps_left.join(lost.lazy(), on="episode_id").group_by("episode_id", "lost").agg(had=pl.len())
    words = pl.format("{} dropped the last {} of its steps", pl.lit(label), pl.col("lost"))
    empty = had.filter(pl.col("had") == pl.col("lost")).collect(engine="streaming")
    return empty.select("episode_id", step_index=pl.lit(None, pl.Int32), reason=words)


def _check(label: str, whole: pl.DataFrame, single: pl.DataFrame, left: pl.DataFrame) -> None:
    """A filter names a row once, and only rows that are left."""
    strangers = pl.concat([whole, single]).join(left, on="episode_id", how="anti")
    if strangers.height or whole["episode_id"].is_duplicated().any() or single.select(_KEYS).is_duplicated().any():
        msg = f"filter {label} dropped a row twice, or one that was not there; a filter names each row once"
        raise ContractError(msg)


def _steps(left: pl.DataFrame, gone: pl.DataFrame) -> int:
    """Steps of the episodes that are left, without those that were dropped singly."""
    return int(left["num_steps"].sum()) - gone.join(left, on="episode_id", how="semi").height
