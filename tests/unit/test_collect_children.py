"""A child of a process ends with it, however that ends, and with the process alone."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipelines.collect.children import guard_command

SLEEP = "[sys.executable, '-c', 'import time; time.sleep(600)']"
SLEEPER = f"import subprocess, sys; subprocess.run({SLEEP}, start_new_session=True)"
# In a thread that ends before its process does: the children stay.
PARENT = f"""
import subprocess, sys, threading, time
from pipelines.collect.children import guard_command

def start():
    print(subprocess.Popen(guard_command([sys.executable, "-c", {SLEEPER!r}])).pid, flush=True)

starter = threading.Thread(target=start)
starter.start()
starter.join()
time.sleep(600)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def parent() -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    yield process
    process.kill()
    process.communicate()


def family(parent: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The process between, the command, and what that started."""
    assert parent.stdout is not None
    between = psutil.Process(int(parent.stdout.readline()))
    until(lambda: len(between.children(recursive=True)) == 2)
    return [between, *between.children(recursive=True)]


def test_a_kill_of_the_parent_ends_what_the_command_started_too(parent: "subprocess.Popen[str]") -> None:
    processes = family(parent)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: all(map(has_ended, processes)))


def test_a_kill_of_the_command_ends_what_it_started_too(parent: "subprocess.Popen[str]") -> None:
    between, command, orphan = family(parent)
    command.send_signal(signal.SIGKILL)
    until(lambda: has_ended(between) and has_ended(orphan))


def test_it_ends_as_its_command_does_or_when_it_is_told_to() -> None:
    def status(program: str) -> int:
        return subprocess.run(guard_command([sys.executable, "-c", program]), check=False, timeout=120).returncode

    assert status("raise SystemExit(3)") == 3
    assert status("import os; os.kill(os.getpid(), 9)") == 128 + 9
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen(guard_command([sys.executable, "-c", stubborn], leaving=0.1), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 128 + 9, "it was given its time, and then killed"


def test_a_command_whose_parent_is_gone_is_not_started() -> None:
    interpreter, *options, _, leaving = guard_command([])
    command = [interpreter, *options, str(psutil.Process().ppid()), leaving, sys.executable, "-c", "print('started')"]
    orphan = subprocess.run(command, check=False, timeout=120, stdout=subprocess.PIPE)
    assert (orphan.returncode, orphan.stdout) == (1, b"")
