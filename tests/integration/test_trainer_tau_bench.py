"""The issue's acceptance on real trajectories: SFT learns, then AWR trains on the live groups alone."""

import json
from pathlib import Path
from statistics import fmean

import pytest

import lake
from lake.write.ingest import ingest
from testkit.shared import shared_data
from trainer.config import TrainConfig
from trainer.data.render import Renderer, render_missing
from trainer.policy.model_files import load_tokenizer
from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model
from trainer.runs.offline import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    path = shared_data("tau_bench", "gpt-4o-airline.json")
    folder = tmp_path_factory.mktemp("tau")
    lk = lake.open(folder / "lake", create=True)
    ingest(lk, path)
    run_credit(lk, GiGPO(step_source="terminal_score"))
    make_tiny_model(lk.snapshot(), folder / "model", TinyModelConfig())
    return folder


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_sft_learns(folder: Path) -> None:
    config = TrainConfig(
        model=str(folder / "model"),
        loss="sft",
        where="rollout_index = 0 AND CAST(task_id AS INT) < 32",
        max_length=2048,
        episodes_per_step=2,
        threads=1,
    )
    train(lake.open(folder / "lake"), config, folder / "sft", run_id="sft")
    losses_of_sft = losses(folder / "sft")
    assert len(losses_of_sft) == 16
    assert fmean(losses_of_sft[-2:]) < 0.8 * fmean(losses_of_sft[:2])


def test_awr_takes_the_live_groups_and_leaves_their_steps_in_batches(folder: Path) -> None:
    lk = lake.open(folder / "lake")
    where = "CAST(task_id AS INT) < 12"
    config = TrainConfig(
        model=str(folder / "model"), loss="awr", where=where, max_length=1800, episodes_per_step=8, threads=1
    )
    train(lk, config, folder / "awr", run_id="awr")
    live = lk.sql(
        f"SELECT task_id FROM episodes WHERE {where} GROUP BY 1 HAVING min(env_return) < max(env_return) ORDER BY 1"
    )
    batches = lk.sql(
        "SELECT DISTINCT task_id FROM trained_batches JOIN job_runs USING (job_id) JOIN episodes USING (episode_id)"
        " WHERE job_runs.run_id = 'awr' ORDER BY 1"
    )
    assert batches["task_id"].to_list() == live["task_id"].to_list()
    assert 0 < batches.height < 12


def test_rendering_is_append_only(folder: Path) -> None:
    """One sequence per episode: the template keeps what it rendered, tool calls included."""
    lk = lake.open(folder / "lake")
    some = lk.sql("SELECT episode_id FROM episodes WHERE rollout_index = 0")["episode_id"]
    render_missing(lk, lk.snapshot(), Renderer(load_tokenizer(folder / "model")), some, {"model": "tiny"})
    rows = lk.sql("SELECT episode_id, count(*) FILTER (prefix_step_index IS NULL) AS opened FROM tokens GROUP BY 1")
    assert set(rows["opened"]) == {1}
    actions = lk.sql("SELECT count(*) AS n FROM tokens WHERE n_action < 2")["n"][0]
    assert actions == 0
