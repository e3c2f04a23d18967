"""`trajlake loop` killed with SIGKILL at random moments and resumed: the rows and the weights of an undisturbed run.

Real processes. In the middle of collecting, of an update, of a commit, of an evaluation: no matter where it is.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

import lake
from testkit.loops import facts, loop_process, looped, write_config
from testkit.word_game import save_model
from trainer.online.settings import read_config

DEADLINE = 900


def commits(folder: Path) -> int:
    """How many commits the tables of a run's lake have."""
    return len(list(folder.glob("lake/*/_delta_log/*.json")))


def killed_and_resumed(folder: Path, config: Path, seed: int, kills: int, total_commits: int, *options: str) -> str:
    """Kill it so often, each time some commits after its start and a moment; let it end. The digest that it prints.

    Args:
        total_commits: commits of a run that no one kills.
    """
    rng = random.Random(seed)
    for _ in range(kills):
        target = commits(folder) + rng.randint(1, max(1, total_commits // (kills + 1)))
        process = loop_process(folder, config, "--resume", *options)
        while commits(folder) < target:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE)
        assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    process = loop_process(folder, config, "--resume", *options)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    return str(out.split()[-1])


def check(tmp_path: Path, kills: int, ahead: int, rounds: int, groups: int) -> None:
    config = write_config(tmp_path, save_model(tmp_path / "random"))
    options = (
        "--set",
        f"loop.ahead={ahead}",
        "--set",
        f"loop.rounds={rounds}",
        "--set",
        f"loop.collect.groups={groups}",
    )
    undisturbed = tmp_path / "undisturbed"
    settings = {"ahead": ahead, "rounds": rounds, "collect": {"groups": groups}}
    done = looped(undisturbed, read_config(str(config), {"loop": settings}))
    digest = killed_and_resumed(tmp_path, config, ahead, kills, commits(undisturbed), *options)
    assert digest == done.weights_sha256
    actual, expected = (facts(lake.open(folder / "lake")) for folder in (tmp_path, undisturbed))
    assert actual == expected
    incomplete = lake.open(tmp_path / "lake").sql(
        "SELECT * FROM job_runs WHERE kind = 'loop' AND status <> 'succeeded'"
    )
    assert incomplete.is_empty()


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path, ahead: int) -> None:
    check(tmp_path, kills=1, ahead=ahead, rounds=2, groups=2)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_twenty_kills(tmp_path: Path, ahead: int) -> None:
    check(tmp_path, kills=20, ahead=ahead, rounds=4, groups=4)
