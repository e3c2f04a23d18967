"""Training killed with SIGKILL at random moments and resumed: the same weights, and no episode counted twice.

On a small lake of our own; in the slow suite on tau-bench trajectories, where they are. Real processes, real kills;
what a killed attempt left behind may be anything.
"""

import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lake
from lake.write.ingest import ingest
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.commands import Command
from testkit.lakes import add_credit, build_lake
from testkit.processes import COMMAND, environment
from testkit.shared import shared_data
from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model


@dataclass(frozen=True)
class World:
    """A lake with credit, a model, what to train, and how the undisturbed run ended."""

    folder: Path
    options: tuple[str, ...]
    threads: int
    hash_line: str = ""
    batches: tuple[tuple[Any, ...], ...] = ()

    @property
    def steps(self) -> int:
        return 1 + max(row[0] for row in self.batches)

    def training(self, out: Path, *extra: str) -> subprocess.Popen[str]:
        arguments = ["train", "--lake", self.folder / "lake", "--out", out, *self.options, *extra]
        own = environment(OMP_NUM_THREADS=str(self.threads))
        if self.threads == 1:
            return Command(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own)
        # Torch reads how many it has when it is imported, which a forked command's server has done with one.
        words = [*COMMAND, *map(str, arguments)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own)


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def batches(folder: Path, run_id: str) -> tuple[tuple[Any, ...], ...]:
    """What the view says each optimizer step saw."""
    query = """
        SELECT optimizer_step, episode_id, first_step, last_step, action_tokens, epoch
        FROM trained_batches JOIN job_runs USING (job_id) WHERE run_id = ? ORDER BY ALL
    """
    return tuple(lake.open(folder / "lake").sql(query, [run_id]).rows())


def build(folder: Path, threads: int, tasks: int) -> World:
    if tasks == 0:
        lk = build_lake(folder / "lake")
        add_credit(lk)
        options = ["--epochs", "12", "--set", "episodes_per_step=3", "--set", "checkpoint_every=7"]
    else:
        data = shared_data("tau_bench", "gpt-4o-airline.json")
        lk = lake.open(folder / "lake", create=True)
        ingest(lk, data)
        run_credit(lk, GiGPO(step_source="terminal_score"))
        where = f"CAST(task_id AS INT) < {tasks} AND rollout_index < 3"
        options = ["--where", where, "--set", "max_length=1800"]
        options += ["--set", "episodes_per_step=1", "--set", "checkpoint_every=3"]
    shape = {} if tasks else {"vocabulary": 300, "hidden_size": 32}
    make_tiny_model(lk.snapshot(), folder / "model", TinyModelConfig.model_validate(shape))
    options += ["--model", str(folder / "model"), "--loss", "awr"]
    world = World(folder, tuple(options), threads)
    line = finished(world.training(folder / "straight")).splitlines()[-1]
    return World(folder, world.options, threads, line, batches(folder, "straight"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    """The world of a number of threads, and of tasks of tau-bench or none of them; made once."""
    return cache(lambda threads, tasks: build(tmp_path_factory.mktemp(f"kill-{threads}"), threads, tasks))


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
        pause = rng.uniform(0, 1) if lines == 0 else rng.uniform(0, 0.2)
        process = world.training(out, "--resume")
        kills += kill_after(process, out / "metrics.jsonl", lines, pause)
    assert kills >= 1
    resumed = finished(world.training(out, "--resume"))
    assert resumed.splitlines()[-1] == world.hash_line
    assert batches(world.folder, out.name) == world.batches


@pytest.mark.parametrize("seed", [5])
def test_a_killed_run_ends_with_the_same_weights(world: Callable[..., World], seed: int) -> None:
    """Killed once in the run; killed in the run and again while it starts."""
    small = world(threads=1, tasks=0)
    kill_and_compare(small, small.folder / f"killed-{seed}", seed)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_killed_run_ends_with_the_same_weights_whenever_it_is_killed(
    world: Callable[..., World], threads: int, seed: int
) -> None:
    large = world(threads=threads, tasks=10)
    kill_and_compare(large, large.folder / f"killed-{seed}", seed)
