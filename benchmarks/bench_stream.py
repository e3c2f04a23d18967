"""The training stream over 300k token rows, as a ratio to raw Parquet decode of the same columns.

    python benchmarks/bench_stream.py [--rows 300000] [--repeat 3]

Raw decode reads every row group with two threads into Arrow and drops it. The stream does what training does: plan,
order by hash, decode, gather, pack to the token budget, advantages left out (loss sft) or joined (loss awr). Each
measurement is a process of its own; the kinds alternate. Prints a Markdown table for docs/benchmarks.md.
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


def raw_decode(path: Path) -> int:
    """The baseline: every row group of the table, two threads."""
    import pyarrow.parquet as pq

    import lake

    def read(file: str) -> int:
        with pq.ParquetFile(file) as parquet:
            return sum(
                parquet.read_row_group(group, columns=COLUMNS, use_threads=False).num_rows
                for group in range(parquet.num_row_groups)
            )

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(read, [file.path for file in lake.open(path).snapshot().files("tokens")]))


def stream(path: Path) -> int:
    """One epoch of PPO batches (behaviour log-probabilities come along), consumed and dropped."""
    import lake
    from trainer.advantages import resolve_advantages
    from trainer.config import TrainConfig
    from trainer.losses import LOSSES
    from trainer.plan import Plan
    from trainer.selection import select
    from trainer.stream import Stream

    snapshot = lake.open(path).snapshot()
    config = TrainConfig(model="none", loss="ppo", episodes_per_step=64, token_budget=16_384, live_only=False)
    needs = LOSSES["ppo"].needs
    plan = Plan(select(snapshot, config, needs, source=resolve_advantages(snapshot, None)), config)
    rows = 0
    with Stream(snapshot, plan, needs, config) as batches:
        for step, micro_batches in batches.steps():
            assert micro_batches
            rows += 20 * len(step.episodes_E)
    return rows


TASKS = {"raw_decode": raw_decode, "stream": stream}


def measure(task: str, path: Path) -> tuple[float, float]:
    """Wall seconds (imports left out) and peak memory in GB of one run in a fresh process."""
    command = [sys.executable, __file__, "--task", task, "--lake", str(path)]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return result["seconds"], result["peak_gb"]


def run_task(task: str, path: Path) -> None:
    """One measured run, in this process."""
    import trainer.stream  # noqa: F401 - imported before the clock starts

    began = time.perf_counter()
    rows = TASKS[task](path)
    seconds = time.perf_counter() - began
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"seconds": seconds, "peak_gb": peak_gb, "rows": rows}))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--lake", type=Path)
    options = parser.parse_args()
    if options.task:
        run_task(options.task, options.lake)
        return
    from synthetic import tokens_lake

    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lake")
        run_credit(tokens_lake(path, options.rows), GiGPO())
        pairs = [[measure(task, path) for task in TASKS] for _ in range(options.repeat)]
    speed = statistics.median(raw[0] / ours[0] for raw, ours in pairs)
    raw_s, ours_s = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    print("| rows | raw decode, s | stream, s | stream speed / raw decode | rows/s | peak of stream, GB |")
    print("| --- | --- | --- | --- | --- | --- |")
    peak = max(ours[1] for _, ours in pairs)
    rate = options.rows / ours_s
    print(f"| {options.rows:,} | {raw_s:.2f} | {ours_s:.2f} | {speed:.2f} | {rate:,.0f} | {peak:.2f} |")


if __name__ == "__main__":
    main()
