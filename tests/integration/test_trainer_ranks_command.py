"""`trajlake train --ranks N` as a user runs it: a launcher, real ranks, a rank that dies, and resumption on fewer."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from safetensors.torch import load_file

import lake
from lake import Lake
from testkit.commands import Command, trajlake
from testkit.lakes import build_lake
from testkit.processes import environment
from testkit.wording import Wording
from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model

_PATIENCE = 300


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, list[str]]:
    """A lake, and the options of a run on it that writes a checkpoint after each of its 12 updates."""
    folder = tmp_path_factory.mktemp("world")
    lk = build_lake(folder / "lake")
    make_tiny_model(lk.snapshot(), folder / "model", TinyModelConfig(vocabulary=300, hidden_size=32))
    options = ["--lake", lk.uri, "--model", str(folder / "model"), "--loss", "sft", "--lr", "1e-4", "--epochs", "2"]
    return lk, [*options, "--set", "episodes_per_step=4", "--set", "checkpoint_every=1"]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "final" / "model.safetensors")


def consumed(uri: str, run_id: str) -> list[tuple[Any, ...]]:
    query = "SELECT optimizer_step, episode_id FROM trained_batches JOIN job_runs USING (job_id) WHERE run_id = ?"
    return sorted(lake.open(uri).sql(query, [run_id]).rows())


def children_of(process: int) -> list[int]:
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


@contextmanager
def started(out: Path, options: list[str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher in its own session, and its two ranks, once a checkpoint of theirs counts.

    A checkpoint counts by its row, which is committed after its folder stands and before the next folder does.
    """
    with Command(
        ["train", *options, "--out", str(out), "--ranks", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            deadline = time.monotonic() + _PATIENCE
            while len(list(out.glob("checkpoints/step-*"))) < 2:
                assert launcher.poll() is None, launcher.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield launcher, children_of(launcher.pid)
        finally:
            launcher.kill()


def wait_for_end(processes: list[int]) -> None:
    """Return when none of some processes runs any more; one that no one has asked about yet does not."""
    deadline = time.monotonic() + _PATIENCE
    for process in processes:
        status = Path(f"/proc/{process}/stat")
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {process} lives on"
            time.sleep(0.05)


def test_a_rank_dies_and_the_run_goes_on_without_ranks(
    world: tuple[Lake, list[str]], tmp_path: Path, wording: Wording
) -> None:
    lk, options = world
    whole = trajlake("train", *options, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "out"
    with started(out, options) as (launcher, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        said, complained = launcher.communicate(timeout=_PATIENCE)
    assert launcher.returncode != 0, complained
    assert "rank 1 was ended by SIGKILL" in wording(complained.splitlines()[-1])
    assert "with --resume" in complained
    assert "weights sha256" not in said
    assert not (out / "final").exists()
    resumed = trajlake("train", *options, "--out", out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "written with ranks 2" in resumed.stderr
    assert "continues with 1" in resumed.stderr
    for name, tensor in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(out)[name], tensor, atol=1e-6, rtol=0, msg=name)
    assert consumed(lk.uri, "out") == consumed(lk.uri, "whole")
    assert len(consumed(lk.uri, "out")) == 4 * 12


def test_rank_0_speaks_for_all(world: tuple[Lake, list[str]], tmp_path: Path, wording: Wording) -> None:
    lk, options = world
    options = [*options, "--epochs", "1", "--set", "checkpoint_every=50"]
    done = trajlake("train", *options, "--out", tmp_path / "two", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("weights sha256") == 1
    jobs = lk.sql("SELECT status, count(*) AS n FROM job_runs WHERE run_id = 'two' GROUP BY ALL").rows()
    assert jobs == [("succeeded", 1)]
    assert len((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()) == 6
    again = trajlake("train", *options, "--out", tmp_path / "two", "--ranks", "2")
    assert again.returncode != 0
    assert again.stderr.count("two holds a run already") == 1
    none = trajlake("train", *options, "--out", tmp_path / "none", "--ranks", "0")
    assert "--ranks is 0" in wording(none.stderr)


@pytest.mark.slow
def test_torchrun_goes_on_with_what_our_launcher_began(world: tuple[Lake, list[str]], tmp_path: Path) -> None:
    _, options = world
    done = trajlake("train", *options, "--out", tmp_path / "two", "--ranks", "2")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trainer"]
    command = [*torchrun, "train", *options, "--out", str(tmp_path / "two"), "--resume"]
    finished = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=_PATIENCE, check=False
    )
    assert finished.stdout == done.stdout, finished.stderr


ENDLESS = ["--epochs", "5000", "--set", "checkpoint_every=3", "--set", "keep_last=1"]


def test_no_rank_outlives_its_launcher_and_none_joins_a_living_run(
    world: tuple[Lake, list[str]], tmp_path: Path
) -> None:
    _, options = world
    out = tmp_path / "out"
    with started(out, [*options, *ENDLESS]) as (launcher, ranks):
        beside = trajlake("train", *options, *ENDLESS, "--out", out, "--resume")
        assert beside.returncode == 2
        assert f"process {ranks[0]} trains into {out}" in beside.stderr
        os.kill(launcher.pid, signal.SIGKILL)
        wait_for_end(ranks)


@pytest.mark.slow("Ctrl-C ends ranks as it ends a run without them, and one of them says how to go on")
def test_ctrl_c_ends_all_ranks_and_one_of_them_says_how_to_go_on(world: tuple[Lake, list[str]], tmp_path: Path) -> None:
    _, options = world
    out = tmp_path / "out"
    with started(out, [*options, *ENDLESS]) as (launcher, ranks):
        os.killpg(launcher.pid, signal.SIGINT)
        _, complained = launcher.communicate(timeout=_PATIENCE)
    assert launcher.returncode == 130
    assert complained.count("interrupted") == complained.count(f"--out {out} --resume") == 1
    assert "Traceback" not in complained
    wait_for_end(ranks)


WRONG = ["--set", "loss.unit=x"]


def told_so_often(command: subprocess.CompletedProcess[str], times: int) -> bool:
    return command.stderr.count("`loss.unit` is 'x'") == len(command.stderr.splitlines()) == times


def test_what_is_wrong_is_told_once(world: tuple[Lake, list[str]], tmp_path: Path) -> None:
    """By the launcher, for settings; by rank 0, for data."""
    _, options = world
    out = ["--out", str(tmp_path / "out")]
    wrong = trajlake("train", *options, *out, *WRONG, "--ranks", "2")
    assert (wrong.returncode, told_so_often(wrong, 1)) == (2, True), wrong.stderr
    refused = trajlake("train", *options, *out, "--loss", "ppo", "--ranks", "2")
    assert refused.returncode == 1
    assert refused.stderr.count("ppo refused: ") == 1
    assert "Traceback" not in refused.stderr


@pytest.mark.slow("where torchrun started the ranks, rank 0 alone tells what is wrong with the settings")
def test_what_is_wrong_is_told_by_rank_0_where_torchrun_started_the_ranks(
    world: tuple[Lake, list[str]], tmp_path: Path
) -> None:
    _, options = world
    for number, status, times in ((0, 2, 1), (1, 1, 0)):
        command = rank(number, ["train", *options, "--out", str(tmp_path / "out"), *WRONG])
        assert (command.returncode, told_so_often(command, times)) == (status, True), command.stderr


def rank(number: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """One of two ranks, as torchrun starts it."""
    command = [sys.executable, "-m", "trainer", *arguments]
    own = environment(RANK=str(number), WORLD_SIZE="2")
    return subprocess.run(command, capture_output=True, text=True, env=own, timeout=_PATIENCE, check=False)
