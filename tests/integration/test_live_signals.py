"""A handler of signals that records, in the middle of records: nothing hangs, and each episode is there once."""

import subprocess
import sys
from pathlib import Path

import lake
from testkit.processes import environment

PROGRAM = """
import signal, sys, time
import lake

def play(task):
    with recorder.episode(task) as episode, episode.step(state="s") as step:
        step.action("a")
    done.append(task)

done = []
with lake.recorder(sys.argv[1], run="r", spool=sys.argv[2]) as recorder:
    signal.signal(signal.SIGALRM, lambda *_: len(done) % 3 or play(f"handler-{len(done)}"))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    until = time.monotonic() + 20.0
    while sum(task.startswith("handler") for task in done) < 100 and time.monotonic() < until:
        play(f"main-{len(done)}")
    signal.setitimer(signal.ITIMER_REAL, 0)
print(len(done), sum(task.startswith("handler") for task in done))
"""


def test_a_handler_of_signals_may_record(tmp_path: Path) -> None:
    place = [str(tmp_path / "lake"), str(tmp_path / "spool")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *place],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    recorded, by_handlers = map(int, done.stdout.split())
    assert by_handlers
    assert lake.open(place[0]).sql("SELECT count(*) FROM episodes").item() == recorded
