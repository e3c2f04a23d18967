"""An edit that is taken back: the version that was scored last counts, although all its episodes have been scored."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lake import Lake
from lake.judgements.scores import read_current_versions, read_episode_scores
from pipelines.credit.estimators import find_estimator
from pipelines.credit.job import run_credit
from pipelines.score.commands import score
from pipelines.score.job import confirm_version, run_score
from pipelines.score.rewards import RewardDefinition, run_reward
from pipelines.score.scorers import SCORERS
from testkit.processes import environment
from testkit.score_lakes import InProcess, conversations, module
from trainer.evaluation.success import read_attempts

PLUS = "def f(messages, rollout_index, **kwargs):\n    return float(rollout_index)\n"
MINUS = PLUS.replace("float(", "-float(")


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return conversations(tmp_path / "lake", 2, 3, turns=2)


def run(lk: Lake, *args: Any) -> Result:
    command = CliRunner().invoke(score, [*map(str, args), "--lake", lk.uri], catch_exceptions=False)
    assert command.exit_code == 0, command.stderr
    return command


def version_of(text: str) -> str:
    return text.split()[1].partition("@")[2]


def current(lk: Lake, scorer: str) -> tuple[str, list[float]]:
    rows = lk.sql("SELECT scorer_version, value FROM current_scores WHERE scorer = ? ORDER BY value", [scorer])
    (version,) = set(rows["scorer_version"])
    return version, rows["value"].to_list()


def jobs(lk: Lake) -> int:
    count: int = lk.sql("SELECT count(*) FROM job_runs").item()
    return count


def in_process(lk: Lake, version: str, value: float, name: str = "s", **options: Any) -> bool:
    work = InProcess(lambda rollouts: [value] * len(rollouts), name=name, version=version)
    return run_score(lk, work, **options).made_current


def test_what_was_scored_last_counts_after_a_revert(lk: Lake, tmp_path: Path) -> None:
    target = f"{module(tmp_path / 'code', PLUS)}:f"
    first = version_of(run(lk, target).stdout)
    module(tmp_path / "code", MINUS)
    second = version_of(run(lk, target).stdout)
    assert current(lk, "f") == (second, [-2.0, -2.0, -1.0, -1.0, 0.0, 0.0])
    module(tmp_path / "code", PLUS)
    first_report = run(lk, target)
    assert first_report.stdout == f"scorer f@{first}\nnothing to do: 6 of 6 episodes have been scored\n"
    assert first_report.stderr == f"f@{first} is current again\n"
    assert current(lk, "f") == (first, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    report = run_credit(lk, find_estimator("dr_grpo")(), score="f")
    assert report.scorer_versions == {"f": first}
    before = jobs(lk)
    assert run(lk, target).stderr == ""
    assert jobs(lk) == before, "the second time there is nothing to say"
    assert lk.sql("SELECT count(*) FROM scores").item() == 12


def test_a_part_of_the_episodes_makes_current_too_and_what_is_pending_needs_no_word(lk: Lake) -> None:
    assert not in_process(lk, "1", 1.0, where="task_id = 't0'")
    assert not in_process(lk, "2", 2.0)
    assert in_process(lk, "1", 1.0, where="task_id = 't0'")
    assert read_current_versions(lk.snapshot()) == {"s": "1"}
    assert not in_process(lk, "1", 1.0), "its three new scores are what makes it current, or keeps it so"
    assert in_process(lk, "2", 2.0, retry_failed=True), "nothing failed: it is what was asked for last"
    assert read_current_versions(lk.snapshot()) == {"s": "2"}


def test_other_scorers_are_left_alone(lk: Lake) -> None:
    for name in ("s", "other"):
        in_process(lk, "1", 1.0, name)
        in_process(lk, "2", 2.0, name)
    assert in_process(lk, "1", 1.0)
    assert read_current_versions(lk.snapshot()) == {"other": "2", "s": "1"}


@pytest.mark.slow("options that are taken back make their version the current one, as an edit does")
def test_options_of_a_built_in_scorer_go_back_and_forth(lk: Lake) -> None:
    recorded, summed = SCORERS["env_return"](), SCORERS["env_return"].model_validate({"source": "rewards"})
    for scorer, again in ((recorded, False), (summed, False), (recorded, True), (recorded, False), (summed, True)):
        report = run_score(lk, scorer)
        assert report.made_current == again
        assert read_current_versions(lk.snapshot()) == {"env_return": report.version}


def test_a_reward_goes_back_with_its_definition_and_with_its_components(lk: Lake, tmp_path: Path) -> None:
    config = tmp_path / "rewards.toml"

    def rewarded(weight: float) -> Result:
        config.write_text(f'[reward.mine]\ncomponents = [{{scorer = "s", weight = {weight}}}]\n')
        return run(lk, "--reward", "mine", "--config", config)

    in_process(lk, "1", 1.0)
    rewarded(1.0)
    rewarded(5.0)
    assert current(lk, "mine")[1] == [5.0] * 6
    report = rewarded(1.0)
    assert "6 unchanged" in report.stdout
    assert report.stderr == f"mine@{version_of(report.stdout).rstrip(':')} is current again\n"
    assert current(lk, "mine")[1] == [1.0] * 6
    assert rewarded(1.0).stderr == ""
    in_process(lk, "2", 2.0)
    rewarded(1.0)
    assert current(lk, "mine")[1] == [2.0] * 6
    assert in_process(lk, "1", 1.0)
    assert "is current again" in rewarded(1.0).stderr
    assert current(lk, "mine")[1] == [1.0] * 6
    definition = RewardDefinition.model_validate({"name": "mine", "components": ["s"]})
    assert run_reward(lk, definition).components == {"s": "s@1"}


def test_a_version_whose_episodes_are_all_retracted_is_not_confirmed(lk: Lake) -> None:
    in_process(lk, "1", 1.0, where="task_id = 't0'")
    in_process(lk, "2", 2.0)
    lk.retract(lk.sql("SELECT episode_id FROM episodes WHERE task_id = 't0'")["episode_id"].to_list())
    before = jobs(lk)
    assert not confirm_version(lk, "s", "1", kind="score", series={}, parameters={})
    assert not confirm_version(lk, "s", "unheard of", kind="score", series={}, parameters={})
    assert jobs(lk) == before


DIES = """
import os, signal, sys
import lake
from lake.judgements.scores import current_versions, episode_scores
from lake.write.jobs import Job
from pipelines.score.job import run_score
Job._end = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
run_score(lake.open(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow("a run that is killed while it makes a version current is repeated")
def test_a_run_that_is_killed_while_it_confirms_is_repeated(lk: Lake, tmp_path: Path) -> None:
    """Between the job's two rows, in a real process."""
    target = f"{module(tmp_path / 'code', PLUS)}:f"
    first = version_of(run(lk, target).stdout)
    module(tmp_path / "code", MINUS)
    second = version_of(run(lk, target).stdout)
    module(tmp_path / "code", PLUS)
    command = [sys.executable, "-c", DIES, lk.uri, target]
    died = subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert lk.sql("SELECT status FROM job_runs")["status"].to_list().count("started") == 1
    assert current(lk, "f")[0] == second
    assert run(lk, target).stderr == f"f@{first} is current again\n"
    assert current(lk, "f")[0] == first


def test_training_and_evaluation_read_the_version_that_was_scored_last(lk: Lake) -> None:
    """An edit that was taken back: what credit reads is what kto's threshold, a filter and `eval --score` read."""
    in_process(lk, "1", 1.0)
    in_process(lk, "2", 2.0)
    assert in_process(lk, "1", 1.0)
    snapshot = lk.snapshot()
    assert set(read_episode_scores(snapshot, "s")["score"]) == {1.0}
    assert set(read_attempts(snapshot, by="run_id", score="s")["score"]) == {1.0}
    assert set(read_attempts(snapshot, by="run_id", score="s@2")["score"]) == {2.0}
