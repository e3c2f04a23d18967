"""docs/guides/ask-your-trajectories.md: every query of the page, run on the real data, gives the answer of the page."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import lake
from lake import Lake
from lake.cli import trajlake
from lake.write.ingest import ingest
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.shared import CHECKOUT, shared_data

PAGE = (CHECKOUT / "docs" / "guides" / "ask-your-trajectories.md").read_text("utf-8")
PAIRS = re.findall(r"^```sql\n(.+?)\n```\n\n```text\n(.+?)\n```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = lake.open(tmp_path_factory.mktemp("ask") / "lake", create=True)
    ingest(lk, shared_data("tau_bench", "gpt-4o-airline.json"))
    run_credit(lk, GiGPO(step_source="terminal_score"))
    return lk


def test_the_page_asks_ten_questions_and_answers_every_one() -> None:
    questions = re.split(r"^## \d+\. .+\?$", PAGE, flags=re.MULTILINE)[1:]
    assert len(questions) == 10
    assert all("```sql" in question and "```text" in question for question in questions)
    assert len(PAIRS) == PAGE.count("```sql") == PAGE.count("```text") == 12


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_an_answer_of_the_page_is_the_answer_of_the_lake(lk: Lake, number: int) -> None:
    query, expected = PAIRS[number]
    command = CliRunner().invoke(trajlake, ["sql", query, "--lake", str(Path(lk.uri))], catch_exceptions=False)
    assert command.exit_code == 0
    assert "\n".join(line.rstrip() for line in command.stdout.rstrip().splitlines()) == expected
