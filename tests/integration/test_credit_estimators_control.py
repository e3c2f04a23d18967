"""The control for learning claims shuffles the advantages of any estimator, computed or not computed columns alike."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from pipelines.credit.compare import shuffle_advantages
from pipelines.credit.estimators import ESTIMATORS
from testkit.lakes import siblings

VALUES = ["return_to_go", "a_episode", "a_step", "advantage", "defined"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        pytest.param("gigpo_loo", {"step_source": "terminal_score"}, marks=pytest.mark.slow),
        ("reinforce_pp", {"step_source": "terminal_score", "batch_key": "all"}),
        pytest.param("discounted_grpo", {"step_source": "terminal_score"}, marks=pytest.mark.slow),
    ],
)
def test_a_shuffled_job_permutes_what_is_alive(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    lk = lake.open(tmp_path / "lake", create=True)
    with lk.job(kind="collect", run_id="one") as job:
        job.record([*siblings("mixed", [1.0, 0.0, 0.0, 1.0], num_steps=5), *siblings("dead", [0.5, 0.5, 0.5])])
    episodes = lk.scan("episodes").select("episode_id", "run_id", "status", episode_score="env_return")
    steps = lk.scan("steps").drop("run_id").join(episodes, on="episode_id")
    frame = ESTIMATORS[name](**options).advantages(steps).collect()
    rows = frame.with_columns(run_id=pl.lit("one"), defined=pl.col("advantage").is_not_null())
    with lk.job(kind="credit", parameters={"estimator": name}) as job:
        job.write("advantages", rows)

    shuffled_id, _ = shuffle_advantages(lk, job.job_id, seed=1)
    keys = ["group_id", "episode_id", "step_index"]
    scan = lk.scan("advantages").collect()
    real, shuffled = (scan.filter(pl.col("job_id") == job_id).sort(keys) for job_id in (job.job_id, shuffled_id))
    assert shuffled.select(*keys, "flags").equals(real.select(*keys, "flags"))
    assert sorted(map(repr, shuffled.select(VALUES).rows())) == sorted(map(repr, real.select(VALUES).rows()))
    assert not shuffled["advantage"].equals(real["advantage"])
    dead = pl.col("flags").str.contains("dead_group")
    assert shuffled.filter(dead).select(VALUES).equals(real.filter(dead).select(VALUES))
