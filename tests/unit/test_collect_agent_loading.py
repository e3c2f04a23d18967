"""`--agent FILE.py:name` and package.module:name: what is taken, and how faults are reported."""

import re
import sys
from pathlib import Path

import pytest

from lake.errors import UsageError
from pipelines.collect.agents.loading import load_agent

PROGRAM = """
import functools

def agent(task, client): return "sync"
async def coroutine(task, client, more=1): return "async"
def one(task): ...
def keywords(*, task, client): ...
class Agent:
    def __init__(self, text): self.text = text
    def __call__(self, task, client): return self.text
called = Agent("called")
partial = functools.partial(lambda greeting, task, client: greeting, "hello")
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM, "utf-8")
    return path


@pytest.mark.parametrize("name", ["agent", "coroutine", "called", "partial"])
def test_what_can_be_called_with_a_task_and_a_client_is_an_agent(file: Path, name: str) -> None:
    assert callable(load_agent(f"{file}:{name}"))


def test_a_module_is_found_in_the_working_directory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "agents_of_a_test").mkdir()
    file.rename(file.parent / "agents_of_a_test" / "mine.py")
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_agent("agents_of_a_test.mine:called")(None, None) == "called"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("one", "one(task) cannot be called with a task and a client: too many positional arguments"),
        ("keywords", "keywords(*, task, client) cannot be called with a task and a client"),
        ("Agent", "is a class; valid: a function or callable object: agent(task, client)"),
        ("number", "is of type int; valid: a function or callable object: agent(task, client)"),
        ("missing", "has no `missing`"),
    ],
)
def test_what_cannot_is_refused_with_the_reason(file: Path, name: str, fragment: str) -> None:
    with pytest.raises(UsageError, match=re.escape(fragment)):
        load_agent(f"{file}:{name}")
