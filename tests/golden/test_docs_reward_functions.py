"""docs/guides/reward-functions.md: its examples run on the real data, and its numbers are the lake's."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import lake
from lake import Lake
from lake.cli import trajlake
from lake.tables import TABLES
from pipelines.score.functions import ScoreConfig
from pipelines.score.rollouts import ARGUMENTS
from testkit.judge_server import serving
from testkit.shared import CHECKOUT, shared_data

PAGE = (CHECKOUT / "docs" / "guides" / "reward-functions.md").read_text("utf-8")
EXAMPLES = CHECKOUT / "examples" / "rewards"
SOURCES = {path.name: path.read_text("utf-8") for path in sorted(EXAMPLES.glob("*.py"))}
PAIRS = re.findall(r"^```sql\n(.+?)\n```\n\n```text\n(.+?)\n```", PAGE, re.MULTILINE | re.DOTALL)
CODE = re.findall(r"^```python\n(.+?)\n```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^trajlake .+$", PAGE, re.MULTILINE)


def run(line: str, lk: Lake) -> str:
    """A command line of the page, on the test's lake and the shared data."""
    places = {"L": lk.uri, "gpt-4o-airline.json": str(shared_data("tau_bench", "gpt-4o-airline.json"))}
    words = [places.get(word, word) for word in shlex.split(line)[1:]]
    words = [str(CHECKOUT / word) if word.startswith("examples/") else word for word in words]
    command = CliRunner().invoke(trajlake, words, catch_exceptions=False)
    assert command.exit_code == 0, command.stderr
    return command.stdout


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The page's commands, run in their order."""
    lk = lake.open(tmp_path_factory.mktemp("rewards") / "lake", create=True)
    for line in COMMANDS:
        run(line, lk)
    return lk


def test_the_page_shows_the_examples_as_they_are() -> None:
    assert len(CODE) == 9
    for block in CODE:
        assert any(block in source for source in SOURCES.values()), block
    named = set(re.findall(r"examples/rewards/(\w+\.py)", PAGE)) | {"compare.py", "calls.py"}
    assert named == set(SOURCES)
    assert all(source.startswith('"""') for source in SOURCES.values())


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_an_answer_of_the_page_is_the_answer_of_the_lake(lk: Lake, number: int) -> None:
    query, expected = PAIRS[number]
    assert len(PAIRS) == PAGE.count("```sql") == 3
    counted = run(f"trajlake sql --lake L {shlex.quote(query)}", lk)
    assert "\n".join(line.rstrip() for line in counted.rstrip().splitlines()) == expected


def test_no_example_fails_and_every_step_output_finds_its_step(lk: Lake) -> None:
    assert lk.sql("SELECT count(*) FROM scores WHERE error IS NOT NULL").item() == 0
    scored = lk.sql("SELECT scorer, count(DISTINCT episode_id) FROM current_scores GROUP BY 1")
    names = ("tools_worked", "expected_actions", "concise", "shortest", "unusual", "one_question", "rare_tools")
    assert dict(scored.rows()) == dict.fromkeys(names, 200)
    assert "28 episodes here have none" in " ".join(PAGE.split())
    unknown = "SELECT count(*) FROM current_scores WHERE scorer = 'expected_actions' AND value IS NULL"
    assert lk.sql(unknown).item() == 28


def test_rewarded_steps_are_the_calls_that_were_made(lk: Lake) -> None:
    """The aligner against the lake itself: a step has a reward exactly if its action calls a tool."""
    rewarded = (
        "SELECT episode_id, step_index FROM current_scores WHERE scorer = 'tools_worked' AND step_index IS NOT NULL"
    )
    called = "SELECT episode_id, step_index FROM steps WHERE tool_calls IS NOT NULL"
    assert lk.sql(f"({rewarded}) EXCEPT ({called})").is_empty()
    assert lk.sql(f"({called}) EXCEPT ({rewarded})").is_empty()
    failed = (
        "SELECT count(*) FROM current_scores AS s JOIN steps AS n ON n.episode_id = s.episode_id "
        "AND n.step_index = s.step_index + 1 WHERE s.scorer = 'tools_worked' AND s.value = -1 AND n.state_is_error"
    )
    at_the_end = (
        "SELECT count(*) FROM current_scores AS s JOIN episodes AS e USING (episode_id) "
        "WHERE s.scorer = 'tools_worked' AND s.value = -1 AND s.step_index = e.num_steps - 1"
    )
    assert lk.sql(failed).item() + lk.sql(at_the_end).item() == 73


def test_scores_and_step_rewards_become_credit(lk: Lake) -> None:
    tools = "trajlake score examples/rewards/tools_worked.py:tools_worked --default-step-reward 0 --name tools --lake L"
    assert "2454 steps" in run(tools, lk)
    assert "26 live" in run("trajlake credit gigpo --rewards tools --lake L", lk)
    report = run("trajlake credit grpo --score shortest --lake L", lk)
    assert "35 live" in report
    assert "50 groups" in report


def test_the_judge_compares_siblings_over_the_network(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def marks(body: dict[str, object]) -> str:
        text = str(body["messages"])
        return str(list(range(text.count("Conversation "))))

    with serving(marks) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        line = "trajlake score examples/rewards/compare.py:compare --where \"task_id = '3'\" --allow-network --lake L"
        assert "4 episodes scored" in run(line, lk)
        assert "4 episodes scored" in run(f"{line} --force", lk)
        (request,) = server.requests
    assert request["model"] == "gpt-4o-mini"
    rows = lk.sql("SELECT value, reason, isolation FROM current_scores WHERE scorer = 'compare' ORDER BY value")
    assert rows.rows() == [(n / 10, f"{n} of 10", "none") for n in range(4)]


def test_the_page_names_every_argument_and_the_defaults() -> None:
    names = set(re.findall(r"`(\w+)`", PAGE))
    assert set(ARGUMENTS) <= names
    config = ScoreConfig()
    words = " ".join(PAGE.split())
    assert f"every {config.commit_seconds:g} seconds or {config.commit_episodes:,} episodes" in words
    assert f"`batch_size` ({config.batch_size})" in words
    assert f"`concurrency` ({config.concurrency})" in words
    assert f"{config.limits.seconds_per_row:g} seconds and {config.limits.memory_mb // 1024} GB a call" in words
    assert all(f"`{name}`" in words for name in config.environment)
    assert {"scores", "responses"} <= set(TABLES)
    (toml,) = re.findall(r"^```toml\n(.+?)\n```", PAGE, re.MULTILINE | re.DOTALL)
    assert ScoreConfig.model_validate(tomllib.loads(toml)["score"]).limits.workers == 2
    assert Path(EXAMPLES).is_dir()
