"""Jobs on executors with 1, 2 and 4 workers, as a ratio to the same job in one process.

    python benchmarks/bench_executor.py [--episodes 800] [--workers 1 2 4] [--executors local processes ray]

Two reward functions score every episode of a new copy of a lake: one computes for some milliseconds of processor time,
one waits as long, as a judge's answer is waited for. On a machine with two cores the first shows what more workers than
cores cost, and the second what waiting at once gains; neither shows what more machines give. What starts an executor
(Ray's cluster) is not in the figures; what starts its worker processes and their sandboxes is. Prints a Markdown table
for docs/benchmarks.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

FUNCTIONS = """
import time

def computing(messages, **kwargs):
    began, n = time.process_time(), 0
    while time.process_time() - began < 0.01:
        n += len(str(n))
    return 1.0

def waiting(messages, **kwargs):
    time.sleep(0.01)
    return 1.0
"""


def measured(folder: str, name: str, executor: str, workers: int) -> None:
    """One run in this process: its seconds."""
    import lake
    from lake.execution.choice import executor_named
    from pipelines.score.functions import ScoreConfig
    from pipelines.score.job import run_score
    from pipelines.score.sandbox.contract import SandboxLimits

    there = None if executor == "local" else executor_named(executor, workers)
    limits = SandboxLimits(workers=workers if executor == "local" else 1)
    lk, config = lake.open(Path(folder, "lake")), ScoreConfig(limits=limits)
    began = time.perf_counter()
    report = run_score(lk, f"{folder}/rewards.py:{name}", config=config, executor=there, force=True)
    print(json.dumps({"seconds": time.perf_counter() - began, "scored": report.scored}))


def main() -> None:
    """Print the table."""
    from synthetic import STEPS_PER_EPISODE, steps_lake

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=800)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--executors", nargs="+", default=["local", "processes", "ray"])
    args = parser.parse_args()
    print("| function | executor | workers | episodes a second | ratio to local, 1 worker |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rewards.py").write_text(FUNCTIONS)
        steps_lake(Path(folder, "lake"), args.episodes * STEPS_PER_EPISODE)
        for name in ("computing", "waiting"):
            base = 0.0
            for executor in args.executors:
                for workers in args.workers:
                    command = [sys.executable, __file__, "--run", folder, name, executor, str(workers)]
                    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
                    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                    found = json.loads(done.stdout.splitlines()[-1])
                    rate = found["scored"] / found["seconds"]
                    base = base or rate
                    print(f"| {name} | {executor} | {workers} | {rate:.0f} | {rate / base:.2f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        measured(*sys.argv[2:5], int(sys.argv[5]))
    else:
        main()
