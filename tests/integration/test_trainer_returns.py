"""Metrics of an optimizer step's episodes: what they earned, their turns, their log-probability."""

from pathlib import Path
from statistics import fmean

import polars as pl
import pytest

from lake.judgements.credit import find_credit
from lake.records import EpisodeRecord
from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.job import run_credit
from testkit.training import config, random_backend, token_episodes, token_lake
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.runs.loop import StepReport, run_steps


def with_return(record: EpisodeRecord, value: float | None) -> EpisodeRecord:
    """The same episode with another return."""
    record.env_return = value
    return record


def trained(folder: Path, returns: list[float | None]) -> tuple[list[StepReport], list[list[float | None]]]:
    """One epoch of sft over an episode for each return; its reports, and the returns of each update's episodes."""
    episodes = token_episodes(tasks=len(returns), siblings=1)
    records = [with_return(record, value) for record, value in zip(episodes, returns, strict=True)]
    lk = token_lake(folder, records)
    settings = config("sft", episodes_per_step=2)
    snapshot = lk.snapshot()
    plan = Plan(select(snapshot, settings, settings.loss.needs), settings)
    earned = dict(lk.sql("SELECT episode_id, env_return FROM episodes").iter_rows())
    expected = [[earned[episode] for episode in plan.episode_ids_E[step.episodes_E].tolist()] for step in plan.steps]
    return list(run_steps(random_backend(), snapshot, plan, settings, peak=1e-3)), expected


def test_the_reward_of_an_update_is_the_mean_of_its_known_returns(tmp_path: Path) -> None:
    reports, expected = trained(tmp_path, [1.0, 0.25, None, 0.5, 0.0, None, 0.75, -1.0])
    for report, returns in zip(reports, expected, strict=True):
        known_returns = [value for value in returns if value is not None]
        assert report.metrics.get("reward") == (pytest.approx(fmean(known_returns)) if known_returns else None)
    assert len({report.metrics.get("reward") for report in reports}) > 1


def test_where_no_return_is_known_there_is_no_reward(tmp_path: Path) -> None:
    reports, _ = trained(tmp_path, [None, None, None])
    assert reports
    assert all("reward" not in report.metrics for report in reports)


def test_the_reward_is_the_score_that_advantages_come_from_and_the_return_stands_beside_it(tmp_path: Path) -> None:
    lk = token_lake(tmp_path)
    query = "SELECT episode_id, env_return, num_steps, abs(hash(episode_id)) % 7 AS score FROM episodes"
    facts = {row[0]: row[1:] for row in lk.sql(query).iter_rows()}
    with lk.job(kind="score", parameters={}) as job:
        rows = lk.sql("SELECT episode_id, group_id, run_id FROM episodes").with_columns(
            value=pl.col("episode_id").replace_strict({episode_id: float(row[2]) for episode_id, row in facts.items()})
        )
        rows = rows.with_columns(step_index=pl.lit(None, pl.Int32), scorer=pl.lit("judge"), scorer_version=pl.lit("1"))
        job.write("scores", rows)
    run_credit(lk, ESTIMATORS["rloo"](), score="judge")
    of_episodes = dict(
        lk.sql("SELECT episode_id, any_value(advantage) FROM current_advantages GROUP BY ALL").iter_rows()
    )
    settings = config("reinforce", options={"correction": {"method": "none"}}, minibatches=2)
    snapshot = lk.snapshot()
    plan = Plan(select(snapshot, settings, settings.loss.needs, source=find_credit(snapshot, None)), settings)
    reports = list(run_steps(random_backend(), snapshot, plan, settings, peak=1e-3))
    for report in reports:
        returns, turns, scores = zip(
            *(facts[episode_id] for episode_id in plan.episode_ids_E[report.step.episodes_E]), strict=True
        )
        metrics = report.metrics
        assert metrics["reward"] == pytest.approx(fmean(scores))
        assert metrics["env_return"] == pytest.approx(fmean(returns))
        assert metrics["episode_turns"] == pytest.approx(fmean(turns))
        advantages = [of_episodes[episode_id] for episode_id in plan.episode_ids_E[report.step.episodes_E]]
        assert metrics["episode_advantage"] == pytest.approx(fmean(advantages), abs=1e-6)
        total = metrics["logprob"] * metrics["action_tokens"]
        assert metrics["episode_logprob"] == pytest.approx(total / len(returns), rel=1e-5)
    assert len(reports) == 2
