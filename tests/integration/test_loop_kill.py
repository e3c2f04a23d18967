"""`trajlake loop` killed with SIGKILL at random moments and resumed: the rows and the weights of an undisturbed run.

Real processes. In the middle of collecting, of an update, of a commit, of an evaluation: wherever it is.
"""

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

import lake
from testkit.loops import facts, loop_process, looped, write_config
from testkit.word_game import save_model
from trainer.online.settings import read_config

DEADLINE = 900


def killed_and_resumed(folder: Path, config: Path, seed: int, kills: int, seconds: float, *options: str) -> str:
    """Start it, kill it so often within so many seconds of each start, and let it end; the digest that it prints."""
    rng, left = random.Random(seed), kills
    while True:
        process = loop_process(folder, config, "--resume", *options)
        try:
            out, err = process.communicate(timeout=rng.uniform(0.3, 1.0) * seconds if left else DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=DEADLINE)
            left -= 1
            continue
        assert process.returncode == 0, err
        return out.split()[-1]


def check(tmp_path: Path, kills: int, ahead: int) -> None:
    config = write_config(tmp_path, save_model(tmp_path / "random"))
    options = ("--set", f"loop.ahead={ahead}", "--set", "loop.rounds=5")
    undisturbed = tmp_path / "undisturbed"
    done = looped(undisturbed, read_config(str(config), {"loop": {"ahead": ahead, "rounds": 5}}))
    digest = killed_and_resumed(tmp_path, config, ahead, kills, 12.0, *options)
    assert digest == done.weights_sha256
    found, expected = (facts(lake.open(folder / "lake")) for folder in (tmp_path, undisturbed))
    assert found == expected
    incomplete = lake.open(tmp_path / "lake").sql(
        "SELECT * FROM job_runs WHERE kind = 'loop' AND status <> 'succeeded'"
    )
    assert incomplete.is_empty()


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path, ahead: int) -> None:
    check(tmp_path, 2, ahead)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_twenty_kills(tmp_path: Path, ahead: int) -> None:
    check(tmp_path, 20, ahead)
