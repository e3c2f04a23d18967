"""Workers of the learning study end with their parent, even when it was killed in the middle of a run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDY = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from benchmarks.learning.workers import end_with_parent

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60).result()
"""


def is_alive(pid: int) -> bool:
    """A process that ended and that nobody has waited for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see who lives")
def test_a_worker_ends_with_a_study_that_is_killed_in_the_middle_of_a_run(tmp_path: Path) -> None:
    script = tmp_path / "killed_study.py"
    script.write_text(STUDY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as study:
        assert study.stdout is not None
        worker = int(study.stdout.readline())
        assert is_alive(worker)
        study.send_signal(signal.SIGKILL)
        study.wait()
    deadline = time.monotonic() + 10
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(worker)
