"""Jobs on executors with 1, 2 and 4 workers, as a ratio to the same job in one process.

    python benchmarks/bench_executor.py [--episodes 800] [--workers 1 2 4] [--executors local processes ray]
    python benchmarks/bench_executor.py --ingest-megabytes 300 [--workers 1 2] [--executors processes ray]

Two reward functions score every episode of a new copy of a lake: one computes for some milliseconds of processor time,
one waits as long, as a judge's answer is waited for. On a machine with two cores the first shows what more workers than
cores cost, and the second what waiting at once gains; neither shows what more machines give. What starts an executor
(Ray's cluster) is not in the figures; what starts its worker processes and their sandboxes is.

With `--ingest-megabytes`, a JSONL file of synthetic tau-bench episodes is ingested into a new lake instead: without an
executor, as the base, and with each. Seconds of processor time are those of all its processes, Ray's apart, which are
not its children. Prints a Markdown table for docs/lab-log.md.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
    from lake.execution import make_executor
    from pipelines.score.functions import ScoreConfig
    from pipelines.score.job import run_score
    from pipelines.score.sandbox.contract import SandboxLimits

    there = None if executor == "local" else make_executor(executor, workers)
    limits = SandboxLimits(workers=workers if executor == "local" else 1)
    lk, config = lake.open(Path(folder, "lake")), ScoreConfig(limits=limits)
    began = time.perf_counter()
    report = run_score(lk, f"{folder}/rewards.py:{name}", config=config, executor=there, force=True)
    print(json.dumps({"seconds": time.perf_counter() - began, "scored": report.scored}))


def ingested(folder: str, executor: str, workers: int) -> None:
    """One ingest in this process: its seconds."""
    import lake
    from lake.execution import make_executor
    from lake.write.ingest import ingest

    there = None if executor == "none" else make_executor(executor, workers)
    with tempfile.TemporaryDirectory(dir=folder) as target:
        lk = lake.open(Path(target, "lake"), create=True)
        began = time.perf_counter()
        report = ingest(lk, Path(folder, "tau.jsonl"), executor=there)
        seconds = time.perf_counter() - began
    assert report.new == report.records
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in used)
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peaks": [one.ru_maxrss / 1e6 for one in used]}))


def in_process(*words: object) -> dict[str, Any]:
    """What a run in a process of its own prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare_ingest(megabytes: int, executors: list[str], workers: list[int]) -> None:
    """Print the table of ingest."""
    from bench_ingest import as_jsonl
    from tau_like import write

    print("| executor | workers | MB a second | ratio to none | CPU s | peak of the driver, GB | of a worker, GB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "tau.json"), megabytes * 1_000_000)
        size = as_jsonl(Path(folder, "tau.json")).stat().st_size / 1e6
        Path(folder, "tau.json").unlink()
        base = 0.0
        for executor, number in [("none", 1), *((one, number) for one in executors for number in workers)]:
            found = in_process("--ingest", folder, executor, number)
            rate = size / found["seconds"]
            base = base or rate
            driver, worker = found["peaks"]
            peaks = f"{driver:.2f} | {f'{worker:.2f}' if executor == 'processes' else ''}"
            cpu = "" if executor == "ray" else f"{found['cpu']:.1f}"
            print(f"| {executor} | {number} | {rate:.0f} | {rate / base:.2f} | {cpu} | {peaks} |", flush=True)


def main() -> None:
    """Print the table."""
    from synthetic import STEPS_PER_EPISODE, steps_lake

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=800)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--executors", nargs="+", default=["local", "processes", "ray"])
    parser.add_argument("--ingest-megabytes", type=int)
    args = parser.parse_args()
    if args.ingest_megabytes:
        compare_ingest(args.ingest_megabytes, args.executors, args.workers)
        return
    print("| function | executor | workers | episodes a second | ratio to local, 1 worker |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rewards.py").write_text(FUNCTIONS)
        steps_lake(Path(folder, "lake"), args.episodes * STEPS_PER_EPISODE)
        for name in ("computing", "waiting"):
            base = 0.0
            for executor in args.executors:
                for workers in args.workers:
                    found = in_process("--run", folder, name, executor, workers)
                    rate = found["scored"] / found["seconds"]
                    base = base or rate
                    print(f"| {name} | {executor} | {workers} | {rate:.0f} | {rate / base:.2f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        measured(*sys.argv[2:5], int(sys.argv[5]))
    elif sys.argv[1:2] == ["--ingest"]:
        ingested(*sys.argv[2:4], int(sys.argv[4]))
    else:
        main()
