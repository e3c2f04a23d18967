"""The select job: filters over a lake's episodes into `selections`, with lineage, skipped if nothing changed."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
from pydantic import BaseModel, Field

from lake.errors import ContractError, DataRefusedError
from lake.judgements import seeded_draws
from lake.judgements.credit import Credit, find_credit, jobs_of
from lake.judgements.scores import ENV_RETURN, ChosenScore, find_score, scorers_with_values
from lake.judgements.selections import selection_job
from lake.lake import Lake
from lake.read.snapshot import Snapshot
from lake.settings import SELECTION_NAME
from lake.write.jobs import Job
from pipelines.select import base
from pipelines.select.base import (
    DROPS,
    UNKNOWN,
    Filter,
    read_episodes,
    read_facts,
    scores_hash,
    with_credit,
    with_scores,
)
from pipelines.select.filters import AnyFilter, Combined

_KEYS = ["episode_id", "step_index"]


class Selection(BaseModel, frozen=True, extra="forbid"):
    """What is kept of the episodes, and why the rest is not."""

    name: str = Field(pattern=SELECTION_NAME)
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
    """Apply the filters in order to the episodes' facts (`pipelines.select.base`) and the table `steps`.

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
        unknown = pl.concat([whole, single]).join(left, on="episode_id", how="anti")
        if unknown.height or whole["episode_id"].is_duplicated().any() or single.select(_KEYS).is_duplicated().any():
            msg = f"filter {label} dropped a row twice, or one that was not there; a filter names each row once"
            raise ContractError(msg)
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
    if single.is_empty():
        return single.clear()
    lost = single.group_by("episode_id").agg(lost=pl.len())
    had = steps_left.join(lost.lazy(), on="episode_id").group_by("episode_id", "lost").agg(had=pl.len())
    words = pl.format("{} dropped the last {} of its steps", pl.lit(label), pl.col("lost"))
    empty = had.filter(pl.col("had") == pl.col("lost")).collect(engine="streaming")
    return empty.select("episode_id", step_index=pl.lit(None, pl.Int32), reason=words)


def _steps(left: pl.DataFrame, gone: pl.DataFrame) -> int:
    return int(left["num_steps"].sum()) - gone.join(left, on="episode_id", how="semi").height


KIND = "select"
_CODE = (base, seeded_draws, sys.modules[__name__])
"""Modules whose source decides what is kept, beside those of the filters that are used."""
_REASONS = 5
"""Reasons that a refusal spells out."""


@dataclass(frozen=True, slots=True)
class SelectReport:
    """What a select job did."""

    job_id: int
    series_id: int
    skipped: bool
    """The same inputs and filters already had a result, which is kept."""
    episodes: int
    """Episodes that were asked about."""
    kept: int
    """Those that stay."""
    score: ChosenScore
    """What filters by reward looked at."""
    report: pl.DataFrame
    """One row per filter, in order: filter, dropped_episodes, dropped_steps, episodes_left, steps_left."""


def run_select(
    lake: Lake,
    chosen: Selection,
    *,
    where: str | None = None,
    score: str | None = None,
    credit: str | None = None,
    force: bool = False,
    empty: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> SelectReport:
    """Apply filters to episodes and write what is kept and dropped, with reasons, to `selections`.

    Args:
        lake: where to read and write.
        chosen: the filters.
        where: SQL predicate over `episodes`; None takes all. Episodes outside it get no row.
        score: what reward-based filters look at: `env_return`, or a scorer's or reward's name. None takes the score of
            `credit`, or of the current credit, or `env_return` without one (`lake.judgements.scores.find_score`).
        credit: whose advantages: an estimator's name, or the id of a credit series or job, or its beginning. Filters
            compare within its groups, and dead groups are those that it flagged. Episodes that it did not cover are
            dropped for that reason.
        force: write even if the same inputs and filters have a result.
        empty: whether it may be that none is left; else that is refused, and nothing is written.
        origin: what made the selection, for the job's parameters: the run and round of a loop.

    Raises:
        DataRefusedError: no episode is selected, or the filters leave none; the message has the counts.
        UsageError: a bad predicate, an unknown score, no such credit.
    """
    snapshot = lake.snapshot()
    rows = None if credit is None else find_credit(snapshot, credit)
    counted = find_score(snapshot, score, credit=rows)
    episodes = with_scores(snapshot, read_episodes(snapshot, where), counted.name)
    inputs: dict[str, str | int | None] = {
        "score": counted.name,
        "scores": scores_hash(episodes),
        "credit": None if rows is None else str(jobs_of(snapshot, rows)),
    }
    fingerprint = snapshot.fingerprint(episodes, **inputs)
    series = chosen.model_dump(mode="json") | {"score": counted.name, "credit": None if rows is None else rows.text}
    parts: list[Filter] = list(chosen.filters)
    parts += [inner for part in chosen.filters if isinstance(part, Combined) for inner in part.filters]
    used = sorted({type(part).__module__ for part in parts})
    job = lake.job(
        kind=KIND,
        parameters=series | {"where": where} | dict(origin or {}),
        series=series,
        code=[*_CODE, *(sys.modules[name] for name in used)],
        fingerprint=fingerprint,
        snapshot=snapshot,
    )
    outcome = _outcome(snapshot, chosen, episodes, rows, everything=where is None)
    kept = int(outcome.report["episodes_left"][-1])
    if not kept and not empty:
        raise DataRefusedError(_nothing_left(snapshot, chosen, counted, episodes, outcome))
    found = None if force else lake.find_job(KIND, job.series_id, fingerprint)
    # A job need not run again if it is of these filters and inputs, and the newest of its name, which readers take.
    if found is None or found != selection_job(lake.snapshot(), chosen.name):
        found = None
        _write(job, chosen.name, episodes, outcome)
    return SelectReport(
        job_id=job.job_id if found is None else found,
        series_id=job.series_id,
        skipped=found is not None,
        episodes=episodes.height,
        kept=kept,
        score=counted,
        report=outcome.report,
    )


def _write(job: Job, name: str, episodes: pl.DataFrame, outcome: Outcome) -> None:
    keys = episodes.select("episode_id", "run_id", group_id="collected_group_id")
    kept = int(outcome.report["episodes_left"][-1])
    with job:
        job.write(
            "selections", outcome.rows.with_columns(selection=pl.lit(name)).join(keys, on="episode_id", how="left")
        )
        job.counts |= {
            "rows_in": episodes.height,
            "rows_out": kept,
            "rows_dropped": episodes.height - kept,
            "filters": outcome.report.to_dicts(),
        }


def _outcome(
    snapshot: Snapshot, chosen: Selection, episodes: pl.DataFrame, credit: Credit | None, *, everything: bool
) -> Outcome:
    """The filters' result; before them, what the credit job did not cover is dropped."""
    known = read_facts(snapshot, episodes, chosen.facts, everything=everything)
    steps = snapshot.scan("steps")
    if credit is None:
        return apply(chosen, known, steps)
    covered = with_credit(snapshot, known, credit)
    outcome = apply(chosen, covered, steps)
    absent = known.join(covered, on="episode_id", how="anti")
    reason = f"{credit.estimator} (credit {credit.text}) did not cover it"
    rows = absent.select(
        "episode_id", pl.lit(None, pl.Int32).alias("step_index"), kept=pl.lit(value=False)
    ).with_columns(filter=pl.lit("credit"), reason=pl.lit(reason))
    first = pl.DataFrame(
        [("credit", absent.height, int(absent["num_steps"].sum()), covered.height, int(covered["num_steps"].sum()))],
        schema=outcome.report.schema,
        orient="row",
    )
    return Outcome(pl.concat([rows, outcome.rows]), pl.concat([first, outcome.report]))


def _nothing_left(
    snapshot: Snapshot, chosen: Selection, counted: ChosenScore, episodes: pl.DataFrame, outcome: Outcome
) -> str:
    why = ", ".join(f"{label} {n}" for label, n in outcome.report.select("filter", "dropped_episodes").rows() if n)
    left = f"selection {chosen.name!r} leaves none of {episodes.height} episodes (dropped: {why})"
    is_unknown = pl.col("reason").str.contains_any(list(UNKNOWN.values()))
    unknown = outcome.rows.filter(pl.col("step_index").is_null() & is_unknown.fill_null(value=False))
    if unknown.is_empty():
        return f"{left}; loosen a filter"
    if not episodes["score"].count():
        scorers = scorers_with_values(snapshot, episodes["episode_id"])
        others = ", ".join(f"--score {name}" for name in (ENV_RETURN, *scorers) if name != counted.name)
        return f"{left}. No episode has a value of the score {counted.title}; take another one: {others}"
    causes = unknown.group_by("filter", "reason", maintain_order=True).len().head(_REASONS).rows()
    return (
        f"{left}. Of these {', '.join(f'{label} dropped {n} for {reason!r}' for label, reason, n in causes)}; to keep "
        "what is unknown, say so in the filter: --filter KIND:KEY=VALUE,unknown=keep"
        + ("" if unknown.height == episodes.height else ". Or loosen a filter")
    )
