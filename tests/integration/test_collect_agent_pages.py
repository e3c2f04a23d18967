"""The programs of docs/guides/collect/agents.md, unchanged: every call is a step of the right rollout.

The engine is the small conforming one. Frameworks are installed once per machine in environments of their own, which
takes minutes (`make test-slow`), but for openai and LangGraph, which the tests have.
"""

import re
import sys
from pathlib import Path

import pytest

import lake
from testkit.consumers import said_by, with_packages
from testkit.engine_server import engine_server
from testkit.shared import CHECKOUT

PAGE = Path(CHECKOUT, "docs", "guides", "collect", "agents.md")
MANY = 64
ROWS = """
    SELECT e.task_id, e.group_id, e.env_return, s.step_index, s.extra ->> 'id' AS answer_id, t.action_ids, t.constrained
    FROM episodes e JOIN steps s USING (episode_id) LEFT JOIN tokens t USING (episode_id, step_index)
"""


def program(heading: str, folder: Path) -> Path:
    """The program of a section, in a file."""
    section = PAGE.read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (text,) = re.findall(r"^```python\n(.+?)^```$", section, re.MULTILINE | re.DOTALL)
    file = folder / "agent.py"
    file.write_text(text, "utf-8")
    return file


def check(heading: str, python: Path, folder: Path, *, has_ids: bool = True) -> None:
    with engine_server() as engine:
        endings = said_by(python, "agent_rollouts", program(heading, folder), engine.url, folder, MANY)
        calls = engine.calls
    assert endings == MANY * [["completed", 1.0, 3, None]]
    rows = lake.open(str(folder / "lake")).sql(ROWS).to_dicts()
    numbers = [int(re.split("[-_]", row["answer_id"])[1]) for row in rows]
    assert sorted(numbers) == list(range(len(calls))), "none lost, none twice"
    for row, number in zip(rows, numbers, strict=True):
        assert f"of {row['task_id']}." in str(calls[number].body), "the step is in its episode"
        assert row["action_ids"] == (calls[number].action_ids if has_ids else None)
        assert row["constrained"] is None, "nothing that the page does makes a ratio impossible"
    assert len({row["group_id"] for row in rows}) == MANY // 8


@pytest.mark.parametrize("heading", ["openai", "LangGraph"])
def test_64_at_once(heading: str, tmp_path: Path) -> None:
    check(heading, Path(sys.executable), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "name", "package"),
    [
        ("openai", "openai", "openai==3.54.0"),
        ("OpenAI Agents", "openai-agents", "openai-agents==0.24.0"),
        ("Pydantic AI", "pydantic-ai", "pydantic-ai-slim[openai]==2.68.0"),
        ("smolagents", "smolagents", "smolagents[openai]==1.26.0"),
    ],
)
def test_a_framework_of_an_environment_of_its_own_64_at_once(
    heading: str, name: str, package: str, tmp_path: Path
) -> None:
    check(heading, with_packages(name, (package,)), tmp_path, has_ids=heading != "OpenAI Agents")
