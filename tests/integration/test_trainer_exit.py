"""A process may end in the middle of a stream, threads at work: it ends with its own exit code, and is not aborted.

pyarrow's dataset scanners abort here (apache/arrow #45214); many exits are counted by benchmarks/bench_stream.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from testkit.processes import environment
from testkit.training import token_episodes, token_lake

PROGRAM = """
import sys
import lake
from trainer.config import TrainConfig
from trainer.losses import Needs
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.data.stream import Stream

snapshot = lake.open(sys.argv[1]).snapshot()
config = TrainConfig(model="none", loss="sft", epochs=50, episodes_per_step=1, cache_bytes=500, prefetch=8)
plan = Plan(select(snapshot, config, Needs()), config)
stream = Stream(snapshot, plan, Needs(), config)
steps = stream.steps()
next(steps)
how = sys.argv[2]
if how == "with":
    with stream:
        sys.exit(7)
if how == "error":
    raise ValueError("on purpose")
if how == "exit":
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [("exit", 7), *(pytest.param(*each, marks=pytest.mark.slow) for each in [("end", 0), ("with", 7), ("error", 1)])],
)
def test_a_process_that_leaves_a_stream_ends_with_its_own_code(tmp_path: Path, how: str, code: int) -> None:
    token_lake(tmp_path, token_episodes(tasks=4), writes=3)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment())
    assert done.returncode == code, done.stderr
    assert ("ValueError: on purpose" in done.stderr) == (how == "error")
    assert "Fatal" not in done.stderr
