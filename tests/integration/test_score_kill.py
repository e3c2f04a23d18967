"""Real processes: a score run that is killed goes on where it was, and two at once show no score twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lake import Lake
from testkit.processes import environment
from testkit.score_lakes import conversations, module

SCORE = [sys.executable, "-c", "from pipelines.score.commands import score; score()"]
SLOW = """
import time
@reward_function
def slow(messages, rollout_index, **kwargs):
    time.sleep(0.02)
    return EvaluateResult(score=float(rollout_index), step_outputs=[StepOutput(step_index=0, base_reward=1.0)])
"""


def start(lk: Lake, target: str, *more: str) -> subprocess.Popen[str]:
    limits = '{"rows_per_batch": 2}'
    options = ["--set", "commit_episodes=6", "--set", f"limits={limits}", *more]
    return subprocess.Popen(
        [*SCORE, target, "--lake", lk.uri, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
        start_new_session=True,
    )


def one_score_each(lk: Lake, episodes: int) -> None:
    rows = lk.sql("SELECT episode_id, step_index, job_id FROM scores")
    assert len(rows) == 2 * episodes
    assert rows.select("episode_id", "step_index").n_unique() == 2 * episodes
    assert rows.select("episode_id", "job_id").n_unique() == episodes, "an episode's rows come from one job"


@pytest.mark.parametrize("lines", [1, 3])
def test_a_killed_run_loses_what_was_not_committed_and_nothing_else(lines: int, tmp_path: Path) -> None:
    lk = conversations(tmp_path / "lake", 20, 3, turns=2)
    target = f"{module(tmp_path / 'code', SLOW)}:slow"
    run = start(lk, target)
    assert run.stderr is not None
    told = [run.stderr.readline() for _ in range(lines)]
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    run.stderr.close()
    assert run.stdout is not None
    run.stdout.close()
    assert told[-1].startswith(f"{6 * lines} of 60 episodes scored, 0 with errors")
    before = lk.sql("SELECT episode_id, job_id FROM scores WHERE step_index IS NULL")
    assert 6 * lines <= len(before) < 60
    assert len(before) % 6 == 0
    again = start(lk, target)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert f"{60 - len(before)} episodes scored" in out
    assert f"{len(before)} had their score" in out
    one_score_each(lk, 60)
    kept = lk.sql("SELECT episode_id, job_id FROM scores WHERE step_index IS NULL")
    assert set(before.rows()) <= set(kept.rows()), "what was committed was not scored again"


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    lk = conversations(tmp_path / "lake", 20, 3, turns=2)
    target = f"{module(tmp_path / 'code', SLOW)}:slow"
    run = start(lk, target, "--set", "commit_episodes=30", "--set", "commit_seconds=600")
    assert run.stderr is not None
    assert run.stderr.readline().startswith("30 of 60 episodes scored")
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode != 0
    assert lk.sql("SELECT count(DISTINCT episode_id) FROM scores").item() >= 30
    out, err = start(lk, target).communicate(timeout=120)
    assert "episodes scored" in out, err
    one_score_each(lk, 60)


def test_two_runs_at_once_show_no_score_twice(tmp_path: Path) -> None:
    lk = conversations(tmp_path / "lake", 12, 3, turns=2)
    target = f"{module(tmp_path / 'code', SLOW)}:slow"
    runs = [start(lk, target), start(lk, target)]
    told = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told
    one_score_each(lk, 36)
