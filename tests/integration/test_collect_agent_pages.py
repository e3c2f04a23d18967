"""The programs of docs/guides/collect/agents.md, unchanged: every call is a step of the right rollout.

The engine is the small conforming one. Frameworks are installed once per machine in their own environments, which
takes minutes (`make test-slow`), but for openai and LangGraph, which the tests have.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lake
from testkit.commands import trajlake
from testkit.consumers import with_packages
from testkit.engine_server import engine_server
from testkit.examples import mostly_slow
from testkit.processes import COMMAND, environment
from testkit.shared import CHECKOUT

PAGE = Path(CHECKOUT, "docs", "guides", "collect", "agents.md")
MANY, SOME = 64, 16
ROWS = """
    SELECT e.task_id, e.group_id, e.env_return, s.step_index, s.extra ->> 'id' AS answer_id, t.action_ids, t.constrained
    FROM episodes e JOIN steps s USING (episode_id) LEFT JOIN tokens t USING (episode_id, step_index)
"""


def program(heading: str, folder: Path) -> None:
    """Write the program of a section as its reader has it."""
    section = PAGE.read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (text,) = re.findall(r"^```python\n(.+?)^```$", section, re.MULTILINE | re.DOTALL)
    (folder / "agent.py").write_text(text, "utf-8")


def check(heading: str, python: Path, folder: Path, many: int, *, has_ids: bool = True) -> None:
    """Tasks of eight siblings by `trajlake collect`, in the Python that has the framework."""
    tasks = [
        {"name": name, "prompt": f"Find the key of {name}."} for name in map("task-{:03}".format, range(many // 8))
    ]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)), "utf-8")
    options = ["--lake", "lake", "--prompts", "tasks.jsonl", "--group-size", "8", "--groups", str(many // 8)]
    with engine_server() as engine:
        program(heading, folder)
        words = ["collect", "--agent", "agent.py:agent", "--engine", engine.url, *options]
        where: dict[str, Any] = {"cwd": folder, "env": environment(TRAJLAKE_SPOOL=str(folder / "spool"))}
        if python == Path(sys.executable):
            done = trajlake(*words, **where)
        else:
            program_of = [python, "-W", "ignore", *COMMAND[1:]]
            done = subprocess.run(
                [*program_of, *words], capture_output=True, text=True, timeout=300, check=False, **where
            )
        calls = engine.calls
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{many} episodes finished, 0 failed" in done.stdout, done.stdout
    rows = lake.open(str(folder / "lake")).sql(ROWS).to_dicts()
    numbers = [int(re.split("[-_]", row["answer_id"])[1]) for row in rows]
    assert sorted(numbers) == list(range(len(calls))), "none lost, none twice"
    for row, number in zip(rows, numbers, strict=True):
        assert f"of {row['task_id']}." in str(calls[number].body), "the step is in its episode"
        assert row["action_ids"] == (calls[number].action_ids if has_ids else None)
        assert row["constrained"] is None, "nothing that the page does makes a ratio impossible"
    assert len(rows) == 3 * many
    assert {row["env_return"] for row in rows} == {1.0}
    assert len({row["group_id"] for row in rows}) == many // 8


@pytest.mark.parametrize("heading", mostly_slow(["openai", "LangGraph"], "openai"))
def test_some_at_once(heading: str, tmp_path: Path) -> None:
    check(heading, Path(sys.executable), tmp_path, SOME)


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
    check(heading, with_packages(name, (package,)), tmp_path, MANY, has_ids=heading != "OpenAI Agents")
