"""docs/guides/which-anchor.md: every figure of the page, measured again on the data it names."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pydantic import TypeAdapter

import lake
from lake import Lake
from lake.write.ingest import ingest
from pipelines.credit import GiGPO
from pipelines.credit.anchors import Anchors
from pipelines.credit.anchors.measures import Walks, collect_columns, measure, scan_steps
from pipelines.credit.health import FINDINGS, IntegrityConfig, diagnose
from pipelines.credit.job import run_credit
from testkit.clumsy_house import SIBLINGS, WORLDS, clumsy_lake
from testkit.command_line import runner
from testkit.shared import CHECKOUT, shared_data

PAGE = (CHECKOUT / "docs" / "guides" / "which-anchor.md").read_text("utf-8")
SHOWN = ["known", "shared", "singleton", "episodes", "one_action", "ways_in", "errors"]
DEFINITIONS: TypeAdapter[dict[str, Anchors]] = TypeAdapter(dict[str, Anchors])


def section(name: str) -> tuple[dict[str, list[str]], dict[str, Anchors]]:
    """The table under a mark, by its first column, and the definitions it was measured with."""
    text = PAGE.split(f"<!-- measured: {name} -->", 1)[1]
    block = re.search(r"```json\n(.+?)\n```", text, re.DOTALL)
    assert block is not None
    lines = [line for line in text[: block.start()].split("\n") if "|" in line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["anchors", *SHOWN]
    return {row[0]: row[1:] for row in rows[2:]}, DEFINITIONS.validate_json(block[1])


def cells(row: dict[str, Any]) -> list[str]:
    """A measured row as the page writes it: shares in per cent, means with one digit."""
    means = ("episodes", "ways_in")
    return [f"{row[name]:.1f}" if name in means else f"{100 * row[name]:.1f} %" for name in SHOWN]


def measured(lk: Lake, definitions: dict[str, Anchors], change: Callable[[pl.LazyFrame], pl.LazyFrame]) -> pl.DataFrame:
    steps = change(scan_steps(lk.snapshot(), list(definitions.values())))
    return measure(Walks.of(steps, collect_columns(definitions.values(), steps.collect_schema().names())), definitions)


def with_counter(steps: pl.LazyFrame) -> pl.LazyFrame:
    counted = pl.concat_str(pl.lit("Move "), pl.col("step_index"), pl.lit(". "), pl.col("state"))
    return steps.with_columns(counted.alias("state")).drop("state_hash")


@pytest.fixture(scope="module")
def tau(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = lake.open(tmp_path_factory.mktemp("anchors") / "tau", create=True)
    ingest(lk, shared_data("tau_bench", "gpt-4o-airline.json"))
    return lk


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return clumsy_lake(tmp_path_factory.mktemp("anchors") / "house")


def printed(name: str) -> list[str]:
    """The lines of the block under a mark, blanks as one."""
    block = re.search(rf"<!-- printed: {name} -->\n```text\n(.+?)\n```", PAGE, re.DOTALL)
    assert block is not None
    return [" ".join(line.split()) for line in block[1].split("\n")]


def test_the_worked_example_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    game = subprocess.run([sys.executable, CHECKOUT / "examples" / "text_game.py"], check=True, capture_output=True)
    Path("game.jsonl").write_bytes(game.stdout)
    cli = runner(monkeypatch, capsys)
    assert cli("ingest", "game.jsonl", "--lake", "L").code == 0
    lines = [" ".join(line.split()) for line in cli("anchors", "--lake", "L").out.splitlines()]
    largest, advice = printed("largest"), printed("advice")
    assert lines[2 : 2 + len(largest)] == largest
    assert lines[-len(advice) :] == advice


@pytest.mark.parametrize("name", ["tau-bench", "house", "house with a counter"])
def test_the_table_is_what_is_measured(name: str, request: pytest.FixtureRequest) -> None:
    table, definitions = section(name)
    lk = request.getfixturevalue("tau" if name == "tau-bench" else "house")
    frame = measured(lk, definitions, with_counter if "counter" in name else lambda steps: steps)
    expected = {row["anchors"]: cells(row) for row in frame.iter_rows(named=True)}
    printed = "\n".join(f"| {' | '.join([label, *row])} |" for label, row in expected.items())
    assert table == expected, f"the page should say:\n{printed}"


def test_the_sentences_about_tau_bench(tau: Lake) -> None:
    """The figures in prose, counted in SQL and not by the code that made the table."""
    (facts,) = tau.sql(
        """
        SELECT count(*) AS steps, count(DISTINCT s.group_id) AS tasks, count(DISTINCT s.episode_id) AS rollouts,
               count(*) FILTER (state = '') AS empty, count(*) FILTER (state = '[]') AS brackets
        FROM steps AS s
        """
    ).to_dicts()
    assert facts == {"steps": 2454, "tasks": 50, "rollouts": 200, "empty": 92, "brackets": 27}
    said_there = [
        "200 rollouts",
        "50 tasks with four each",
        "2,454 steps",
        "92 answers are the empty text and 27 are `[]`",
    ]
    for fragment in said_there:
        assert fragment in PAGE
    (shared,) = tau.sql(
        """
        SELECT count(*) AS states, count(*) FILTER (by_tool) AS of_tools, sum(n) / 2454 AS share FROM (
            SELECT count(*) AS n, bool_and(state_role = 'tool') AS by_tool FROM steps
            GROUP BY group_id, state HAVING count(DISTINCT episode_id) > 1)
        """
    ).to_dicts()
    assert (shared["states"], shared["of_tools"]) == (276, 259)
    assert "259 of the 276 shared states" in PAGE
    assert f"{shared['share']:.1%}".replace("%", " %") == section("tau-bench")[0]["exact text"][1]


def test_what_is_said_after_the_job(tau: Lake) -> None:
    report = run_credit(tau, GiGPO(step_source="terminal_score"))
    groups = tau.scan("credit_groups").filter(pl.col("job_id") == report.job_id)
    warnings = diagnose(groups).warnings()
    warning_text = " ".join(warning for warning in warnings if "trajlake anchors" in warning)
    text = " ".join(PAGE.split())
    for fragment in ("62% of the steps", "48 of the 910 steps", "98 of the 910 steps"):
        assert fragment in warning_text
    for fragment in ("62 % of the steps", "that 48 of the 910 steps", "and 98 at empty states"):
        assert fragment in text
    query = PAGE.split("```sql\n", 1)[1].split("```", 1)[0]
    rows = tau.sql(query)
    assert rows.height == 10
    assert rows["alone"].is_sorted(descending=True)
    assert "several_starts" in rows["findings"][0], "simulated users begin each conversation anew"


def test_the_sentences_about_the_house(house: Lake) -> None:
    assert f"{WORLDS} worlds of three rooms, eight rollouts each" in PAGE
    assert SIBLINGS == 8
    (facts,) = house.sql("SELECT avg(state_is_error::int) AS refused FROM steps").to_dicts()
    assert f"throws {facts['refused']:.0%}".replace("%", " %") in PAGE
    table, _ = section("house")
    assert min(table, key=lambda label: float(table[label][2].split()[0])) == "room alone"
    assert float(table["view alone"][2].split()[0]) < float(table["no errors"][2].split()[0])


def test_the_sentences_about_similarity() -> None:
    texts = ["the cat sat on the mat. " * 12, "the cat sat on the mat! " * 12]
    assert len(texts[0]) == 288
    assert SequenceMatcher(None, *texts).ratio() == pytest.approx(0.076, abs=5e-4)
    assert "characters that differ in 12 punctuation marks score 0.076" in " ".join(PAGE.split())
    view = "Room hall. You see nothing. Chest {}. You hold key. Exits east west"
    assert SequenceMatcher(None, view.format("locked"), view.format("open")).ratio() >= 0.9


def test_the_chain_of_the_page_is_a_definition() -> None:
    block = re.search(r"```json\n(\{\"kind\": \"chain\".+?)\n```", PAGE, re.DOTALL)
    assert block is not None
    chain = TypeAdapter(Anchors).validate_json(block[1])
    assert [stage.kind for stage in chain.steps] == ["no_errors", "substitutions", "last_states"]


def test_the_checks_of_the_page_are_the_checks() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(off|warn|refuse)` \| (.+) \|$", PAGE, re.MULTILINE)
    config = IntegrityConfig()
    assert {name: default for name, default, _ in rows} == {
        name: getattr(config, name) for name in {finding.check for finding in FINDINGS.values()}
    }
    for name, finding in FINDINGS.items():
        assert any(check == finding.check and f"`{name}`" in detail for check, _, detail in rows)


def test_the_figures_of_the_page_are_columns_of_the_measurement(house: Lake) -> None:
    table, definitions = section("house")
    frame = measured(house, {label: definitions[label] for label in list(table)[:1]}, lambda steps: steps)
    described = set(re.findall(r"`(\w+)`", PAGE.split("| column |", 1)[1].split("No single figure", 1)[0]))
    assert set(frame.columns) - {"anchors", "steps", "seconds"} == described
    assert json.loads(frame.write_json())[0]["anchors"] == "exact text"
