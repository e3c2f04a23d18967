"""The credit job: an estimator over a lake's episodes into `advantages`, with lineage, skipped if nothing changed."""

import polars as pl
from pydantic import BaseModel, ConfigDict

from lake.lake import Lake
from lake.snapshot import Snapshot
from pipelines.credit import anchor_groups, anchors, batch, episode_credit, normalise, returns, segments, similarity
from pipelines.credit.diagnostics import CreditSummary, summarise
from pipelines.credit.estimators import gigpo
from pipelines.credit.estimators.gigpo import GiGPO
from pipelines.credit.inputs import ENV_RETURN, read_inputs, records_step_rewards, select_episodes

KIND = "credit"
_CODE = (gigpo, anchor_groups, anchors, batch, episode_credit, normalise, returns, segments, similarity)
"""Modules whose source decides the numbers."""


class CreditReport(BaseModel):
    """What a credit job did."""

    model_config = ConfigDict(frozen=True)

    job_id: int
    series_id: int
    skipped: bool
    """The same inputs and parameters already had a result, which stands."""
    estimator: GiGPO
    """The configuration that was used."""
    summary: CreditSummary


def run_credit(
    lake: Lake, estimator: GiGPO, *, where: str | None = None, score: str = ENV_RETURN, force: bool = False
) -> CreditReport:
    """Compute advantages of all steps of the selected episodes and write them to `advantages`.

    Args:
        lake: where to read and write.
        estimator: the configuration.
        where: SQL predicate over `episodes`; None takes all.
        score: source of the episode score: `env_return`, or a scorer's name.
        force: compute even if the same inputs and parameters have a result.

    Raises:
        DataRefusedError: no episode is selected.
        UsageError: a bad predicate or an unknown scorer.
        ContractError: steps that break the estimator's contract, naming the episode.
    """
    snapshot = lake.snapshot()
    episodes = select_episodes(snapshot, where, score)
    fingerprint = snapshot.fingerprint(episodes, score=score, scores=_scores_state(snapshot, score))
    series = {"estimator": "gigpo", "config": estimator.model_dump(mode="json"), "score": score}
    job = lake.job(
        kind=KIND,
        parameters=series | {"where": where},
        series=series,
        code=_CODE,
        fingerprint=fingerprint,
        snapshot=snapshot,
    )
    if not force and (found := lake.find_job(KIND, job.series_id, fingerprint)) is not None:
        standing = snapshot.scan("advantages").filter(pl.col("job_id") == found)
        return CreditReport(
            job_id=found, series_id=job.series_id, skipped=True, estimator=estimator, summary=summarise(standing)
        )
    with job:
        columns = tuple(estimator.anchors.columns(["state", "state_hash"]))
        inputs = read_inputs(snapshot, episodes, columns)
        rows = estimator.advantages(inputs.steps).collect()
        summary = summarise(rows.lazy())
        job.write(
            "advantages", _with_runs(rows, episodes).with_columns(pl.col("advantage").is_not_null().alias("defined"))
        )
        job.counts |= {
            "rows_in": rows.height,
            "rows_out": rows.height,
            "rows_dropped": 0,
            **summary.model_dump(mode="json"),
        }
    return CreditReport(job_id=job.job_id, series_id=job.series_id, skipped=False, estimator=estimator, summary=summary)


def _with_runs(rows: pl.DataFrame, episodes: pl.DataFrame) -> pl.DataFrame:
    """Rows with their episode's run_id, in the same order."""
    runs = episodes["run_id"].unique()
    if len(runs) == 1:
        return rows.with_columns(run_id=pl.lit(runs[0]))
    of_episodes = episodes.select("episode_id", "run_id")
    return rows.join(of_episodes, on="episode_id", how="left", maintain_order="left")


def with_step_source(lake: Lake, estimator: GiGPO, where: str | None, score: str) -> GiGPO:
    """The estimator with the step source that the recorded data supports.

    If the environment recorded no step reward at all, the episode score stands as the reward of the last step; one
    choice for the whole job, recorded in its parameters.
    """
    snapshot = lake.snapshot()
    recorded = records_step_rewards(snapshot, select_episodes(snapshot, where, score))
    return estimator.model_copy(update={"step_source": "rewards" if recorded else "terminal_score"})


def _scores_state(snapshot: Snapshot, score: str) -> str | None:
    """What must change for new scores to count: the jobs that wrote them."""
    if score == ENV_RETURN:
        return None
    jobs = snapshot.scan("scores").filter(pl.col("scorer") == score).select("job_id").unique().collect()
    return ",".join(map(str, sorted(jobs["job_id"].to_list())))
