"""Workers die with their parent, no matter what they do against it: the parent is killed, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lake.locked import isolation
from pipelines.score.sandbox.launch import find_obstacle
from testkit.processes import environment

pytestmark = pytest.mark.skipif(
    find_obstacle("strong") is not None, reason=f"no strong isolation here: {find_obstacle('strong')}"
)

REWARDS = '''
"""What a function would do to outlive whoever runs it; its process is named `ready` when it has done it."""
import ctypes, os, signal, threading

libc = ctypes.CDLL(None)

def spin():
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue

def deaf():
    for number in signal.valid_signals():
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass

def disarm():
    libc.prctl(1, 0, 0, 0, 0)
    deaf()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        pass
    libc.prctl(15, b"ready")
    spin()

def spin_in_threads():
    for _ in range(4):
        threading.Thread(target=spin).start()
    deaf()
    libc.prctl(15, b"ready")
    threading.Event().wait()

def leave_a_thread():
    """Its first thread ends, which alone has asked to die with the parent."""
    threading.Thread(target=spin).start()
    libc.prctl(15, b"ready")
    libc.syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)

def block():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    libc.prctl(15, b"ready")
    libc.pause()

DEEDS = (disarm, spin_in_threads, leave_a_thread, block)

def outlive(task_id, **_):
    DEEDS[task_id]()
'''
PARENT = """
import sys
from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
from pipelines.score.sandbox.pool import Sandbox

limits = SandboxLimits(workers=4, rows_per_batch=1, seconds_per_row=600)
with Sandbox(FunctionSource(sys.argv[1], "outlive"), limits) as held:
    held.call([{"task_id": number} for number in range(4)])
"""


def children(pid: int) -> list[int]:
    """Processes that a process has started, in any of its threads."""
    lists = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for each in lists for child in each.read_text().split()]


def is_ready(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "ready"


def is_alive(pid: int) -> bool:
    """Whether a process runs; not if no one has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def waited_for(test: object, seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not (done := test()) and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.05)
    return bool(done)


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(path)], env=environment())
    workers: list[int] = []
    try:
        assert waited_for(lambda: len(workers := children(parent.pid)) == 4 and all(map(is_ready, workers)))
        workers = children(parent.pid)
        parent.kill()
        parent.wait()
        assert waited_for(lambda: not any(map(is_alive, workers)), 20.0), "workers that outlived their parent"
    finally:
        parent.kill()
        parent.wait()
        for pid in filter(is_alive, workers):
            os.kill(pid, signal.SIGKILL)


def test_a_process_whose_parent_died_before_the_lock_runs_nothing() -> None:
    """It sees by what it writes to that no one reads there any more."""
    orders = isolation.encode_orders("this", isolation.LockPolicy(read=isolation.list_runtime_folders()), {})
    for alive in (True, False):
        reader, writer = os.pipe()
        command = [sys.executable, *isolation.build_command()[1:]]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE, cwd="/")
        os.close(writer)
        if not alive:
            os.close(reader)
        _, stderr = process.communicate(orders)
        assert (process.returncode, stderr) == (0 if alive else isolation.EXIT_NOT_LOCKED, b"")
        if alive:
            with os.fdopen(reader, "rb") as heard:
                assert b"Zen of Python" in heard.read()


def test_processor_time_ends_what_ignores_the_signal_that_tells_of_it() -> None:
    code = "import lake.locked.isolation as i, signal; i.lock(i.LockPolicy(cpu_seconds=1, layers=('rlimits',)))\n"
    code += "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment())
    assert done.returncode == -signal.SIGKILL
