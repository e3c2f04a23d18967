"""`--agent FILE.py:name` and package.module:name: what is taken, and how faults are told; children of a process."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lake.errors import UsageError
from pipelines.collect.agents.loading import load_agent
from pipelines.collect.children import with_parent

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
    ("name", "told"),
    [
        ("one", "one(task) cannot be called with a task and a client: too many positional arguments"),
        ("keywords", "keywords(*, task, client) cannot be called with a task and a client"),
        ("Agent", "is a class; valid: a function agent(task, client)"),
        ("number", "is of type int; valid: a function agent(task, client)"),
        ("missing", "has no `missing`"),
    ],
)
def test_what_cannot_is_refused_with_the_reason(file: Path, name: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        load_agent(f"{file}:{name}")


def test_a_child_dies_with_its_parent_even_if_that_is_killed(tmp_path: Path) -> None:
    command = with_parent([sys.executable, "-c", "import time; time.sleep(600)"])
    starter = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(600)"
    # The command names this process as the parent: it is made by the process that starts the child.
    maker = (
        "import sys; from pipelines.collect.children import with_parent; "
        "sys.argv[1:] = with_parent([sys.executable, '-c', 'import time; time.sleep(600)']); " + starter
    )
    parent = subprocess.Popen([sys.executable, "-c", maker], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 60
    while "sleep" not in " ".join(child.cmdline()[-1:]) or str(parent.pid) in child.cmdline():
        assert time.monotonic() < deadline, child.cmdline()
        time.sleep(0.005)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it outlives its parent"
        time.sleep(0.005)
    orphan = subprocess.run([*command[:4], str(os.getppid()), *command[5:]], check=False, timeout=60)
    assert orphan.returncode == 1, "its parent was gone before it asked"
