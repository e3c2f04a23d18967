"""docs/guides/bring-your-trajectories.md: it names every format, and its commands print what it shows."""

import inspect
import re
import shlex
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

import lake
from lake.cli import trajlake
from lake.formats import query
from lake.formats.registry import FORMATS
from testkit.shared import CHECKOUT, shared_data

PAGE = Path(CHECKOUT, "docs", "guides", "bring-your-trajectories.md").read_text("utf-8")
BLOCKS = re.findall(r"^```console\n(.+?)\n```$", PAGE, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a block and what stands below it."""
    commands = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2].strip("\n")) for part in commands]


def test_every_format_is_in_the_table_once() -> None:
    table = PAGE.partition("## A format of your own")[0]
    named = [name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(FORMATS)


def test_the_shapes_are_those_of_the_code() -> None:
    spec = (
        inspect.cleandoc(query.__doc__ or "").partition(".. code-block:: text\n\n")[2].partition("\n\nOther names")[0]
    )
    assert textwrap.dedent(spec) in PAGE


def test_a_strange_file_comes_to_advantages_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = 0
    for block in BLOCKS[1:]:
        for command, below in commands(block):
            program, *words = shlex.split(command)
            if program == "cat":
                Path(words[0]).write_text(f"{below}\n", "utf-8")
                continue
            if "ratings.csv" in words:
                Path("ratings.csv").write_text(
                    "task_id,rollout_index,value\nfind-the-key,0,1.0\nfind-the-key,1,0.0\nelsewhere,0,1.0\n", "utf-8"
                )
            done = CliRunner().invoke(trajlake, words)
            assert done.exit_code == 0, done.output
            assert below in done.output
            ran += 1
    assert ran == 5
    assert lake.open("L").sql("SELECT count(advantage) AS n FROM current_advantages").item() == 3


def test_the_commands_for_files_and_folders_read_what_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block, on real files; a bucket and `--watch` have their own tests."""
    monkeypatch.chdir(tmp_path)
    home = Path(".claude", "projects")
    home.mkdir(parents=True)
    (home / "shop").symlink_to(shared_data("formats", "claude_code"))
    Path("logs").symlink_to(shared_data("formats", "inspect"))
    packed = shared_data("formats", "verifiers_v1", "traces.jsonl")
    Path("traces.jsonl.gz").symlink_to(packed)
    Path("strange.json").symlink_to(shared_data("formats", "tau2", "telecom_gpt4o_mono.json"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for command, _ in commands(BLOCKS[0]):
        words = shlex.split(command.partition("#")[0])[1:]
        if "--watch" in words or any("://" in word for word in words):
            continue
        done = CliRunner().invoke(trajlake, [str(Path(word).expanduser()) if "~" in word else word for word in words])
        assert done.exit_code == 0, done.output
    runs = lake.open("L").sql("SELECT source_format, count(*) AS n FROM episodes GROUP BY 1 ORDER BY 1").rows()
    assert {name for name, _ in runs} == {"claude_code", "inspect", "verifiers_traces"}
