"""Runs with validation, early stop, retention, stages, hooks, and runs done again from the lake alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import lake
from lake import Lake, ids
from lake.errors import CheckpointError, DataRefusedError, UsageError
from testkit.examples import mostly_slow
from testkit.lakes import add_credit, build_lake
from testkit.offline_runs import configured, interrupted
from testkit.training import random_model, token_episodes, token_lake
from trainer.evaluation.checkpoints import find_checkpoint
from trainer.policy.model import PackedPolicy
from trainer.policy.tiny_model import TinyModelConfig, build_tokenizer, make_tiny_model
from trainer.runs.checkpoint import read_state
from trainer.runs.offline import repeat_run, resume, train, train_stages
from trainer.runs.training_run import TrainResult
from trainer.train_settings import read_stages


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, Path]:
    """A lake of text episodes with credit, and a tiny model of its texts."""
    folder = tmp_path_factory.mktemp("world")
    lk = build_lake(folder / "lake")
    add_credit(lk)
    make_tiny_model(lk.snapshot(), folder / "model", TinyModelConfig(vocabulary=300, hidden_size=32))
    return lk, folder / "model"


HELD_OUT = "task_id = (SELECT max(task_id) FROM episodes)"


def validated(model: Path, **fields: Any) -> Any:
    options = {"where": HELD_OUT, "every": 1} | fields.pop("validation", {})
    return configured(model, validation=options, **fields)


def metric(lk: Lake, result: TrainResult, name: str) -> list[tuple[int, float]]:
    query = "SELECT step, value FROM run_metrics WHERE job_id = ? AND name = ? ORDER BY step"
    return lk.sql(query, [result.job_id, name]).rows()


@pytest.fixture(scope="module")
def measured(world: tuple[Lake, Path], tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run with validation, an evaluation of ours, and the peak of its processor given."""
    lk, model = world

    def evaluate(policy: PackedPolicy, done: int) -> dict[str, float]:
        return {"mine/parameters": float(policy.num_parameters), "mine/done": float(done)}

    config = validated(model, peak_tflops=1e-3)
    return train(lk, config, tmp_path_factory.mktemp("measured") / "out", run_id="v", evaluate=evaluate)


def test_held_out_episodes_are_measured_and_never_trained(world: tuple[Lake, Path], measured: TrainResult) -> None:
    lk, _ = world
    metrics = metric(lk, measured, "validation_nll")
    assert [step for step, _ in metrics] == list(range(measured.optimizer_steps))
    assert metrics[-1][1] < metrics[0][1]
    trained = "SELECT count(*) FROM trained_batches AS b JOIN episodes USING (episode_id) WHERE b.job_id = ?"
    query = f"{trained} AND {HELD_OUT}"
    assert lk.sql(query, [measured.job_id]).item() == 0


def test_a_run_that_holds_out_everything_is_refused(world: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = world
    with pytest.raises(DataRefusedError, match="validation holds out all"):
        train(lk, validated(model, validation={"where": "true"}), tmp_path / "out", run_id="v")


@pytest.fixture(scope="module")
def stopping(world: tuple[Lake, Path]) -> Any:
    """A run that stops early: no improvement is ever large enough."""
    _, model = world
    return validated(
        model, epochs=6, keep_last=1, validation={"every": 2, "patience": 2, "min_improvement": 50.0, "export": True}
    )


@pytest.fixture(scope="module")
def stopped(world: tuple[Lake, Path], stopping: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The result of that run, called "stops"."""
    return train(world[0], stopping, tmp_path_factory.mktemp("stopped") / "out", run_id="stops")


def test_a_run_stops_early_and_exports_its_best(world: tuple[Lake, Path], stopped: TrainResult) -> None:
    lk, _ = world
    result, out = stopped, stopped.model.parent
    assert result.optimizer_steps == 6
    assert any("stopped after 6 updates" in note for note in result.notes)
    assert any("exported: the weights after 2 updates" in note for note in result.notes)
    saved = lk.sql("SELECT optimizer_step, sha256 FROM checkpoints WHERE job_id = ? ORDER BY 1", [result.job_id]).rows()
    assert dict(saved)[2] == result.weights_sha256
    names = sorted(path.name.split("-attempt")[0] for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000006"]
    assert resume(lk, out).weights_sha256 == result.weights_sha256
    assert find_checkpoint(lk.snapshot(), str(out)).policy_version == 2


@pytest.mark.slow("a run that stopped early is repeated bit for bit, as one that did not is")
@pytest.mark.usefixtures("stopped")
def test_a_run_that_stopped_early_is_repeated(world: tuple[Lake, Path], tmp_path: Path) -> None:
    again = repeat_run(world[0], "stops", tmp_path / "again", run_id="stops-again")
    assert "bit for bit" in again.notes[0]


@pytest.mark.parametrize("after", mostly_slow([1, 3, 4, 5], 4))
def test_a_stopping_run_stops_there_when_resumed(
    world: tuple[Lake, Path], stopping: Any, stopped: TrainResult, tmp_path: Path, after: int
) -> None:
    lk, _ = world
    interrupted(lk, stopping, tmp_path / "out", after)
    again = resume(lk, tmp_path / "out")
    assert (again.optimizer_steps, again.weights_sha256) == (stopped.optimizer_steps, stopped.weights_sha256)


def test_an_evaluation_is_stored_among_the_metrics(world: tuple[Lake, Path], measured: TrainResult) -> None:
    lk, _ = world
    assert metric(lk, measured, "mine/done") == [(step, step + 1.0) for step in range(measured.optimizer_steps)]
    line = json.loads((measured.model.parent / "metrics.jsonl").read_text().splitlines()[0])
    assert line["mine/parameters"] == metric(lk, measured, "mine/parameters")[0][1]


def test_every_update_says_its_speed(world: tuple[Lake, Path], measured: TrainResult) -> None:
    speed, share = (metric(world[0], measured, name) for name in ("tokens_per_second", "mfu"))
    assert len(speed) == len(share) == measured.optimizer_steps
    assert all(value > 0 for _, value in [*speed, *share])


STAGES = {
    "epochs": 1,
    "episodes_per_step": 12,
    "threads": 1,
    "stages": [{"name": "sft", "loss": "sft", "where": "env_return > 0"}, {"name": "rl", "loss": "awr"}],
}


def test_rl_starts_from_the_weights_of_sft_and_a_changed_stage_is_not_resumed(
    world: tuple[Lake, Path], tmp_path: Path
) -> None:
    lk, model = world
    stages = read_stages(STAGES | {"model": str(model)})
    result = train_stages(lk, stages, tmp_path / "out", run_id="two")
    runs = dict(lk.sql("SELECT run_id, status FROM job_runs WHERE run_id LIKE 'two/%'").rows())
    assert runs == {"two/sft": "succeeded", "two/rl": "succeeded"}
    first, second = (json.loads((tmp_path / "out" / name / "run.json").read_text()) for name in ("sft", "rl"))
    assert second["config"]["model"] == str(tmp_path / "out" / "sft" / "final")
    assert second["model_sha256"] != first["model_sha256"]
    assert result.model == tmp_path / "out" / "rl" / "final"
    again = train_stages(lk, stages, tmp_path / "out", run_id="two")
    assert again.weights_sha256 == result.weights_sha256
    with pytest.raises(UsageError, match="epochs 2"):
        train_stages(lk, read_stages(STAGES | {"model": str(model), "epochs": 2}), tmp_path / "out", run_id="two")


def test_what_a_later_stage_cannot_find_is_told_before_the_first(world: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = world
    rl = {"name": "rl", "loss": "awr", "validation": {"where": "task_id = 'nobody'"}}
    settings = STAGES | {"model": str(model), "stages": [STAGES["stages"][0], rl]}  # type: ignore[index]
    with pytest.raises(
        DataRefusedError, match=r"no episode satisfies stage rl: validation\.where \"task_id = 'nobody'\""
    ):
        train_stages(lk, read_stages(settings), tmp_path / "out", run_id="later")
    assert not (tmp_path / "out").exists()


def test_a_run_s_name_means_that_run_whatever_ids_begin_like_it(
    world: tuple[Lake, Path], measured: TrainResult, tmp_path: Path
) -> None:
    lk, model = world
    name = ids.to_text(measured.job_id)[:3]
    short = {"epochs": 1, "where": "task_id = 'dead'", "checkpoint_every": 100}
    mine = train(lk, configured(model, **short), tmp_path / "mine", run_id=name)
    assert mine.optimizer_steps != measured.optimizer_steps
    assert repeat_run(lk, name, tmp_path / "again", run_id="again").optimizer_steps == mine.optimizer_steps
    assert find_checkpoint(lk.snapshot(), name).policy_version == mine.optimizer_steps


def test_what_a_killed_attempt_left_half_written_goes_when_its_run_is_resumed(
    world: tuple[Lake, Path], tmp_path: Path
) -> None:
    lk, model = world
    config = configured(model, checkpoint_every=1, episodes_per_step=12)
    interrupted(lk, config, tmp_path / "out", 2)
    partial_folder = tmp_path / "out" / "checkpoints" / ".step-00000006-attempt-0.partial"
    partial_folder.mkdir()
    (partial_folder / "weights.safetensors").write_bytes(b"half")
    resume(lk, tmp_path / "out")
    assert not partial_folder.exists()


def test_an_alarm_compares_with_the_first_update_of_the_run_also_after_resuming(tmp_path: Path) -> None:
    lk = token_lake(tmp_path / "lake", token_episodes(tasks=2))
    add_credit(lk)
    model = tmp_path / "model"
    random_model().save_pretrained(model)
    build_tokenizer(["some words"], 300).save_pretrained(model)
    config = configured(model, loss="ppo", learning_rate=1e-2, tokens="engine", checkpoint_every=1, episodes_per_step=2)
    train(lk, config, tmp_path / "straight", run_id="straight")
    interrupted(lk, config, tmp_path / "out", 2)
    resume(lk, tmp_path / "out")
    straight, resumed = (
        [read_state(path) for path in sorted((tmp_path / name / "checkpoints").iterdir())]
        for name in ("straight", "out")
    )
    assert straight[0].alarm_figures["first_entropy"] > 0
    assert [state.alarm_figures.get("follow_ups", 0) for state in straight] == list(range(len(straight)))
    expected = [(state.alarm_figures, state.standing_alarms) for state in straight]
    by_step = {state.optimizer_step: (state.alarm_figures, state.standing_alarms) for state in resumed}
    assert list(by_step.values()) == expected


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"loss": "sft"}], "each stage needs a separate name"),
        ([{"name": "a", "loss": "sft"}, {"name": "a", "loss": "sft"}], "each stage needs a separate name"),
        ([{"name": "../x", "loss": "sft"}], "each stage needs a separate name"),
        ([{"name": "a", "loss": "sft", "epoch": 1}], "stage a: there is no option `epoch`; valid: epochs"),
        ("sft", "stages are tables"),
    ],
)
def test_faulty_stages_are_named(stages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_stages({"model": "m", "stages": stages})


def test_a_run_is_repeated_from_the_lake_alone(world: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = world
    result = train(lk, configured(model, loss="awr", epochs=1), tmp_path / "out", run_id="original")
    add_credit(lk, omega=0.25)
    again = repeat_run(lake.open(lk.uri), "original", tmp_path / "again", run_id="again")
    assert again.weights_sha256 == result.weights_sha256
    assert "bit for bit" in again.notes[0]


@pytest.mark.slow("a run is not repeated from another model, as it is not resumed from one")
def test_a_repetition_from_another_model_is_refused(world: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, _ = world
    model = tmp_path / "model"
    make_tiny_model(lk.snapshot(), model, TinyModelConfig(vocabulary=300, hidden_size=32, seed=1))
    train(lk, configured(model, epochs=1, episodes_per_step=24), tmp_path / "out", run_id="moved")
    shutil.rmtree(model)
    make_tiny_model(lk.snapshot(), model, TinyModelConfig(vocabulary=300, hidden_size=32, seed=2))
    with pytest.raises(CheckpointError, match="not the one that"):
        repeat_run(lk, "moved", tmp_path / "again", run_id="again")


def test_an_unknown_run_lists_the_known_ones(world: tuple[Lake, Path], measured: TrainResult, tmp_path: Path) -> None:
    lk, _ = world
    with pytest.raises(UsageError, match="no training run of") as caught:
        repeat_run(lk, "nope", tmp_path / "again", run_id="again")
    names = str(caught.value).rpartition(": ")[2].split(", ")
    assert set(names) <= set(lk.sql("SELECT run_id FROM job_runs")["run_id"])
    assert measured.job_id
