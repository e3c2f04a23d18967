"""Credit over 1M and 5M steps, from scan to commit, as a ratio to a raw Polars scan and sort of the same columns.

    python benchmarks/bench_credit.py [--steps 1000000 5000000] [--repeat 3]

Each measurement is a process of its own, so that peak memory is its own; the two alternate, so that a drifting machine
hits both. Prints a Markdown table for docs/benchmarks.md.
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


def scan_and_sort(path: Path) -> None:
    """The baseline: read the columns that credit reads and put them into canonical order."""
    import lake

    columns = ["group_id", "episode_id", "step_index", "state_hash", "reward", "is_active", "is_action_valid"]
    steps = lake.open(path).scan("steps").select(columns)
    steps.sort("group_id", "episode_id", "step_index").collect()


def credit(path: Path) -> None:
    """The job: episodes and steps in, advantages committed."""
    import lake
    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    run_credit(lake.open(path), GiGPO(), force=True)


TASKS = {"scan_and_sort": scan_and_sort, "credit": credit}


def measure(task: str, path: Path) -> tuple[float, float]:
    """Wall seconds (imports left out) and peak memory in GB of one run in a fresh process."""
    command = [sys.executable, __file__, "--task", task, "--lake", str(path)]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return result["seconds"], result["peak_gb"]


def run_task(task: str, path: Path) -> None:
    """One measured run, in this process."""
    import duckdb  # noqa: F401 - imported before the clock starts, like the rest
    import polars  # noqa: F401

    import pipelines.credit.job  # noqa: F401

    began = time.perf_counter()
    TASKS[task](path)
    seconds = time.perf_counter() - began
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"seconds": seconds, "peak_gb": peak_gb}))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--lake", type=Path)
    options = parser.parse_args()
    if options.task:
        run_task(options.task, options.lake)
        return
    from synthetic import steps_lake

    print("| steps | scan + sort, s | credit to commit, s | ratio | peak of scan + sort, GB | peak of credit, GB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for num_steps in options.steps:
        with tempfile.TemporaryDirectory() as folder:
            steps_lake(Path(folder, "lake"), num_steps)
            pairs = [[measure(task, Path(folder, "lake")) for task in TASKS] for _ in range(options.repeat)]
        ratio = statistics.median(job[0] / base[0] for base, job in pairs)
        base_s, job_s = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
        base_gb, job_gb = (max(pair[i][1] for pair in pairs) for i in (0, 1))
        print(f"| {num_steps:,} | {base_s:.2f} | {job_s:.2f} | {ratio:.2f} | {base_gb:.2f} | {job_gb:.2f} |")


if __name__ == "__main__":
    main()
