"""What a training job saw: each figure of the page's sections, against rows written by hand."""

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lake import Lake, ids
from lake.records import TokensRecord
from testkit.lakes import add_credit, build_lake, rollout
from testkit.training import config
from viewer.queries import training_data

AT = datetime(2026, 1, 1, tzinfo=UTC)
HIGH, LOW = math.log(2.0) - 1, math.log(0.5) - 1
"""Log-probabilities whose ratios to the stored ones are 2 and 1/2."""


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two tasks of two siblings, of versions 3 and 5; tokens in every step, and credit."""
    places = [(task, index) for task in "ab" for index in (0, 1)]
    records = [rollout(task, index, 1.0 - index, num_steps=2, policy_version=3 + 2 * index) for task, index in places]
    for record in records:
        for step in record.steps:
            step.tokens = TokensRecord(context_ids=[1], action_ids=[5, 6], action_logprobs=[-1.0, -1.0])
    lk = build_lake(tmp_path_factory.mktemp("intake"), records)
    add_credit(lk)
    return lk


@pytest.fixture(scope="module")
def job(lk: Lake) -> int:
    """A job whose two updates took a0 twice (but one step of it only once), a1 and b0 once."""
    rows = [
        batch(lk, 0, "a", 0, [0.1, 0.1], 0.4),
        batch(lk, 0, "a", 1, [0.3, 0.0], 0.6),
        batch(lk, 1, "a", 0, [0.1, 0.0], 0.2),
        batch(lk, 1, "b", 0, [0.4, 0.0], 0.8),
    ]
    counts = {"episodes_in_lake": 6, "rows_in": 4, "rows_dropped": 1, "dropped_inactive": 2, "dropped_stale": 3}
    return trained(lk, rows, counts)


def batch(lk: Lake, update: int, task: str, index: int, weights: list[float] | None, mass: float | None) -> Any:
    episode = lk.sql("SELECT episode_id FROM episodes WHERE task_id = ? AND rollout_index = ?", [task, index]).item()
    of_row = {"optimizer_step": update, "episode_id": episode, "first_step": 0, "last_step": 1, "epoch": 0}
    return of_row | {"action_tokens": 4, "token_weights": weights, "loss_weight": mass}


def trained(lk: Lake, rows: list[Any], counts: dict[str, int], loss: str = "ppo", run: str = "r") -> int:
    options = config(loss).loss.model_dump(mode="json")
    saved = {
        "optimizer_step": 2,
        "run_id": "r",
        "policy_version": 2,
        "uri": "x",
        "sha256": "two",
        "at": AT,
        "attempt": 0,
    }
    saved |= {"data_snapshot": "{}", "cursor": json.dumps({"model_sha256": "zero"})}
    with lk.job(kind="train", run_id=run, parameters={"loss": options, "where": "task_id <> 'c'"}) as job:
        types = {"token_weights": pl.List(pl.Float32), "loss_weight": pl.Float64}
        job.write("batches", pl.DataFrame(rows, schema_overrides=types))
        job.write("checkpoints", pl.DataFrame([saved]))
        job.counts |= counts
    return job.job_id


def test_the_funnel_goes_from_the_lake_to_what_was_trained_on(lk: Lake, job: int) -> None:
    stages = training_data.read_funnel(lk.snapshot(), job)
    assert [(stage.name, stage.episodes, stage.steps, stage.is_drop) for stage in stages] == [
        ("In the lake", 6, None, False),
        ("Selected (where task_id <> 'c')", 4, None, False),
        ("stale", None, 3, True),
        ("inactive", None, 2, True),
        (stages[4].name, 1, None, True),
        ("Trained on", 3, 4, False),
    ]
    assert "left to train on" in stages[4].name
    listed = [None if stage.sql is None else lk.sql(stage.sql).height for stage in stages]
    assert listed == [None, 4, None, 0, 1, 3]


def test_a_loop_has_no_funnel_but_what_it_trained_on(lk: Lake) -> None:
    job = trained(lk, [batch(lk, 0, "a", 0, None, None)], {})
    assert [(stage.name, stage.episodes, stage.steps) for stage in training_data.read_funnel(lk.snapshot(), job)] == [
        ("Trained on", 1, 2)
    ]
    assert not training_data.has_weights(lk.snapshot(), job)
    assert training_data.read_mixture(lk.snapshot(), job, "task_id").row(0) == ("a", 1, 1, 4, 1.0)


def test_how_often_episodes_were_trained_on_and_which(lk: Lake, job: int) -> None:
    assert training_data.count_repeats(lk.snapshot(), job).rows() == [(1, 2), (2, 1)]
    (episode,) = lk.sql(training_data.build_repeats_sql(job, 2))["episode_id"]
    assert lk.sql(f"SELECT task_id FROM episodes WHERE episode_id = id('{ids.to_text(episode)}')").item() == "a"


def test_shares_of_a_mixture_are_of_the_loss(lk: Lake, job: int) -> None:
    assert training_data.has_weights(lk.snapshot(), job)
    frame = training_data.read_mixture(lk.snapshot(), job, "task_id")
    assert frame.drop("share").rows() == [("a", 2, 3, 12), ("b", 1, 1, 4)]
    assert frame["share"].to_list() == pytest.approx([0.6, 0.4])


def test_staleness_without_numbered_versions_counts_from_the_newest_consumed_so_far(lk: Lake) -> None:
    later = trained(lk, [batch(lk, 0, "a", 0, None, None), batch(lk, 1, "a", 1, None, None)], {}, run="demo")
    assert training_data.count_by_staleness(lk.snapshot(), later).select("staleness", "rows").rows() == [(0, 2)]


def test_staleness_of_another_runs_episodes_counts_from_the_newest_of_that_run(lk: Lake, job: int) -> None:
    """As the trainer's metrics do: an update has no version in a run that it does not play."""
    assert training_data.count_by_staleness(lk.snapshot(), job).rows() == [(0, 1, 1, 4), (2, 2, 3, 12)]


def test_staleness_where_versions_are_numbers_of_updates_counts_from_the_update(tmp_path: Path) -> None:
    """Update 4 trained on version 1 when the job had consumed version 3 at most."""
    records = [rollout("a", index, 1.0, policy_version=index) for index in range(4)]
    lk = build_lake(tmp_path, records, run_id="r")
    places = [(0, 0), (1, 1), (3, 3), (4, 1), (5, 3)]
    job = trained(lk, [batch(lk, update, "a", index, None, None) for update, index in places], {})
    frame = training_data.count_by_staleness(lk.snapshot(), job)
    assert frame.select("staleness", "rows").rows() == [(0, 3), (2, 1), (3, 1)]
    around = training_data.read_versions_around(lk.snapshot(), job, 4)
    assert {update: (played.versions, played.behind) for update, played in around.items()} == {
        3: ((3, 3), (0, 0)),
        4: ((1, 1), (3, 3)),
        5: ((3, 3), (2, 2)),
    }


def test_staleness_of_a_loop_counts_from_the_version_of_the_update(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, [rollout("a", index, 1.0, policy_version=index) for index in (0, 1)], run_id="loop")
    rows = [batch(lk, update, "a", index, None, None) for update, index in ((0, 0), (4, 0), (4, 1))]
    saved = {"run_id": "loop", "uri": "x", "sha256": "s", "at": AT, "attempt": 0, "data_snapshot": "{}"}
    versions = [saved | {"optimizer_step": 2 * n, "policy_version": n, "cursor": f'{{"round": {n}}}'} for n in (1, 2)]
    with lk.job(kind="train", run_id="loop") as job:
        types = {"token_weights": pl.List(pl.Float32), "loss_weight": pl.Float64}
        job.write("batches", pl.DataFrame(rows, schema_overrides=types))
        job.write("checkpoints", pl.DataFrame(versions))
    assert training_data.count_by_staleness(lk.snapshot(), job.job_id).select("staleness", "rows").rows() == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]


def test_drift_by_staleness_is_that_of_the_jobs_own_policy(lk: Lake, job: int) -> None:
    query = "SELECT episode_id, step_index, encoding_id, group_id, run_id FROM tokens"
    rows = [
        row | {"checkpoint": "r@2", "temperature": 1.0, "n_action": 2, "log_ratio": 0.0, "logprobs": [HIGH, LOW]}
        for row in lk.sql(query).to_dicts()
    ]
    with lk.job(kind="rescore", parameters={"checkpoint": "r@2", "weights_sha256": "two"}) as rescored:
        rescored.write("ratios", pl.DataFrame(rows))
    snapshot = lk.snapshot()
    ((series, policy),) = training_data.list_rescored_policies(snapshot, job).items()
    assert policy == ("r@2", 2)
    frame = training_data.read_drift(snapshot, job, series)
    assert frame.select("staleness", "steps", "tokens").rows() == [(0, 1, 2), (2, 3, 6)]
    row = frame.row(1, named=True)
    assert [row[name] for name in ("mean", "q50")] == pytest.approx([0, 0], abs=1e-6)
    assert row["q95"] == pytest.approx(math.log(2), abs=1e-6)
    assert row["ess"] == pytest.approx(2.5**2 / 4.25 / 2)
    # Every advantage has a sign, and one of the two tokens lies beyond the clip on its side.
    assert (row["stopped"], row["limited"]) == (0.5, None)
    assert training_data.explain_missing_clip(snapshot, job) is None
    other_job = trained(lk, [batch(lk, 0, "a", 0, None, None)], {}, loss="awr")
    assert "limits no ratio" in str(training_data.explain_missing_clip(lk.snapshot(), other_job))
    assert training_data.read_drift(lk.snapshot(), other_job, series)["stopped"].to_list() == [None]
