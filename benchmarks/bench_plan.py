"""The plan of an epoch: seconds and memory over a lake of lengths, in which token rows hold no tokens.

    python benchmarks/bench_plan.py [--episodes 1000000 10000000] [--repeat 1]

Selecting and planning read lengths and keys alone, so a lake without tokens costs what one with tokens costs. Every
episode is one step; sequences have 50 to 1,500 tokens, and an optimizer step takes 256 episodes. Each size is planned
in a process of its own, which tells how much memory it held at most. Prints Markdown for docs/lab-log.md.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

EPISODES_PER_STEP = 256


def plan(path: Path) -> dict[str, float]:
    """Seconds of the parts of a plan, and the memory that the process held at most, in GB."""
    import lake
    from trainer.config import TrainConfig
    from trainer.data.plan import Plan
    from trainer.data.selection import select

    config = TrainConfig(model="none", loss="sft", episodes_per_step=EPISODES_PER_STEP, token_budget=16_384)
    began = time.perf_counter()
    snapshot = lake.open(path).snapshot()
    selection = select(snapshot, config, config.loss.needs)
    selected = time.perf_counter()
    made = Plan(selection, config)
    planned = time.perf_counter()
    assert made.plan_hash
    hashed = time.perf_counter()
    steps = len(made.steps)
    return {
        "select": selected - began,
        "plan": planned - selected,
        "hash": hashed - planned,
        "cpu": time.process_time(),
        "steps": steps,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def measured(path: Path) -> dict[str, float]:
    """The figures of one fresh process."""
    ended = subprocess.run([sys.executable, __file__, "--lake", str(path)], capture_output=True, text=True, check=True)
    return dict(json.loads(ended.stdout))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--lake", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lake is not None:
        print(json.dumps(plan(arguments.lake)))
        return
    from synthetic import lengths_lake

    print("| episodes | select s | plan s | hash s | in all s | processor s | peak GB | optimizer steps |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for episodes in arguments.episodes:
        with tempfile.TemporaryDirectory() as folder:
            lengths_lake(Path(folder, "lake"), episodes)
            runs = [measured(Path(folder, "lake")) for _ in range(arguments.repeat)]
        found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        total = found["select"] + found["plan"] + found["hash"]
        print(
            f"| {episodes:,} | {found['select']:.1f} | {found['plan']:.1f} | {found['hash']:.1f} | {total:.1f} "
            f"| {found['cpu']:.1f} | {found['peak_gb']:.2f} | {found['steps']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
