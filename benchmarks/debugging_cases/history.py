"""The prepared lake: three runs and their evaluation, credit, training, what people said, and what was taken back."""

from collections.abc import Callable
from pathlib import Path

import polars as pl

import lake
from benchmarks.debugging_cases import plan
from benchmarks.debugging_cases.training import train
from lake import EpisodeRecord, Lake
from lake.write.scores import RECORDED, Annotation, add_scores, annotate
from pipelines.credit import ESTIMATORS
from pipelines.credit.job import run_credit

_RATED = """
    SELECT episode_id, env_return FROM episodes
    WHERE run_id = 'shop' ORDER BY md5(task_id || collection_round || '.' || rollout_index) LIMIT ?
    """
_WORDS = {1.0: "settled", 0.0: "the customer still has the problem"}


def build(folder: Path, size: plan.Size, seed: int, say: Callable[[str], None] = lambda _: None) -> Lake:
    """Make the lake in a folder that holds none.

    Raises:
        UsageError: there is a lake already.
    """
    lk = open_empty(folder)
    runs = {arm: plan.episodes(arm, size, seed) for arm in plan.ROUNDS}
    collections = [record_run(lk, run, records, say) for run, records in runs.items()]
    collections.append(record_run(lk, plan.EVALUATION, plan.held_out(size, seed), say))
    add_scores(lk, pl.concat(collections), version=RECORDED, source="collect")
    for name, options in {"grpo": {}, "gigpo": {"gamma": 1.0}}.items():
        report = run_credit(lk, ESTIMATORS[name](**options))
        say(f"{name}: job {lake.ids.to_text(report.job_id)}")
    train(lk, size, seed, {str(arm): number for arm, number in plan.ROUNDS.items()}, {})
    _rate(lk, size.rated)
    _spoil(lk, size, seed, say)
    return lk


def open_empty(folder: Path) -> Lake:
    """Make the lake, or open one without episodes.

    Raises:
        UsageError: it holds episodes.
    """
    lk = lake.open(folder, create=True)
    if lk.sql("SELECT count(*) FROM episodes").item():
        msg = f"{folder} holds a lake with episodes already; valid: a folder that holds none"
        raise lake.UsageError(msg)
    return lk


def record_run(
    lk: Lake, run: str, records: list[EpisodeRecord], say: Callable[[str], None], **others: int
) -> pl.DataFrame:
    """Record a run by one job, whose parameters are all its settings; what scorers said of it comes back."""
    settings = {
        "environment": "fjordwear",
        "policy": "support-agent",
        "engine": "vllm",
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 512,
        "max_steps": plan.MAX_STEPS["shop-short" if run == "shop-short" else "shop"],
        "reward": "judge" if run == "shop-judge" else "env_return",
        **others,
    }
    with lk.job(kind="collect", run_id=run, parameters=settings) as job:
        counts = job.record(records)
        job.counts |= {"rows_out": counts.new, "rejected": counts.rejected}
    say(f"{run}: {counts.new:,} episodes")
    return job.scores.drain()


def _rate(lk: Lake, n_episodes: int) -> None:
    """Two people rate the same episodes; they differ on one in twelve, and know what settles a request."""
    rated = lk.sql(_RATED, [n_episodes]).rows()
    for offset, author in enumerate(("ann", "bob")):
        annotations = []
        for number, (episode_id, outcome) in enumerate(rated):
            value = 1 - outcome if number % 24 == 5 + offset else outcome
            annotations.append(Annotation(episode_id=episode_id, value=value, text=_WORDS[value]))
        annotate(lk, annotations, author)


def _spoil(lk: Lake, size: plan.Size, seed: int, say: Callable[[str], None]) -> None:
    """Two groups change after their credit was computed."""
    query = "SELECT episode_id FROM episodes WHERE run_id = 'shop' AND collection_round = ? AND task_id = ?"
    rows = lk.sql(f"{query} ORDER BY rollout_index LIMIT 3", [plan.SPOILED_ROUND, plan.RETRACTED])
    lk.retract(rows["episode_id"].to_list(), "the customer's record was another one's: the fixture was reset too late")
    again = record_run(lk, "shop", plan.retried(size, seed), say)
    add_scores(lk, again, version=RECORDED, source="collect")
