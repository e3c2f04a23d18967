"""docs/guides/scorers.md: its commands, its TOML and its Python run on real data, and every answer is the page's."""

import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from lake.cli import trajlake
from pipelines.score.rewards import FUNCTIONS, RewardDefinition
from pipelines.score.scorers import SCORERS
from testkit.shared import CHECKOUT, shared_data

PAGE = (CHECKOUT / "docs" / "guides" / "scorers.md").read_text("utf-8")
PAIRS = re.findall(r"^```sql\n(.+?)\n```\n\n```text\n(.*?)\n?```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.+?)\n```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
TOMLS = re.findall(r"^```toml\n(.+?)\n```", PAGE, re.MULTILINE | re.DOTALL)
PYTHON = re.findall(r"^```python\n(.+?)\n```\n\n```text\n(.+?)\n```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's commands have been run, one after the other."""
    folder = tmp_path_factory.mktemp("scorers")
    shutil.copy(shared_data("tau_bench", "gpt-4o-airline.json"), folder)
    (folder / "rewards.toml").write_text(TOMLS[0])
    before = Path.cwd()
    os.chdir(folder)
    try:
        for line in COMMANDS:
            name, *arguments = shlex.split(line)
            assert name == "trajlake"
            done = CliRunner().invoke(trajlake, arguments, catch_exceptions=False)
            assert done.exit_code == 0, (line, done.output)
    finally:
        os.chdir(before)
    return folder


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_an_answer_of_the_page_is_the_answer_of_the_lake(folder: Path, number: int) -> None:
    query, expected = PAIRS[number]
    command = CliRunner().invoke(trajlake, ["sql", query, "--lake", str(folder / "L")], catch_exceptions=False)
    assert command.exit_code == 0
    assert "\n".join(line.rstrip() for line in command.stdout.rstrip().splitlines()) == expected


def test_the_python_of_the_page_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((code, expected),) = PYTHON
    monkeypatch.chdir(folder)
    exec(compile(code, "scorers.md", "exec"), {})
    assert capsys.readouterr().out.strip() == expected


def test_every_query_and_example_of_the_page_was_found() -> None:
    assert len(PAIRS) == PAGE.count("```sql") == 7
    assert len(COMMANDS) == PAGE.count("\ntrajlake ") == 10
    assert len(TOMLS) == PAGE.count("```toml") == 2
    assert len(PYTHON) == PAGE.count("```python") == 1


def test_every_reward_of_the_page_is_one() -> None:
    names = [
        RewardDefinition.model_validate({"name": name} | settings).name
        for text in TOMLS
        for name, settings in tomllib.loads(text)["reward"].items()
    ]
    assert names == ["careful", "surprise", "dense", "rubric"]


def test_the_table_has_every_scorer_and_names_options_that_there_are() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|(.+)\|$", PAGE.split("## The scorers")[1].split("The class docstrings")[0], re.MULTILINE
    )
    assert [name for name, _ in rows] == list(SCORERS)
    for name, row in rows:
        options = re.findall(r"`(\w+)`", row.split("|")[2])
        assert set(options) <= set(SCORERS[name].model_fields), (name, options)


def test_the_table_of_keys_is_complete() -> None:
    table = PAGE.split("| key | meaning |")[1].split("Rows are written")[0]
    keys = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    fields = set(RewardDefinition.model_fields) - {"name"}
    component_fields = set(RewardDefinition.model_fields["components"].annotation.__args__[0].model_fields) - {"scorer"}  # type: ignore[union-attr]
    assert keys == fields | component_fields


def test_the_functions_of_the_page_are_those_that_may_be_used() -> None:
    listed = " ".join(re.findall(r"`([^`]+)`", PAGE.split("**SQL** may use")[1].split("Subqueries")[0])).split()
    assert set(listed) - {"CASE"} == FUNCTIONS - {"^", "ceiling"}
