"""Which checkpoint is rescored, what it is called, and the command."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lake import Lake
from lake.cli import trajlake
from lake.errors import CheckpointError, UsageError
from lake.records import EpisodeRecord
from testkit.lakes import build_lake
from testkit.sampled_lake import play_warm_and_plain, recorded, save_model, save_near
from trainer.evaluation.ratios import find_rescored
from trainer.evaluation.rescore import rescore


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """b, which plays, and e, a little off."""
    folder = tmp_path_factory.mktemp("models")
    save_near(folder / "e", save_model(folder / "b"), 0.01)
    return folder


@pytest.fixture(scope="module")
def games(models: Path) -> list[EpisodeRecord]:
    return play_warm_and_plain(models / "b")


@pytest.fixture
def lk(tmp_path: Path, games: list[EpisodeRecord]) -> Lake:
    return recorded(tmp_path / "lake", games)


# ---------------------------------------------------------------- names


def test_a_name_stands_for_one_set_of_weights(lk: Lake, models: Path) -> None:
    rescore(lk, str(models / "e"), name="policy")
    with pytest.raises(UsageError, match=r"'policy' names other weights .*sha256 .*another --name"):
        rescore(lk, str(models / "b"), name="policy")
    snapshot = lk.snapshot()
    meant = find_rescored(snapshot, "policy")
    digest = lk.sql("SELECT parameters->>'$.weights_sha256' FROM jobs WHERE kind = 'rescore' LIMIT 1").item()
    assert find_rescored(snapshot, str(models / "e")) == find_rescored(snapshot, digest[:8]) == meant
    with pytest.raises(UsageError, match=r"checkpoint 'nobody' has scored nothing; name one of: policy"):
        find_rescored(snapshot, "nobody")


def test_a_folder_whose_weights_were_replaced_means_two_checkpoints(lk: Lake, models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    where = {"where": "task_id = 'game0'"}
    shutil.copytree(models / "b", folder)
    first = rescore(lk, str(folder), options=where)
    shutil.rmtree(folder)
    shutil.copytree(models / "e", folder)
    with pytest.raises(UsageError, match="'policy' names other weights"):
        rescore(lk, str(folder), options=where)
    second = rescore(lk, str(folder), name="replaced", options=where)
    snapshot = lk.snapshot()
    with pytest.raises(UsageError, match="means several checkpoints; name one of: replaced, policy"):
        find_rescored(snapshot, str(folder))
    series_ids = [find_rescored(snapshot, name).series_id for name in ("policy", "replaced", second.weights_sha256)]
    assert series_ids == [first.series_id, second.series_id, second.series_id]


@pytest.mark.parametrize("text", ["nowhere", "games@1", "games@x", "@", ""])
def test_a_checkpoint_that_is_not_there(lk: Lake, text: str) -> None:
    with pytest.raises(UsageError, match="checkpoint"):
        rescore(lk, text or "''")


def test_checkpoints_of_a_run(lk: Lake, models: Path, tmp_path: Path) -> None:
    """By the run's name and step, by its job, by its folder, and by the folder of one of its checkpoints."""
    from trainer.config import TrainConfig
    from trainer.runs.offline import train

    config = TrainConfig(
        model=str(models / "b"), loss="sft", epochs=2, episodes_per_step=18, checkpoint_every=2, threads=1
    )
    trained = train(lk, config, tmp_path / "run", run_id="cloned")
    steps = trained.optimizer_steps
    assert steps == 4
    by_step = rescore(lk, "cloned@2")
    assert (by_step.checkpoint, by_step.scored > 0) == ("cloned@2", True)
    assert set(lk.scan("ratios").collect()["policy_version"]) == {2}
    folder = next((tmp_path / "run" / "checkpoints").glob("step-00000002*"))
    assert rescore(lk, str(folder)).present == by_step.scored
    newest = rescore(lk, "cloned")
    assert newest.checkpoint == "cloned@4"
    assert newest.weights_sha256 != by_step.weights_sha256
    for run_path in (tmp_path / "run", tmp_path / "run" / "final"):
        final = rescore(lk, str(run_path))
        assert (final.weights_sha256, final.present) == (newest.weights_sha256, newest.scored)
        assert final.checkpoint == "cloned@4"
        assert "'cloned@4' already; the name 'cloned@final' " in final.notes[0]
    for part in folder.iterdir():
        part.unlink()
    folder.rmdir()
    with pytest.raises(CheckpointError, match="no longer exists"):
        rescore(lk, "cloned@2")


# ---------------------------------------------------------------- the command


def run(*arguments: object) -> Any:
    return CliRunner().invoke(trajlake, [str(argument) for argument in arguments])


def test_the_command_prints_the_mismatch(lk: Lake, models: Path) -> None:
    done = run("rescore", models / "e", "--lake", lk.uri, "--format", "json", "--where", "task_id = 'game0'")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert row["run_id"] == "games"
    assert row["episodes"] == 4
    assert 0 < row["mean_abs"] < 1
    assert "e (series " in done.stderr
    assert "actions scored, 0 already there" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--where", "nonsense = 1"], "is not a predicate"),
        (["--where", "false"], "no episode satisfies"),
        (["--token-budget", "0"], "token_budget"),
        (["--max-length", "3"], "nothing remains"),
    ],
)
def test_mistakes_are_told(lk: Lake, models: Path, arguments: list[str], fragment: str) -> None:
    done = run("rescore", models / "e", "--lake", lk.uri, *arguments)
    assert done.exit_code != 0
    assert fragment in str(done.exception or done.output)


def test_rows_that_two_jobs_rendered_count_once(tmp_path: Path) -> None:
    lk = build_lake(tmp_path / "lake")
    command = run("init-model", "--lake", lk.uri, "--out", tmp_path / "m", "--hidden-size", 32, "--vocabulary", 300)
    assert command.exit_code == 0, command.output
    where = {"where": "task_id = 'mixed' AND collection_round = 0"}
    report = rescore(lk, str(tmp_path / "m"), options=where)
    before = lk.sql("SELECT * FROM mismatch").to_dicts()
    assert before[0]["steps"] == before[0]["unknown_steps"] == report.scored
    with lk.job(kind="render") as job:
        job.write("tokens", lk.scan("tokens").collect().drop("write_id"))
    assert lk.scan("tokens").collect().height == 2 * report.scored
    assert lk.sql("SELECT * FROM mismatch").to_dicts() == before
    assert rescore(lk, str(tmp_path / "m"), options=where).scored == 0
