"""docs/guides/select-and-compare.md: every command of the page, run on the real data, prints what the page shows."""

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import lake
from lake import Lake, ids
from lake.cli import trajlake
from lake.settings import validate
from lake.write.ingest import ingest
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from pipelines.groupings import STEPS
from pipelines.select.filters import FILTERS
from pipelines.select.job import Selection
from testkit.shared import CHECKOUT, shared_data

PAGE = (CHECKOUT / "docs" / "guides" / "select-and-compare.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(sh|text)\n(.+?)\n```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = lake.open(tmp_path_factory.mktemp("compare") / "lake", create=True)
    ingest(lk, shared_data("tau_bench", "gpt-4o-airline.json"))
    return lk


@pytest.fixture(scope="module")
def printed(lk: Lake) -> list[tuple[str, str, str]]:
    """(command, stdout, stderr) of every command of the page, run in the order of the page."""
    jobs: dict[str, str] = {}
    for name, omega in (("GIGPO", 1.0), ("GRPO", 0.0)):
        jobs[name] = ids.to_text(run_credit(lk, GiGPO(step_source="terminal_score", omega=omega)).job_id)
    blocks = []
    for command in commands():
        if "PAIRS" in command and "PAIRS" not in jobs:
            pairs = GiGPO(step_source="terminal_score", omega=0.0)
            jobs["PAIRS"] = ids.to_text(run_credit(lk, pairs, grouping="pair/0").job_id)
        words = [jobs.get(word, word) for word in shlex.split(command)]
        done = CliRunner().invoke(trajlake, [*words[1:], "--lake", str(Path(lk.uri))], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        blocks.append((command, done.stdout, done.stderr))
    return blocks


def commands() -> list[str]:
    return [text for kind, text in BLOCKS if kind == "sh"]


def iterate_outputs() -> Iterator[tuple[int, str]]:
    """(number of the command, what the page shows of its output)."""
    number = -1
    for kind, text in BLOCKS:
        number += kind == "sh"
        if kind == "text":
            yield number, text


def alike(first: str, second: str) -> bool:
    """Equal words; numbers to the digits that are printed, and sums that should be 0 to rounding."""
    if first == second:
        return True
    try:
        return math.isclose(float(first), float(second), rel_tol=2e-5, abs_tol=1e-12)
    except ValueError:
        return False


@pytest.mark.parametrize("position", range(len(list(iterate_outputs()))))
def test_a_command_prints_what_the_page_shows(printed: list[tuple[str, str, str]], position: int) -> None:
    number, expected = list(iterate_outputs())[position]
    command, stdout, _ = printed[number]
    lines, right = stdout.strip().splitlines(), expected.splitlines()
    assert len(lines) == len(right), command
    for ours, theirs in zip(lines, right, strict=True):
        words = [re.split(r"[\s,]+", line.strip()) for line in (ours, theirs)]
        assert len(words[0]) == len(words[1]), (ours, theirs)
        assert all(alike(a, b) for a, b in zip(*words, strict=True)), (ours, theirs)


def test_nearly_every_command_of_the_page_shows_its_output() -> None:
    silent = set(range(len(commands()))) - {number for number, _ in iterate_outputs()}
    assert [commands()[number].split()[1] for number in silent] == ["group"], "forty rows of a draw each"
    assert len(commands()) == 11


def test_what_the_page_says_about_stderr_is_said(printed: list[tuple[str, str, str]]) -> None:
    (merged,) = [err for command, _, err in printed if "merge_runs" in command]
    quoted = "200 in groups that did not start alike, left as they were"
    assert f"`{quoted}`" in PAGE
    assert quoted in merged


def test_every_filter_and_every_step_has_its_row_with_its_options() -> None:
    rows = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
    for kind, cls in (*FILTERS.items(), *STEPS.items()):
        for option in set(cls.model_fields) - {"kind"}:
            prefix, _, unit = option.partition("_")
            words = (f"`{prefix}_`", f"`{unit}`") if kind == "length" and unit else (f"`{option}`",)
            assert all(word in rows[kind] for word in words), (kind, option)


def test_the_defaults_of_the_tables_are_those_of_the_code() -> None:
    for line in (line for line in PAGE.splitlines() if line.startswith("| `")):
        kind, options = line.split("`")[1], line.split("|")[2]
        cls = FILTERS.get(kind) or STEPS.get(kind)
        if cls is None:
            continue
        for option, words in re.findall(r"`(\w+)` \(([^)]+)\)", options):
            default = cls.model_fields[option].default
            values = (
                [str(part) for part in default]
                if isinstance(default, tuple)
                else [f"{default:g}" if isinstance(default, (int, float)) else default]
            )
            assert [word.strip(" `") for word in words.split(",")] == values, (kind, option)


def test_the_file_of_the_page_is_a_selection() -> None:
    import tomllib

    (text,) = re.findall(r"```toml\n(.+?)\n```", PAGE, re.DOTALL)
    selection = validate(Selection, tomllib.loads(text)["select"], "select: ")
    assert [part.kind for part in selection.filters] == ["status", "combined"]
