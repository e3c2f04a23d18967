"""The select job: apply filters to a lake's episodes and write `selections`, unless nothing changed."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
from pydantic import BaseModel, Field

from lake import ids
from lake.errors import ContractError, DataRefusedError
from lake.judgements import selections
from lake.judgements.credit import Credit, find_credit, find_jobs, find_score
from lake.judgements.scores import ENV_RETURN, ChosenScore, find_scorers_with_values
from lake.judgements.selections import find_selection_job
from lake.lake import Lake
from lake.read.snapshot import Snapshot
from lake.settings import SELECTION_NAME
from pipelines.select import filters
from pipelines.select.filters import (
    DROPS,
    UNKNOWN,
    AnyFilter,
    add_credit,
    add_scores,
    read_episodes,
    read_facts,
)

_KEYS = ["episode_id", "step_index"]


class Selection(BaseModel, frozen=True, extra="forbid"):
    """Named filters that decide which episodes and steps are kept."""

    name: str = Field(pattern=SELECTION_NAME)
    """Name of the selection."""
    filters: tuple[AnyFilter, ...] = Field(min_length=1)
    """Filters, applied in order. The order matters: the best half of the completed episodes differs from the completed
    episodes of the best half."""

    @property
    def facts(self) -> frozenset[str]:
        """Return the names of the facts that the filters read."""
        return frozenset[str]().union(*(part.facts() for part in self.filters))

    @property
    def labels(self) -> list[str]:
        """Return the filters' names in the table: their kind, numbered from the second of a kind on (`length#2`)."""
        kinds = [part.kind for part in self.filters]
        counts = [kinds[: n + 1].count(kind) for n, kind in enumerate(kinds)]
        return [kind if count == 1 else f"{kind}#{count}" for kind, count in zip(kinds, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class SelectionOutcome:
    """Result of a selection's filters."""

    rows: pl.DataFrame
    """episode_id, step_index, kept, filter, reason. One row per episode (step_index NULL), kept or not, and one per
    dropped step of an episode that no earlier filter dropped."""
    report: pl.DataFrame
    """One row per filter, in order: filter, dropped_episodes, dropped_steps (steps of dropped episodes included),
    episodes_left, steps_left."""


def apply(selection: Selection, episodes: pl.DataFrame, steps: pl.LazyFrame) -> SelectionOutcome:
    """Apply the filters in order to the episodes' facts (`pipelines.select.filters`) and the table `steps`.

    The filter that drops an episode's last active step drops the episode.

    Raises:
        ContractError: a filter returned a row twice, or an unknown one.
    """
    remaining = episodes
    active = steps.filter(pl.col("is_active"))
    dropped_steps = pl.DataFrame(schema={name: DROPS[name] for name in _KEYS})
    drops_by_filter, report = [], []
    for label, row_filter in zip(selection.labels, selection.filters, strict=True):
        steps_left = active if dropped_steps.is_empty() else active.join(dropped_steps.lazy(), on=_KEYS, how="anti")
        filter_drops = row_filter.drops(remaining, steps_left).select(list(DROPS))
        is_episode = pl.col("step_index").is_null()
        step_drops = filter_drops.filter(~is_episode)
        episode_drops = pl.concat([filter_drops.filter(is_episode), _find_emptied(step_drops, steps_left, label)])
        drops = pl.concat([episode_drops, step_drops])
        is_unknown = not drops.join(remaining, on="episode_id", how="anti").is_empty()
        is_double = episode_drops["episode_id"].is_duplicated().any() or step_drops.select(_KEYS).is_duplicated().any()
        if is_unknown or is_double:
            msg = f"filter {label} dropped a row twice, or an unknown row; a filter returns each row once"
            raise ContractError(msg)
        before = _count_steps(remaining, dropped_steps)
        remaining = remaining.join(episode_drops, on="episode_id", how="anti", maintain_order="left")
        dropped_steps = pl.concat([dropped_steps, step_drops.select(_KEYS)])
        drops_by_filter.append(drops.with_columns(filter=pl.lit(label)))
        after = _count_steps(remaining, dropped_steps)
        report.append((label, episode_drops.height, before - after, remaining.height, after))
    kept_episodes = remaining.select("episode_id", step_index=pl.lit(None, pl.Int32), reason=pl.lit(None, pl.String))
    rows = pl.concat([*drops_by_filter, kept_episodes.with_columns(filter=pl.lit(None, pl.String))])
    columns = ["filter", "dropped_episodes", "dropped_steps", "episodes_left", "steps_left"]
    return SelectionOutcome(
        rows.select(*_KEYS, kept=pl.col("filter").is_null(), filter="filter", reason="reason"),
        pl.DataFrame(report, schema=dict.fromkeys(columns, pl.Int64) | {"filter": pl.String}, orient="row"),
    )


def _find_emptied(single: pl.DataFrame, steps_left: pl.LazyFrame, label: str) -> pl.DataFrame:
    if single.is_empty():
        return single.clear()
    lost = single.group_by("episode_id").agg(lost=pl.len())
    had = steps_left.join(lost.lazy(), on="episode_id").group_by("episode_id", "lost").agg(had=pl.len())
    words = pl.format("{} dropped the last {} of its steps", pl.lit(label), pl.col("lost"))
    empty = had.filter(pl.col("had") == pl.col("lost")).collect(engine="streaming")
    return empty.select("episode_id", step_index=pl.lit(None, pl.Int32), reason=words)


def _count_steps(episodes: pl.DataFrame, dropped_steps: pl.DataFrame) -> int:
    return int(episodes["num_steps"].sum()) - dropped_steps.join(episodes, on="episode_id", how="semi").height


KIND = "select"
_CODE = (filters, selections, sys.modules[__name__])
"""Modules whose source decides which episodes a selection keeps."""
_REASONS = 5
"""Maximum number of reasons in a refusal."""


@dataclass(frozen=True, slots=True)
class SelectReport:
    """Result of a select job."""

    job_id: int
    series_id: int
    skipped: bool
    """Whether a result of the same inputs and filters existed."""
    episodes: int
    """Number of filtered episodes."""
    kept_episodes: int
    """Number of kept episodes."""
    score: ChosenScore
    """Score that filters by reward used."""
    report: pl.DataFrame
    """One row per filter, in order: filter, dropped_episodes, dropped_steps, episodes_left, steps_left."""


def run_select(
    lake: Lake,
    selection: Selection,
    *,
    where: str | None = None,
    score: str | None = None,
    credit: str | None = None,
    force: bool = False,
    empty: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> SelectReport:
    """Apply filters to episodes and write the kept and dropped ones, with reasons, to `selections`.

    Args:
        lake: lake to read and write.
        selection: the filters.
        where: SQL predicate over `episodes`; None takes all. Other episodes get no row.
        score: score of reward-based filters: `env_return`, or a scorer's or reward's name. None takes the score of
            `credit`, or of the current credit, or `env_return` without one (`lake.judgements.credit.find_score`).
        credit: an estimator's name, or the id of a credit series or job, or a prefix of the id. Filters compare within
            its groups and take its dead groups. Episodes that it does not cover are dropped.
        force: write even if a result of the same inputs and filters exists.
        empty: allow a selection without episodes; else it is refused and nothing is written.
        origin: origin of the selection for the job's parameters, such as the run and round of a loop.

    Raises:
        DataRefusedError: no episode is selected, or the filters drop all; the message has the counts.
        UsageError: a bad predicate, an unknown score or credit.
    """
    snapshot = lake.snapshot()
    rows = None if credit is None else find_credit(snapshot, credit)
    counted = find_score(snapshot, score, credit=rows)
    episodes = add_scores(snapshot, read_episodes(snapshot, where), counted.name)
    scores = episodes.select("episode_id", "score").sort("episode_id").write_csv()
    inputs: dict[str, str | int | None] = {
        "score": counted.name,
        "scores": ids.bytes_hash(scores.encode()),
        "credit": None if rows is None else str(find_jobs(snapshot, rows)),
    }
    fingerprint = snapshot.fingerprint(episodes, **inputs)
    series = selection.model_dump(mode="json") | {"score": counted.name, "credit": None if rows is None else rows.text}
    job = lake.job(
        kind=KIND,
        parameters=series | {"where": where} | dict(origin or {}),
        series=series,
        code=_CODE,
        fingerprint=fingerprint,
        snapshot=snapshot,
    )
    outcome = _apply_selection(snapshot, selection, episodes, rows, everything=where is None)
    kept_count = int(outcome.report["episodes_left"][-1])
    if not kept_count and not empty:
        raise DataRefusedError(_describe_empty_selection(snapshot, selection, counted, episodes, outcome))
    earlier_job = None if force else lake.find_job(KIND, job.series_id, fingerprint)
    # Skip a job of these filters and inputs if it is the newest of its name, which readers take.
    if earlier_job is None or earlier_job != find_selection_job(lake.snapshot(), selection.name):
        earlier_job = None
        keys = episodes.select("episode_id", "run_id", group_id="collected_group_id")
        rows_out = outcome.rows.with_columns(selection=pl.lit(selection.name)).join(keys, on="episode_id", how="left")
        with job:
            job.write("selections", rows_out)
            job.counts |= {
                "rows_in": episodes.height,
                "rows_out": kept_count,
                "rows_dropped": episodes.height - kept_count,
                "filters": outcome.report.to_dicts(),
            }
    return SelectReport(
        job_id=job.job_id if earlier_job is None else earlier_job,
        series_id=job.series_id,
        skipped=earlier_job is not None,
        episodes=episodes.height,
        kept_episodes=kept_count,
        score=counted,
        report=outcome.report,
    )


def _apply_selection(
    snapshot: Snapshot, selection: Selection, episodes: pl.DataFrame, credit: Credit | None, *, everything: bool
) -> SelectionOutcome:
    """Apply the filters, after dropping the episodes that the credit job did not cover."""
    facts = read_facts(snapshot, episodes, selection.facts, everything=everything)
    steps = snapshot.scan("steps")
    if credit is None:
        return apply(selection, facts, steps)
    covered_episodes = add_credit(snapshot, facts, credit)
    outcome = apply(selection, covered_episodes, steps)
    absent = facts.join(covered_episodes, on="episode_id", how="anti")
    reason = f"{credit.estimator} (credit {credit.text}) did not cover it"
    rows = absent.select(
        "episode_id", pl.lit(None, pl.Int32).alias("step_index"), kept=pl.lit(value=False)
    ).with_columns(filter=pl.lit("credit"), reason=pl.lit(reason))
    first = pl.DataFrame(
        [
            (
                "credit",
                absent.height,
                int(absent["num_steps"].sum()),
                covered_episodes.height,
                int(covered_episodes["num_steps"].sum()),
            )
        ],
        schema=outcome.report.schema,
        orient="row",
    )
    return SelectionOutcome(pl.concat([rows, outcome.rows]), pl.concat([first, outcome.report]))


def _describe_empty_selection(
    snapshot: Snapshot, selection: Selection, counted: ChosenScore, episodes: pl.DataFrame, outcome: SelectionOutcome
) -> str:
    why = ", ".join(f"{label} {n}" for label, n in outcome.report.select("filter", "dropped_episodes").rows() if n)
    fault = f"selection {selection.name!r} leaves none of {episodes.height} episodes (dropped: {why})"
    is_unknown = pl.col("reason").str.contains_any(list(UNKNOWN.values()))
    unknown = outcome.rows.filter(pl.col("step_index").is_null() & is_unknown.fill_null(value=False))
    if unknown.is_empty():
        return f"{fault}; loosen a filter"
    if not episodes["score"].count():
        scorers = find_scorers_with_values(snapshot, episodes["episode_id"])
        alternatives = ", ".join(f"--score {name}" for name in (ENV_RETURN, *scorers) if name != counted.name)
        return f"{fault}. No episode has a value of the score {counted.title}; take another one: {alternatives}"
    causes = unknown.group_by("filter", "reason", maintain_order=True).len().head(_REASONS).rows()
    return (
        f"{fault}. Of these {', '.join(f'{label} dropped {n} for {reason!r}' for label, reason, n in causes)}; to keep "
        "what is unknown, say so in the filter: --filter KIND:KEY=VALUE,unknown=keep"
        + ("" if unknown.height == episodes.height else ". Or loosen a filter")
    )
