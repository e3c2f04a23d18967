"""Locks between processes: who may hold one, and what frees it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lake.storage.locks import hold_file_lock, is_only_holder, lock_file, try_lock_file

_HOLD = """
import sys
from lake.storage.locks import lock_file
lock_file(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


def test_a_killed_holder_frees_its_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert try_lock_file(tmp_path / "lock") is None
        holder.send_signal(signal.SIGKILL)
    os.close(lock_file(tmp_path / "lock"))


def test_a_lock_counts_only_while_its_file_has_the_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    former = lock_file(path)
    path.unlink()
    current = try_lock_file(path)
    assert current is not None
    assert try_lock_file(path) is None
    os.close(former)
    os.close(current)


def test_a_waiter_whose_file_is_deleted_locks_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", _HOLD, str(path)]
    former = lock_file(path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiter:
        inode = f":{path.stat().st_ino} "
        while not any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
            time.sleep(0.01)
        path.unlink()
        os.close(former)
        assert waiter.stdout is not None
        waiter.stdout.readline()
        assert try_lock_file(path) is None
        waiter.kill()


def test_a_forked_child_does_not_keep_a_lock_that_its_parent_has_released(tmp_path: Path) -> None:
    with hold_file_lock(tmp_path / "lock"):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
    again = try_lock_file(tmp_path / "lock")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert again is not None
    os.close(again)


def test_shared_locks_know_whether_another_process_holds_one(tmp_path: Path) -> None:
    first = lock_file(tmp_path / "alive", is_shared=True)
    assert is_only_holder(first)
    second = lock_file(tmp_path / "alive", is_shared=True)
    assert not is_only_holder(first)
    assert try_lock_file(tmp_path / "alive") is None
    os.close(second)
    assert is_only_holder(first)
    os.close(first)
