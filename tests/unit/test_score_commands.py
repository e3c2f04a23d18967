"""`trajlake score`: what it prints, where, and how a user's mistake looks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lake import Lake
from lake.errors import TrajlakeError, UsageError
from pipelines.score.commands import _print_report, score
from pipelines.score.functions import ScoreConfig, make_scorer
from pipelines.score.job import run_score
from pipelines.score.rows import ScoredEpisodes
from pipelines.score.sandbox.worker import NO_NETWORK
from testkit.command_line import runner
from testkit.score_lakes import conversations, module, score_rows
from testkit.wording import Wording

WORDS = """
@reward_function
def words(messages, words: int = 2, **kwargs):
    if kwargs["rollout_index"] == 1:
        raise ValueError("odd one")
    outputs = [StepOutput(step_index=99, base_reward=1.0), StepOutput(step_index=0, base_reward=2.0)]
    return EvaluateResult(score=float(words), step_outputs=outputs)
"""


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return conversations(tmp_path / "lake", 2, 3)


def run(lk: Lake, *args: Any) -> Result:
    return CliRunner().invoke(score, [*map(str, args), "--lake", lk.uri], catch_exceptions=False)


def refused(lk: Lake, *args: Any) -> str:
    with pytest.raises(TrajlakeError) as error:
        run(lk, *args)
    return str(error.value)


def test_a_run_is_summed_up_and_its_faults_are_told(lk: Lake, tmp_path: Path, wording: Wording) -> None:
    target = f"{module(tmp_path, WORDS)}:words"
    command = run(lk, target, "--arg", "words=5", "--default-step-reward", "0.5", "--set", "commit_episodes=4")
    assert command.exit_code == 0
    first, second, third = command.stdout.splitlines()
    assert first.startswith("scorer words@")
    assert second.startswith("6 episodes scored in ")
    assert second.endswith(" s: 4 with a score, 0 without, 6 with errors; 12 steps; 0 were scored before")
    assert third.startswith("jobs ")
    lines = command.stderr.splitlines()
    assert any(line.startswith("4 step outputs match ") for line in lines)
    assert sum("odd one" in line for line in lines) == 2
    assert wording(lines[-1]).startswith("--retry-failed ")
    rows = score_rows(lk, "value, step_index", "rollout_index = 0 AND task_id = 't0'")
    assert [row["value"] for row in rows] == [5.0, 2.0, 0.5, 0.5]
    again = run(lk, target, "--arg", "words=5", "--default-step-reward", "0.5")
    assert again.stdout.splitlines()[1] == "nothing to do: 6 of 6 episodes have been scored"
    assert "--retry-failed scores the 6 " in wording(again.stderr)


def test_what_a_function_prints_is_shown_and_steers_no_terminal(lk: Lake, tmp_path: Path) -> None:
    text = "def f(messages):\n    print('see', len(messages), '\\x1b[31m')\n    return 0.5\n"
    command = run(lk, f"{module(tmp_path, text)}:f", "--where", "task_id = 't0'")
    first, *rest = command.stderr.splitlines()
    assert first == "the function printed:"
    assert [line.startswith("see 7 ") for line in rest] == [True] * 3
    assert "\x1b" not in command.stderr


def test_options_come_from_a_file_then_from_the_line(lk: Lake, tmp_path: Path) -> None:
    config = tmp_path / "trajlake.toml"
    config.write_text(
        '[score]\nname = "filed"\ndefault_step_reward = 0.25\narguments = {words = 7, other = 1}\n'
        "[score.limits]\nworkers = 1\nrows_per_batch = 3\n"
    )
    target = f"{module(tmp_path, WORDS)}:words"
    assert run(lk, target, "--config", config, "--arg", "words=8").exit_code == 0
    (row, *_) = score_rows(lk, "value, scorer", "rollout_index = 0")
    assert (row["value"], row["scorer"]) == (8.0, "filed")
    (parameters,) = lk.sql("SELECT DISTINCT parameters FROM job_runs WHERE kind = 'score'")["parameters"]
    assert '"arguments":{"words":8,"other":1}' in parameters


def test_a_built_in_scorer_is_run_by_its_name(lk: Lake) -> None:
    command = run(lk, "env_return", "--arg", "source=rewards", "--where", "task_id = 't0'")
    assert "3 episodes scored" in command.stdout
    assert [row["value"] for row in score_rows(lk)] == [3.0, 3.0, 3.0]


def test_a_reward_is_composed_from_a_file(lk: Lake, tmp_path: Path) -> None:
    config = tmp_path / "rewards.toml"
    config.write_text('[reward.mine]\ncomponents = [{scorer = "env_return", weight = 2.0}]\n')
    run(lk, "env_return")
    command = run(lk, "--reward", "mine", "--config", config)
    assert command.stdout.splitlines()[0].startswith("reward mine@")
    assert [row["value"] for row in score_rows(lk, "value", "s.scorer = 'mine'")] == [0.0, 2.0, 0.0] * 2
    again = run(lk, "--reward", "mine", "--config", config)
    assert "6 unchanged" in again.stdout


def test_a_reward_of_steps_without_a_scored_step_is_told(lk: Lake, tmp_path: Path, wording: Wording) -> None:
    config = tmp_path / "rewards.toml"
    config.write_text('[reward.mine]\nlevel = "both"\ncomponents = [{scorer = "env_return", of = "same"}]\n')
    run(lk, "env_return")
    command = run(lk, "--reward", "mine", "--config", config)
    assert 'level is "both"' in wording(command.stderr)
    assert run(lk, "--reward", "mine", "--config", config).stderr == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no TARGET; give module.py:function, a built-in scorer, or --reward NAME --config FILE"),
        (("env_return", "--reward", "r"), "give env_return or --reward r, not both"),
        (("--reward", "r"), r"--reward r needs --config FILE, a TOML file with the section \[reward.r\]"),
        (("env_retrun",), "'env_retrun' is not a scorer; valid: module.py:function, or one of "),
        (("gone.py:f",), "gone.py: No such file or directory; give the path of a Python file"),
        (("gone.py",), "gone.py: No such file or directory"),
        (("env_return", "--set", "batch_size=0"), r"\[score\]: `batch_size` is 0; valid: 1 or more$"),
        (("env_return", "--set", "batchsize=1"), "there is no option `batchsize`"),
        (("env_return", "--set", "limits.workers"), "is not a setting; write KEY=VALUE"),
        (("env_return", "--config", "gone.toml"), "gone.toml: No such file or directory"),
        (("env_return", "--where", "true) UNION SELECT 1"), "is not a predicate over `episodes`|one SQL expression"),
    ],
)
def test_a_users_mistake_is_one_sentence(args: tuple[str, ...], message: str, lk: Lake) -> None:
    with pytest.raises(UsageError, match=message):
        run(lk, *args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(messages): ...", "has no function `f`. Its functions: other"),
        ("def f(:", "rewards.py, line 2: "),
        ("f = 3", "`f`"),
    ],
)
def test_a_file_that_cannot_be_used_is_told(text: str, message: str, lk: Lake, tmp_path: Path) -> None:
    assert message in refused(lk, f"{module(tmp_path, text)}:f")
    assert lk.sql("SELECT count(*) FROM jobs WHERE kind = 'score'").item() == 0


def test_a_judge_needs_consent(lk: Lake, tmp_path: Path, wording: Wording) -> None:
    text = "@reward_function(requires_network=True)\ndef f(messages): return 0.5\n"
    target = f"{module(tmp_path, text)}:f"
    fault = refused(lk, target)
    assert wording(fault).startswith("rewards.py:f requires the network")
    assert "--allow-network, or allow_network = true" in fault
    assert "6 with a score" in run(lk, target, "--allow-network").stdout
    assert {row["isolation"] for row in score_rows(lk, "isolation")} == {"none"}


# ---------------------------------------------------------------- said before, and said at the end


def test_what_may_not_be_meant_is_said_before_anything_runs(lk: Lake, tmp_path: Path, wording: Wording) -> None:
    target = f"{module(tmp_path, WORDS)}:words"
    command = run(lk, target, "--arg", "nope=1", "--allow-network", "--set", "batch_size=3", "--set", "concurrency=2")
    first, *rest = command.stderr.splitlines()
    assert first.startswith("argument `nope` is ")
    assert "`words`: it goes" in first
    assert "**kwargs" in first
    for line, option in zip(rest, ("batch_size", "allow_network", "concurrency"), strict=False):
        assert wording(line).startswith(f"{option} has no effect: ")
    built_in = run(lk, "env_return", "--allow-network", "--set", "batch_size=3", "--set", "commit_episodes=2")
    for line, option in zip(built_in.stderr.splitlines(), ("allow_network", "batch_size"), strict=False):
        assert wording(line).startswith(f"{option} has no effect ")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ((), "`f` needs argument `threshold`: .* add --arg threshold="),
        (("--arg", "threshold=1", "--arg", "x=1"), "`f` takes no argument `x`, and has no"),
        (("--arg", "messages=1"), "argument `messages` of `f` comes from the lake"),
        (("--name", "../../x"), r"`name` is '../../x'; valid: letters, digits, `_`, `\.` and `-`"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused_before_anything_runs(
    flag: tuple[str, ...], message: str, lk: Lake, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        run(lk, f"{module(tmp_path, 'def f(messages, *, threshold): return threshold')}:f", *flag)
    assert lk.sql("SELECT count(*) FROM jobs WHERE kind = 'score'").item() == 0


def test_a_run_in_which_every_call_failed_ends_with_the_most_frequent_reason(
    lk: Lake, tmp_path: Path, wording: Wording
) -> None:
    text = "def f(messages, rollout_index):\n    return None if rollout_index else 1 / 0\n"
    target = f"{module(tmp_path, text)}:f"
    command = run(lk, target)
    assert command.exit_code == 1
    assert "0 with a score, 0 without, 6 with errors; 0 steps" in command.stdout
    last = wording(command.stderr.splitlines()[-1])
    assert "6 of 6 failed, most often (4) " in last
    assert "TypeError: `f` returned None" in last
    assert "EvaluateResult(score=None, reason=" in last
    again = run(lk, target)
    assert again.exit_code == 0, "nothing ran"
    assert "--retry-failed scores the 6 " in again.stderr
    assert run(lk, target, "--retry-failed").exit_code == 1


@pytest.mark.parametrize("expression", ["step_outputs=[StepOutput(0, 1.0)]", "score=1.0"])
def test_a_run_with_some_value_does_not_end_in_vain(expression: str, lk: Lake, tmp_path: Path) -> None:
    text = (
        '@reward_function(step_index="step")\ndef f(messages, rollout_index):\n'
        f"    return EvaluateResult({expression}) if rollout_index else 1 / 0\n"
    )
    command = run(lk, f"{module(tmp_path, text)}:f")
    assert "2 with errors" in command.stdout
    assert command.exit_code == 0


def test_what_does_not_apply_is_no_error_and_is_counted_with_its_reason(lk: Lake, tmp_path: Path) -> None:
    text = "def f(messages):\n    return {'score': None, 'reason': 'no tool was called'}\n"
    for target, reason in ((f"{module(tmp_path, text)}:f", "no tool was called"), ("voting", "no vote is recorded")):
        command = run(lk, target)
        assert command.exit_code == 0
        assert "0 with a score, 6 without, 0 with errors" in command.stdout
        assert command.stderr == f"  6 without a score: {reason}\n"


def test_a_socket_in_the_sandbox_is_told_how_to_be_allowed(lk: Lake, tmp_path: Path) -> None:
    text = "import socket\ndef f(messages):\n    socket.create_connection(('127.0.0.1', 9))\n"
    command = run(lk, f"{module(tmp_path, text)}:f")
    assert command.exit_code == 1
    assert "(rewards.py, line " in command.stderr.splitlines()[-1]
    assert command.stderr.splitlines()[-1].endswith(NO_NETWORK)


def test_a_reward_that_is_unknown_everywhere_says_why(lk: Lake, tmp_path: Path, wording: Wording) -> None:
    config = tmp_path / "rewards.toml"
    config.write_text('[reward.r]\ncomponents = ["env_return"]\nsql = "env_return / 0"\n')
    run(lk, "env_return")
    command = run(lk, "--reward", "r", "--config", config)
    assert command.exit_code == 1
    assert command.stdout.splitlines()[1] == "6 episodes: 0 known, 6 unknown, 0 unchanged"
    first, last = command.stderr.splitlines()
    assert wording(first).startswith("  6 without a reward: ")
    assert wording(last).startswith("reward r is unknown everywhere, most often (6) ")
    assert "no finite number" in first
    assert "no finite number" in last
    assert run(lk, "--reward", "r", "--config", config).exit_code == 0, "nothing was computed"


def test_episodes_and_steps_of_a_reward_are_counted_apart(lk: Lake, tmp_path: Path) -> None:
    config = tmp_path / "rewards.toml"
    components = '[{scorer = "env_return", of = "episode"}, "walk"]'
    config.write_text(f'[reward.r]\ncomponents = {components}\nlevel = "both"\n')
    text = (
        '@reward_function(step_index="step")\ndef walk(messages, rollout_index):\n'
        "    outputs = [StepOutput(0, 1.0), StepOutput(1, None)]\n"
        "    return EvaluateResult(score=1.0 if rollout_index else None, reason='lone', step_outputs=outputs)\n"
    )
    run(lk, "env_return")
    run(lk, f"{module(tmp_path, text)}:walk")
    command = run(lk, "--reward", "r", "--config", config)
    assert command.stdout.splitlines()[1] == "6 episodes: 4 known, 2 unknown, 0 unchanged; 12 steps: 6 known, 6 unknown"
    assert command.stderr == "  2 without a reward: unknown: walk (lone)\n"
    assert command.exit_code == 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--name", "x"),
        ("--arg", "a=1"),
        ("--set", "batch_size=2"),
        ("--default-step-reward", "0.0"),
        ("--retry-failed",),
        ("--allow-network",),
    ],
)
def test_what_a_reward_does_not_heed_is_refused(flags: tuple[str, ...], lk: Lake) -> None:
    with pytest.raises(UsageError, match=f"effect on a reward: {flags[0]};"):
        run(lk, "--reward", "r", "--config", "r.toml", *flags)


def test_a_failure_of_the_machine_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = runner(monkeypatch, capsys)("score", "x.py:f", "--lake", tmp_path / "no")
    assert done.code == 1
    assert done.err.startswith("trajlake: ")
    assert "Traceback" not in done.err


def test_an_error_is_one_line_however_long_the_function_talks(lk: Lake, tmp_path: Path) -> None:
    text = "def f(messages, rollout_index, **_):\n    raise ValueError('one\\ntwo\\x1b' + ' word' * 400)\n"
    command = run(lk, f"{module(tmp_path, text)}:f")
    assert command.exit_code == 1
    lines = [line for line in command.stderr.splitlines() if "ValueError" in line]
    assert len(lines) == 6, "five episodes, and the reason of the status"
    assert all("one two" in line and len(line) < 450 for line in lines)
    assert len(command.stderr.splitlines()) == 7
    assert "\x1b" not in command.stderr
    (row, *_) = score_rows(lk, "s.error")
    assert "one\ntwo" in row["error"], "the table has it as it was"


def test_a_run_that_wrote_nothing_names_no_jobs(lk: Lake, tmp_path: Path) -> None:
    """Another run has scored all of it in the meantime."""
    code = tmp_path / "code"
    text = "def f(messages, rollout_index, **_):\n    return float(rollout_index)\n"
    target = f"{module(code, text)}:f"
    work = make_scorer(target, ScoreConfig())

    class Overtaken:
        def __getattr__(self, name: str) -> Any:
            return getattr(work, name)

        def score(self, *arguments: Any) -> Iterator[ScoredEpisodes]:
            run_score(lk, target)
            yield from work.score(*arguments)

    report = run_score(lk, Overtaken())  # type: ignore[arg-type]
    assert (report.scored, report.overtaken, report.job_ids, report.made_current) == (0, 6, [], False)
    with CliRunner().isolation() as (out, *_):
        _print_report(report)
        assert b"jobs" not in out.getvalue()
