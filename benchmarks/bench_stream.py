"""The training stream over 300k token rows, as a ratio to raw Parquet decode of the same columns.

    python benchmarks/bench_stream.py [--rows 300000] [--repeat 3] [--exits 50]

Raw decode reads every row group with two threads into Arrow and drops it. The stream does what training does: decode,
gather in the order of the hashes, join advantages and behaviour log-probabilities, pack to the token budget, weigh; one
epoch, so that every row is decoded once and used once. Selecting and planning come before it, once per run, and are
timed apart. Each measurement is a process of its own; the kinds alternate. With --exits, so many processes end in the
middle of a stream, one half of them by an error; how many were aborted is printed. Prints Markdown for
docs/benchmarks.md.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

COLUMNS = ["context_ids", "action_ids", "action_mask", "action_logprobs"]


def raw_decode(path: Path) -> dict[str, float]:
    """The baseline: every row group of the table, two threads."""
    import pyarrow.parquet as pq

    import lake

    def read(file: str) -> int:
        with pq.ParquetFile(file) as parquet:
            return sum(
                parquet.read_row_group(group, columns=COLUMNS, use_threads=False).num_rows
                for group in range(parquet.num_row_groups)
            )

    files = [file.path for file in lake.open(path).snapshot().files("tokens")]
    began = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(read, files)) > 0
    return {"seconds": time.perf_counter() - began}


def stream(path: Path) -> dict[str, float]:
    """One epoch of PPO batches (behaviour log-probabilities come along), consumed and dropped."""
    import lake
    from trainer.config import TrainConfig
    from trainer.data.advantages import resolve_advantages
    from trainer.data.plan import Plan
    from trainer.data.selection import select
    from trainer.data.stream import Stream
    from trainer.losses import LOSSES

    snapshot = lake.open(path).snapshot()
    began = time.perf_counter()
    config = TrainConfig(model="none", loss="ppo", episodes_per_step=64, token_budget=16_384, live_only=False)
    needs = LOSSES["ppo"].needs
    plan = Plan(select(snapshot, config, needs, source=resolve_advantages(snapshot, None)), config)
    planned = time.perf_counter()
    with Stream(snapshot, plan, needs, config) as batches:
        for _, micro_batches in batches.steps():
            assert micro_batches
    return {"seconds": time.perf_counter() - planned, "plan_seconds": planned - began}


TASKS = {"raw_decode": raw_decode, "stream": stream}


def measure(task: str, path: Path) -> dict[str, float]:
    """Wall seconds (imports left out) and peak memory in GB of one run in a fresh process."""
    command = [sys.executable, __file__, "--task", task, "--lake", str(path)]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def run_task(task: str, path: Path) -> None:
    """One measured run, in this process."""
    import numpy as np

    import trainer.data.stream  # noqa: F401 - imported before the clock starts

    # A virtual machine's host gives memory at its first touch, which takes longer than decoding into it.
    np.ones(100_000_000, np.float64)
    found = TASKS[task](path)
    print(json.dumps(found | {"peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}))


def leave(path: Path, how: str) -> None:
    """Begin a stream and leave the process in the middle of it, threads at work."""
    import lake
    from trainer.config import TrainConfig
    from trainer.data.plan import Plan
    from trainer.data.selection import select
    from trainer.data.stream import Stream
    from trainer.losses import Needs

    snapshot = lake.open(path).snapshot()
    config = TrainConfig(model="none", loss="sft", cache_bytes=1 << 24, where="episode_id % 4 = 0")
    plan = Plan(select(snapshot, config, Needs()), config)
    steps = Stream(snapshot, plan, Needs(), config).steps()
    next(steps)
    if how == "error":
        msg = "on purpose"
        raise RuntimeError(msg)


def aborted(path: Path, exits: int) -> int:
    """Of so many processes that leave a stream, how many ended by a signal or with another code than theirs."""
    codes = {"end": 0, "error": 1}
    bad = 0
    for number in range(exits):
        how = list(codes)[number % 2]
        command = [sys.executable, __file__, "--leave", how, "--lake", str(path)]
        bad += subprocess.run(command, capture_output=True, check=False).returncode != codes[how]
    return bad


def print_table(rows: int, pairs: list[list[dict[str, float]]]) -> None:
    """Medians over the repetitions."""
    raw, ours, plan = (
        statistics.median(pair[i][name] for pair in pairs)
        for i, name in ((0, "seconds"), (1, "seconds"), (1, "plan_seconds"))
    )
    ratio = statistics.median(pair[0]["seconds"] / pair[1]["seconds"] for pair in pairs)
    peak = max(pair[1]["peak_gb"] for pair in pairs)
    print("| rows | raw decode, s | plan, s | stream, s | stream speed / raw decode | rows/s | peak of stream, GB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(f"| {rows:,} | {raw:.2f} | {plan:.2f} | {ours:.2f} | {ratio:.2f} | {rows / ours:,.0f} | {peak:.2f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--exits", type=int, default=0)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--leave", choices=("end", "error"))
    parser.add_argument("--lake", type=Path)
    options = parser.parse_args()
    if options.task:
        run_task(options.task, options.lake)
        return
    if options.leave:
        leave(options.lake, options.leave)
        return
    from synthetic import tokens_lake

    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lake")
        run_credit(tokens_lake(path, options.rows), GiGPO())
        print_table(options.rows, [[measure(task, path) for task in TASKS] for _ in range(options.repeat)])
        if options.exits:
            print(f"\n{aborted(path, options.exits)} of {options.exits} process exits aborted")


if __name__ == "__main__":
    main()
