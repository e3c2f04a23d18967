"""A loop that was stopped, whose folder someone changed in the meantime; and what the command says about such
things."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from lake.cli import trajlake
from testkit.examples import mostly_slow
from testkit.loops import looped, write_config
from testkit.word_game import save_model
from trainer.online.commands import _print_result
from trainer.online.loop import LoopResult
from trainer.online.rollouts import EvaluationScores
from trainer.online.settings import OnlineConfig, read_config

GIVEN = {"loop": {"rounds": 2, "collect": {"groups": 2}}}


class StopsAfterTheFirstRound(list[str]):
    """What a run says, to someone who then presses Ctrl-C."""

    def append(self, line: str) -> None:
        if line.startswith("round 1/"):
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OnlineConfig]:
    """The folder of a run of two rounds that was stopped after the first one, and its document."""
    folder = tmp_path_factory.mktemp("stopped")
    config = read_config(str(write_config(folder, save_model(folder / "random"))), GIVEN)
    config = config.model_copy(update={"loop": config.loop.model_copy(update={"evaluation": None})})
    with pytest.raises(KeyboardInterrupt):
        looped(folder, config, lines=StopsAfterTheFirstRound())
    return folder, config


def exchanged(version: Path) -> None:
    shutil.copy(version.parents[2] / "random" / "model.safetensors", version / "model.safetensors")


def cut_off(version: Path) -> None:
    (version / "model.safetensors").write_bytes(b"short")


@pytest.mark.parametrize("damage", mostly_slow([shutil.rmtree, exchanged, cut_off], exchanged))
def test_a_resumed_run_plays_the_weights_of_its_checkpoint(
    tmp_path: Path, stopped: tuple[Path, OnlineConfig], damage: Callable[[Path], None]
) -> None:
    """What lies in the folder that players read: rows would name weights that did not play."""
    folder, config = stopped
    shutil.copytree(folder, tmp_path / "copy")
    version = tmp_path / "copy" / "out" / "versions" / "v1"
    weights = (version / "model.safetensors").read_bytes()
    damage(version)
    copy_of_ours = version.with_name("v0.old")
    copy_of_ours.mkdir()
    assert looped(tmp_path / "copy", config, resumes=True).rounds == 2
    assert (version / "model.safetensors").read_bytes() == weights
    assert copy_of_ours.is_dir()


INTERRUPTED = """
from testkit.word_game import Asking

made = []


def make(split="train"):
    made.append(split)
    if len(made) > 2:  # one to look at it, for rounds and for evaluations
        raise KeyboardInterrupt
    return Asking(split)
"""


def test_an_interrupt_says_how_the_run_goes_on_wherever_it_comes(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(INTERRUPTED)
    config = write_config(tmp_path, save_model(tmp_path / "random"))
    words = ["loop", "--config", config, "--out", tmp_path / "out", "--lake", tmp_path / "lake"]
    done = CliRunner().invoke(trajlake, [*map(str, words), "--set", f"loop.collect.player.env={tmp_path}/env.py:make"])
    assert done.exit_code == 1
    assert "with --resume continues" in done.stderr


def test_the_best_version_is_not_said_to_be_where_it_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluations = {0: EvaluationScores(success=0.5, score=0.5, attempts=2, unscored=0)}
    done = LoopResult(1, 1, "rounds", evaluations, 0, "digest", tmp_path / "final")
    _print_result(done)
    assert f"and {tmp_path / 'best'} is gone" in capsys.readouterr().out
    (tmp_path / "best").mkdir()
    _print_result(done)
    assert f"in {tmp_path / 'best'}" in capsys.readouterr().out
