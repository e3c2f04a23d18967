"""docs/guides/evaluation.md: its commands on the real data print what it shows, and its other commands are commands."""

import math
import re
import shlex
from typing import Any

import click
import pytest
from click.testing import CliRunner

import lake
from lake import Lake
from lake.cli import trajlake
from lake.statistics import EXACT_TASKS, SAMPLED_PATTERNS, t_quantile, wilson_interval
from lake.write.ingest import ingest
from testkit.shared import CHECKOUT, shared_data
from trainer.evaluation.estimators import all_estimators
from trainer.evaluation.estimators.fitted import MIN_SHARED
from trainer.evaluation.estimators.importance import LEAST_ESS, LEAST_SHARE, MEAN_LEVEL, MIN_MEAN_WEIGHT
from trainer.evaluation.ope import MAX_MISMATCH, ROWS
from trainer.evaluation.rescore import COMMIT_SECONDS

PAGE = (CHECKOUT / "docs" / "guides" / "evaluation.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.+?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
PROSE = " ".join(re.sub(r"^```.+?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL).split())


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = lake.open(tmp_path_factory.mktemp("evaluation") / "lake", create=True)
    ingest(lk, shared_data("tau_bench", "gpt-4o-airline.json"))
    return lk


@pytest.fixture(scope="module")
def printed(lk: Lake, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each `sh` command of the page printed, or its one line of a fault."""
    model = tmp_path_factory.mktemp("model") / "tiny"
    outputs = {}
    for command in (text for kind, text in BLOCKS if kind == "sh"):
        words = [
            str(model) if word == "tiny" and "ope" not in command.split() else word for word in shlex.split(command)
        ]
        done = CliRunner().invoke(trajlake, words[1:], env={"TRAJLAKE_LAKE": lk.uri})
        outputs[command] = done.stdout if done.exit_code == 0 else f"trajlake: {done.exception}"
    return outputs


def alike(first: str, second: str) -> bool:
    if first == second:
        return True
    try:
        return math.isclose(float(first), float(second), rel_tol=2e-5)
    except ValueError:
        return False


def test_commands_print_what_the_page_shows(printed: dict[str, str]) -> None:
    """A `text` block shows the output of the `sh` block before it."""
    command, compared = "", 0
    for kind, text in BLOCKS:
        if kind == "sh":
            command = text
        if kind != "text":
            continue
        lines, right = printed[command].strip().splitlines(), text.splitlines()
        assert len(lines) == len(right), printed[command]
        for ours, theirs in zip(lines, right, strict=True):
            assert len(ours.split()) == len(theirs.split()), (ours, theirs)
            assert all(alike(a, b) for a, b in zip(ours.split(), theirs.split(), strict=True)), (ours, theirs)
        compared += 1
    assert compared == 2


def test_scoring_text_says_that_nothing_was_recorded(printed: dict[str, str], lk: Lake) -> None:
    (row,) = lk.sql("SELECT * FROM mismatch").to_dicts()
    assert (row["checkpoint"], row["episodes"], row["steps"], row["unknown_steps"]) == ("tiny", 4, 60, 60)
    assert row["mean_abs"] is None
    assert "gpt-4o-airline" in next(out for command, out in printed.items() if "rescore" in command)


def command_lines() -> list[str]:
    lines = [line for kind, text in BLOCKS if kind in ("", "sh") for line in text.splitlines()]
    return [line for line in lines if line.startswith("trajlake ")]


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_is_one(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that take minutes are parsed, not run: no unknown command, option or argument."""
    monkeypatch.setenv("TRAJLAKE_LAKE", "anywhere")
    words = shlex.split(line)[1:]
    context = click.Context(trajlake, info_name="trajlake")
    command = trajlake.get_command(context, words[0])
    assert command is not None
    command.make_context(words[0], words[1:], parent=context)


def test_the_numbers_of_the_prose_are_those_of_the_code() -> None:
    sentences = [
        f"more than {MAX_MISMATCH} nats per token",
        f"effective sample size of {LEAST_ESS:.0f} and {LEAST_SHARE:.0%}".replace("%", " %"),
        f"`clipped` needs a mean weight of {MIN_MEAN_WEIGHT}",
        f"{MEAN_LEVEL:.0%} of fair data sets are refused".replace("%", " %"),
        f"every {COMMIT_SECONDS:.0f} seconds",
        f"while at most {EXACT_TASKS} tasks differ (`exact`), else {SAMPLED_PATTERNS:,} random ones",
    ]
    for sentence in sentences:
        assert sentence in PROSE
    assert MIN_SHARED == 0.5
    assert "at least half of the turns" in PROSE


def test_every_estimator_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .*\|$", PAGE.split("| estimator | formula | errs |")[1], re.MULTILINE)
    names = [estimator.name for estimator in all_estimators()]
    assert rows == names
    lines: list[Any] = next(text.splitlines() for _, text in BLOCKS if text.startswith("estimator "))
    assert lines[0].split() == ROWS.names()
    assert [line.split()[0] for line in lines[1:]] == names


def test_attempts_are_worth_as_many_trials_as_the_page_says(printed: dict[str, str]) -> None:
    rows = {row[1]: row for row in (line.split() for line in next(iter(printed.values())).splitlines()[1:])}
    low, high = (float(end) for end in rows["score"][3:5])
    error = (high - low) / 2 / t_quantile(49)
    trials = 0.42 * 0.58 / error**2
    assert f"are worth {trials:.0f} independent ones" in PROSE
    independent = wilson_interval(0.42, 200)
    width = (float(rows["success"][4]) - float(rows["success"][3])) / (independent[1] - independent[0])
    assert 1.4 < width < 1.6, "half as wide again"
