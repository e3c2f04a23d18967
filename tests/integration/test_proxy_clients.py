"""Agents written with client libraries, through the proxy: each call is a step of the right episode, once.

What runs are the programs of docs/guides/record, as they stand there. The engine is the small conforming one; a
framework is installed once per machine in its own environment, which takes minutes; `make test-slow`.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lake
from testkit.consumers import said_by, with_packages
from testkit.engine_server import Engine, engine_server
from testkit.proxy_process import proxy_here
from testkit.shared import CHECKOUT

PAGES = Path(CHECKOUT, "docs", "guides", "record")
MANY = 64
QUERY = """
    SELECT e.task_id, e.rollout_index, e.env_return, e.status, s.step_index, s.action, s.extra ->> 'id' AS answer_id,
           s.extra ->> 'follows' AS follows, s.extra ->> 'history' AS history,
           t.context_ids, t.action_ids, t.prefix_step_index, t.constrained
    FROM steps s JOIN episodes e USING (episode_id) LEFT JOIN tokens t USING (episode_id, step_index)
    ORDER BY e.task_id, s.step_index
"""


def recorded(folder: Path, python: Path, page: str, function: str, tasks: list[str]) -> tuple[Engine, Any, list[Any]]:
    """The engine behind a page's agent that worked on tasks at once, what the agent answered, and the lake's steps."""
    with engine_server() as engine, proxy_here(engine, folder) as at:
        answers = said_by(python, "agents", PAGES / f"{page}.md", at.base, function, *tasks)
        at.end()
        rows = lake.open(at.lake).sql(QUERY).to_dicts()
    return engine, answers, rows


def check_attribution(
    engine: Engine, answers: dict[str, str], rows: list[Any], *, steps: int = 3, rewords: bool = False
) -> None:
    """Every call of the engine is one step, of the task that its prompt names, in the order of its conversation.

    Args:
        engine: behind the proxy.
        answers: of the agents, by task.
        rows: of `QUERY`.
        steps: of each agent.
        rewords: whether the client tells earlier calls in other words.
    """
    numbers = [int(re.split("[-_]", row["answer_id"])[1]) for row in rows]
    assert sorted(numbers) == list(range(len(engine.calls))), "none lost, none twice"
    for row, number in zip(rows, numbers, strict=True):
        assert f"of {row['task_id']}." in str(engine.calls[number].body), "the step is in its episode"
        history = "rewritten" if rewords and row["step_index"] else None
        assert (row["follows"], row["history"]) == (None, history), "each goes on from the one before"
    for task, answer in answers.items():
        task_rows = [row for row in rows if row["task_id"] == task]
        assert [row["step_index"] for row in task_rows] == list(range(steps))
        assert {(row["env_return"], row["status"]) for row in task_rows} == {(1.0, "completed")}
        assert answer in engine.calls[numbers[rows.index(task_rows[-1])]].all_words


def check_tokens(engine: Engine, rows: list[Any]) -> None:
    """The tokens are those that the engine saw and sampled."""
    sequences: dict[tuple[str, int | None], list[int]] = {}
    for row in rows:
        sampled = engine.calls[int(re.split("[-_]", row["answer_id"])[1])]
        # A client that spells the arguments of a call in its own way begins a new sequence.
        prompt = sequences.get((row["task_id"], row["prefix_step_index"]), []) + row["context_ids"]
        assert prompt == sampled.prompt_ids
        assert row["action_ids"] == sampled.action_ids
        assert row["constrained"] is None, "nothing that the page does makes a ratio impossible"
        sequences[row["task_id"], row["step_index"]] = prompt + row["action_ids"]


def names(count: int) -> list[str]:
    """Tasks whose names do not begin each other."""
    return [f"task-{number:03}" for number in range(count)]


@pytest.mark.parametrize("agents", [12, pytest.param(MANY, marks=pytest.mark.slow)])
def test_openais_agents_at_once(agents: int, tmp_path: Path) -> None:
    engine, answers, rows = recorded(tmp_path, Path(sys.executable), "openai", "agent", names(agents))
    check_attribution(engine, answers, rows)
    check_tokens(engine, rows)


LANGGRAPH = ("langgraph==1.2.22", "langchain-openai==1.7.3")
OPENAI_AGENTS = ("openai-agents==0.24.0",)
PYDANTIC_AI = ("pydantic-ai-slim[openai]==2.68.0",)
SMOLAGENTS = ("smolagents[openai]==1.26.0",)
INSPECT = ("inspect-ai==0.3.285", "openai==3.51.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "packages", "function"),
    [
        ("langgraph", LANGGRAPH, "agent"),
        ("openai-agents", OPENAI_AGENTS, "agent_with_exact_tokens"),
        ("pydantic-ai", PYDANTIC_AI, "agent"),
    ],
)
def test_a_framework_64_at_once(tmp_path: Path, page: str, packages: tuple[str, ...], function: str) -> None:
    engine, answers, rows = recorded(tmp_path, with_packages(page, packages), page, function, names(MANY))
    check_attribution(engine, answers, rows)
    check_tokens(engine, rows)


@pytest.mark.slow
def test_openai_agents_64_at_once_by_the_responses_api(tmp_path: Path) -> None:
    python = with_packages("openai-agents", OPENAI_AGENTS)
    engine, answers, rows = recorded(tmp_path, python, "openai-agents", "agent", names(MANY))
    check_attribution(engine, answers, rows)
    assert all(row["action_ids"] is None for row in rows), "it has no field for token ids"


@pytest.mark.slow
def test_smolagents(tmp_path: Path) -> None:
    python = with_packages("smolagents", SMOLAGENTS)
    engine, answers, rows = recorded(tmp_path, python, "smolagents", "agent", names(1))
    check_attribution(engine, answers, rows, rewords=True)
    check_tokens(engine, rows)
    assert {call.body["tool_choice"] for call in engine.calls} == {"auto"}


@pytest.mark.slow
def test_inspect(tmp_path: Path) -> None:
    engine, answers, rows = recorded(tmp_path, with_packages("inspect", INSPECT), "inspect", "agent", names(1))
    check_attribution(engine, answers, rows, steps=1)
    check_tokens(engine, rows)
    assert [row["rollout_index"] for row in rows] == [1], "the epoch"


def test_curl(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```bash\n(.+?)^```$", (PAGES / "curl.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    with engine_server() as engine, proxy_here(engine, tmp_path) as at:
        program = program.replace("http://127.0.0.1:8484", at.base)
        done = subprocess.run(["bash", "-ec", program], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        at.end()
        lk = lake.open(at.lake)
        (row,) = lk.sql(QUERY).to_dicts()
        (score,) = lk.sql("SELECT scorer, value FROM scores").to_dicts()
    assert (row["task_id"], row["env_return"], row["action"]) == ("airline-12", 1.0, engine.calls[0].text)
    assert score == {"scorer": "judge", "value": 0.5}
