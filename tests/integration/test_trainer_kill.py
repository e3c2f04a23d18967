"""Training killed with SIGKILL at random moments and resumed: the same weights, and no episode counted twice.

On the tau-bench trajectories where they are (the issue's acceptance), else on a small lake of our own. Real processes,
real kills; what a killed attempt left behind is whatever it left.
"""

import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lake
from testkit.lakes import add_credit, build_lake
from testkit.shared import shared_data

MAIN = "from lake.cli import main; main()"


@dataclass(frozen=True)
class World:
    """A lake with credit, a model, what to train, and how the undisturbed run ended."""

    folder: Path
    options: tuple[str, ...]
    hash_line: str
    steps: int
    batches: list[tuple[Any, ...]]


def trajlake(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def training(world_folder: Path, options: tuple[str, ...], out: Path, *extra: str) -> subprocess.Popen[str]:
    return trajlake("train", "--lake", world_folder / "lake", "--out", out, *options, *extra)


def batches(folder: Path, run_id: str) -> list[tuple[Any, ...]]:
    """What the view says each optimizer step saw."""
    query = """
        SELECT optimizer_step, episode_id, first_step, last_step, action_tokens, epoch
        FROM trained_batches JOIN job_runs USING (job_id) WHERE run_id = ? ORDER BY ALL
    """
    return lake.open(folder / "lake").sql(query, [run_id]).rows()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("kill")
    try:
        data = shared_data("tau_bench", "gpt-4o-airline.json")
    except pytest.skip.Exception:
        add_credit(build_lake(folder / "lake"))
        options = ["--epochs", "30", "--episodes-per-step", "3", "--checkpoint-every", "7"]
    else:
        finished(trajlake("ingest", data, "--lake", folder / "lake"))
        finished(trajlake("credit", "gigpo", "--lake", folder / "lake"))
        where = "CAST(task_id AS INT) < 10 AND rollout_index < 3"
        options = ["--where", where, "--max-length", "1800", "--episodes-per-step", "1", "--checkpoint-every", "3"]
    finished(trajlake("init-model", "--lake", folder / "lake", "--out", folder / "model"))
    options += ["--model", str(folder / "model"), "--loss", "awr"]
    line = finished(training(folder, tuple(options), folder / "straight")).splitlines()[-1]
    seen = batches(folder, "straight")
    return World(folder, tuple(options), line, 1 + max(row[0] for row in seen), seen)


def kill_after(process: subprocess.Popen[str], log: Path, lines: int, pause: float) -> bool:
    """Kill a process a moment after its log has grown by some lines; whether it was still alive."""
    before = len(log.read_text().splitlines()) if log.exists() else 0
    while process.poll() is None:
        if lines == 0 or (log.exists() and len(log.read_text().splitlines()) >= before + lines):
            time.sleep(pause)
            break
        time.sleep(0.002)
    process.kill()
    process.communicate()
    return process.returncode == -9


def kill_and_compare(world: World, out: Path, seed: int) -> None:
    rng = random.Random(seed)
    kills = 0
    for number in range(rng.choice([1, 1, 2, 3])):
        # The first kill falls into the run; later ones anywhere, also into start-up, the last checkpoint or the export.
        lines = rng.randint(1, world.steps // 2) if number == 0 else rng.choice([0, rng.randint(1, world.steps // 2)])
        pause = rng.uniform(0, 3) if lines == 0 else rng.uniform(0, 0.2)
        process = training(world.folder, world.options, out, "--resume")
        kills += kill_after(process, out / "metrics.jsonl", lines, pause)
    assert kills >= 1
    resumed = finished(training(world.folder, world.options, out, "--resume"))
    assert resumed.splitlines()[-1] == world.hash_line
    assert batches(world.folder, out.name) == world.batches


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_ends_with_the_same_weights(world: World, seed: int) -> None:
    kill_and_compare(world, world.folder / f"killed-{seed}", seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_killed_run_ends_with_the_same_weights_whenever_it_is_killed(world: World, seed: int) -> None:
    kill_and_compare(world, world.folder / f"killed-{seed}", seed)
