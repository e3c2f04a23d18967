"""Offline runs end to end on a small lake: lineage, resumption bit for bit, and clear refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from lake import Lake
from lake.errors import CheckpointError, ContractError, DataRefusedError, UsageError
from testkit.examples import mostly_slow
from testkit.lakes import add_credit, build_lake
from testkit.offline_runs import configured, interrupted
from testkit.training import token_episodes, token_lake
from trainer.backends.base import tensor_digest
from trainer.policy.model import load_policy
from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model
from trainer.runs.checkpoint import read_state
from trainer.runs.folder import RunFolder
from trainer.runs.offline import resume, train
from trainer.runs.training_run import TrainResult


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, Path]:
    """A lake of text episodes with credit, and a tiny model of its texts."""
    folder = tmp_path_factory.mktemp("world")
    lk = build_lake(folder / "lake")
    add_credit(lk)
    make_tiny_model(lk.snapshot(), folder / "model", TinyModelConfig(vocabulary=300, hidden_size=32))
    return lk, folder / "model"


def rows(lk: Lake, view: str, result: TrainResult, columns: str) -> list[tuple[Any, ...]]:
    return lk.sql(f"SELECT {columns} FROM {view} WHERE job_id = ? ORDER BY ALL", [result.job_id]).rows()


@pytest.fixture(scope="module", autouse=True)
def straight(world: tuple[Lake, Path], tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The undisturbed run that others are compared with; the first on its lake, whichever test comes first."""
    lk, model = world
    return train(lk, configured(model), tmp_path_factory.mktemp("straight") / "out", run_id="straight")


def test_a_run_leaves_its_lineage(world: tuple[Lake, Path], straight: TrainResult) -> None:
    lk, _ = world
    job = lk.sql("SELECT * FROM job_runs WHERE job_id = ?", [straight.job_id]).row(0, named=True)
    assert (job["kind"], job["status"], job["run_id"]) == ("train", "succeeded", "straight")
    counts = json.loads(job["counts"])
    assert counts["weights_sha256"] == straight.weights_sha256
    assert (counts["attention"], counts["kernels"]) == ("sdpa", "eager")
    assert counts["optimizer_steps"] == straight.optimizer_steps == 8
    batches = lk.sql(
        "SELECT epoch, count(*) AS n, count(DISTINCT episode_id) AS d FROM trained_batches GROUP BY 1 ORDER BY 1"
    )
    assert batches.rows() == [(0, 24, 24), (1, 24, 24)]
    saved = rows(lk, "checkpoints", straight, "optimizer_step, policy_version, run_id, attempt")
    assert saved == [(3, 3, "straight", 0), (6, 6, "straight", 0), (8, 8, "straight", 0)]
    names = lk.sql("SELECT DISTINCT name FROM run_metrics WHERE job_id = ?", [straight.job_id])["name"].to_list()
    assert {"loss", "learning_rate", "grad_norm", "action_tokens"} <= set(names)


def test_batches_and_metrics_tell_the_same_tokens(world: tuple[Lake, Path], straight: TrainResult) -> None:
    lk, _ = world
    query = """
        SELECT b.tokens = m.value AS equal FROM
        (SELECT optimizer_step, sum(action_tokens) AS tokens FROM trained_batches WHERE job_id = $job GROUP BY 1) AS b
        JOIN run_metrics AS m ON m.step = b.optimizer_step AND m.name = 'action_tokens' AND m.job_id = $job
    """
    assert lk.sql(query, {"job": straight.job_id})["equal"].to_list() == [True] * 8


def test_the_log_and_the_table_hold_the_same_metrics(world: tuple[Lake, Path], straight: TrainResult) -> None:
    lk, _ = world
    lines = [json.loads(line) for line in (straight.model.parent / "metrics.jsonl").read_text().splitlines()]
    metrics = {(s, n): v for s, n, v in rows(lk, "run_metrics", straight, "step, name, value")}
    assert {(line["step"], n): v for line in lines for n, v in line.items() if n not in ("step", "attempt")} == metrics


def test_the_exported_model_has_the_stated_weights(straight: TrainResult) -> None:
    from trainer.backends.base import SingleDevice
    from trainer.config import OptimizerConfig

    backend = SingleDevice(load_policy(straight.model), OptimizerConfig())
    assert tensor_digest(backend.get_weights()) == straight.weights_sha256
    assert (straight.model / "tokenizer.json").exists()


def test_a_checkpoint_knows_its_data(world: tuple[Lake, Path], straight: TrainResult) -> None:
    lk, _ = world
    (uri, data, cursor), *_ = rows(lk, "checkpoints", straight, "uri, data_snapshot, cursor")
    state = read_state(Path(uri))
    assert json.loads(data) == state.snapshot
    assert lk.at(state.snapshot).versions == state.snapshot
    start = json.loads(RunFolder(straight.model.parent).path.joinpath("run.json").read_text())["model_sha256"]
    position = {"epoch": 0, "next_step": 3, "plan_hash": state.plan_hash}
    assert json.loads(cursor) == position | {"model_sha256": start}


def test_the_same_run_again_gives_the_same_weights(
    world: tuple[Lake, Path], straight: TrainResult, tmp_path: Path
) -> None:
    lk, model = world
    again = train(lk, configured(model, checkpoint_every=100), tmp_path / "out", run_id="again")
    assert again.weights_sha256 == straight.weights_sha256


@pytest.mark.parametrize("stops", mostly_slow([[1], [3], [4], [7], [8], [4, 1, 2]], [4, 1, 2]))
def test_an_interrupted_run_ends_with_the_same_weights_and_no_doubles(
    world: tuple[Lake, Path], straight: TrainResult, tmp_path: Path, stops: list[int]
) -> None:
    lk, model = world
    for after in stops:
        interrupted(lk, configured(model), tmp_path / "out", after)
    result = resume(lk, tmp_path / "out")
    assert result.weights_sha256 == straight.weights_sha256
    columns = "optimizer_step, episode_id, first_step, last_step, action_tokens, epoch"
    assert rows(lk, "trained_batches", result, columns) == rows(lk, "trained_batches", straight, columns)
    values = "step, name, value"
    clock = ("seconds", "tokens_per_second")
    timeless = [row for row in rows(lk, "run_metrics", result, values) if row[1] not in clock]
    assert timeless == [row for row in rows(lk, "run_metrics", straight, values) if row[1] not in clock]
    events = rows(lk, "jobs", result, "event")
    assert events == [("started",), ("succeeded",)]


def test_awr_learns_from_live_groups_only_and_resumes(world: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = world
    config = configured(model, loss="awr", epochs=1, episodes_per_step=4)
    first = train(lk, config, tmp_path / "one", run_id="awr")
    tasks = lk.sql(
        "SELECT DISTINCT task_id FROM trained_batches JOIN episodes USING (episode_id) WHERE job_id = ? ORDER BY 1",
        [first.job_id],
    )
    assert tasks["task_id"].to_list() == ["mixed", "partial"]
    interrupted(lk, config, tmp_path / "two", 3)
    # A newer credit job must not change the data of a run that is under way.
    add_credit(lk, gamma=0.1)
    assert resume(lk, tmp_path / "two").weights_sha256 == first.weights_sha256
    fresh = train(lk, config, tmp_path / "three", run_id="awr")
    assert fresh.weights_sha256 != first.weights_sha256


def test_new_episodes_do_not_change_a_run_under_way(world: tuple[Lake, Path], tmp_path: Path) -> None:
    _, model = world
    episodes = token_episodes(tasks=4)
    straight, moving = (token_lake(tmp_path / name, episodes[:10]) for name in ("a", "b"))
    config = configured(model, epochs=1, episodes_per_step=3, checkpoint_every=2)
    expected = train(straight, config, tmp_path / "out-a", run_id="r").weights_sha256
    interrupted(moving, config, tmp_path / "out-b", 3)
    token_lake(tmp_path / "b", episodes[10:])
    assert resume(lake.open(tmp_path / "b"), tmp_path / "out-b").weights_sha256 == expected


def test_a_finished_run_states_its_result_again(world: tuple[Lake, Path], straight: TrainResult) -> None:
    lk, _ = world
    again = resume(lk, straight.model.parent)
    assert (again.weights_sha256, again.job_id) == (straight.weights_sha256, straight.job_id)
    assert len(again.notes) == 1
    assert "finished already" in again.notes[0]


def test_a_started_folder_is_not_started_again(world: tuple[Lake, Path], straight: TrainResult) -> None:
    lk, model = world
    with pytest.raises(UsageError, match="--resume"):
        train(lk, configured(model), straight.model.parent, run_id="r")


def test_an_empty_folder_is_not_resumed(world: tuple[Lake, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run to resume"):
        resume(world[0], tmp_path / "nothing")


def test_a_damaged_checkpoint_stops_the_resumption(world: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = world
    interrupted(lk, configured(model), tmp_path / "out", 4)
    (weights,) = (tmp_path / "out" / "checkpoints").glob("*/weights.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors is damaged"):
        resume(lk, tmp_path / "out")


def test_another_model_stops_the_resumption(world: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = world
    shutil.copytree(model, tmp_path / "model")
    interrupted(lk, configured(tmp_path / "model"), tmp_path / "out", 1)
    shutil.rmtree(tmp_path / "model")
    make_tiny_model(lk.snapshot(), tmp_path / "model", TinyModelConfig(vocabulary=300, hidden_size=32, seed=1))
    with pytest.raises(CheckpointError, match="not the one that"):
        resume(lk, tmp_path / "out")


def test_another_lake_stops_the_resumption(world: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = world
    interrupted(lk, configured(model), tmp_path / "out", 1)
    with pytest.raises(CheckpointError, match="does not know job"):
        resume(build_lake(tmp_path / "other"), tmp_path / "out")


def test_ppo_on_text_is_refused_before_anything_is_written(tmp_path: Path, world: tuple[Lake, Path]) -> None:
    lk = build_lake(tmp_path / "lake")
    before = lk.snapshot().versions
    with pytest.raises(DataRefusedError, match=r"ppo refused: 72 of 72 steps hold text only.*--loss awr"):
        train(lk, configured(world[1], loss="ppo"), tmp_path / "out", run_id="r")
    assert lk.snapshot().versions == before
    assert RunFolder(tmp_path / "out").read() is None


def test_a_diverged_run_has_failed_for_good(world: tuple[Lake, Path], tmp_path: Path) -> None:
    _, model = world
    episodes = token_episodes(tasks=2)
    lk = token_lake(tmp_path / "lake", episodes)
    add_credit(lk)
    config = configured(model, loss="ppo", options={"entropy_coefficient": 1.0}, learning_rate=1e30, epochs=4)
    with pytest.raises(ContractError, match="norm is"):
        train(lk, config, tmp_path / "out", run_id="r")
    statuses = lk.sql("SELECT status, error FROM job_runs WHERE kind = 'train'").row(0)
    assert statuses[0] == "failed"
    assert "norm is" in statuses[1]
    with pytest.raises(CheckpointError, match="failed"):
        resume(lk, tmp_path / "out")


def test_tokens_of_another_tokenizer_are_refused_unless_insisted(world: tuple[Lake, Path], tmp_path: Path) -> None:
    _, model = world
    episodes = token_episodes(tasks=2)
    for episode in episodes:
        episode.tokenizer, episode.chat_template = "another", "template"
    lk = token_lake(tmp_path / "lake", episodes)
    with pytest.raises(DataRefusedError, match="tokenizer or chat template"):
        train(lk, configured(model), tmp_path / "out", run_id="r")
    result = train(lk, configured(model, tokens="engine"), tmp_path / "out", run_id="r")
    assert any("no record of it" in note for note in result.notes)


def test_a_token_outside_the_vocabulary_is_an_error(world: tuple[Lake, Path], tmp_path: Path) -> None:
    _, model = world
    episodes = token_episodes(tasks=1)
    tokens = episodes[-1].steps[0].tokens
    assert tokens is not None
    tokens.context_ids[0] = 5000
    lk = token_lake(tmp_path / "lake", episodes)
    with pytest.raises(ContractError, match=r"token id 5000, .* ids below 300"):
        train(lk, configured(model), tmp_path / "out", run_id="r")


def test_rendering_happens_once(world: tuple[Lake, Path], straight: TrainResult) -> None:
    lk, _ = world
    renders = lk.sql("SELECT counts FROM job_runs WHERE kind = 'render'")["counts"].to_list()
    assert [json.loads(counts) for counts in renders] == [{"episodes_rendered": 24, "episodes_present": 0}]
    assert lk.scan("tokens").select(pl.col("provenance").unique()).collect()["provenance"].to_list() == ["rendered"]
    assert straight.notes == ["rendered: 24 rendered, 0 present"]
