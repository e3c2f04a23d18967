"""Credit from scan to commit: how long, how much memory, how it grows, and what an update costs.

    python benchmarks/bench_credit.py [sizes|text|update|ray] [--steps 1000000 5000000 20000000] [--repeat 3] [--all]

sizes   GiGPO over states of about 300 bytes with their hash stored, as a ratio to a raw Polars scan and sort of the
        same columns, and the exponent of growth. --all adds 100M steps, without state texts.
text    5M steps with states of 600 characters under a regular-expression anchor, which reads the texts.
update  one changed group among the steps of the last size: seconds and bytes, as fractions of the full job's.
ray     two Ray workers against local threads, on the last size.

Without a name, all four. Each measurement is a process of its own, so that peak memory is its own; what is compared
alternates, so that a drifting machine hits both. Prints Markdown tables for docs/benchmarks.md.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

SIZES = [1_000_000, 5_000_000, 20_000_000]
LARGEST = 100_000_000
COLUMNS = ["group_id", "episode_id", "step_index", "state_hash", "reward", "is_active", "is_action_valid"]
NORMALISED = {"kind": "substitutions", "substitutions": [{"pattern": r"[0-9]+", "replacement": "#"}]}
DISTINCT_TEXTS = 500_000


# ---------------------------------------------------------------- what is measured, each in a process of its own


def scan_and_sort(path: Path) -> None:
    """The baseline: read the columns that credit reads and put them into canonical order."""
    import lake

    lake.open(path).scan("steps").select(COLUMNS).sort("group_id", "episode_id", "step_index").collect()


def credit(path: Path, **options: Any) -> None:
    """The job: episodes and steps in, advantages committed."""
    import lake
    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    run_credit(lake.open(path), GiGPO(), **options)


def credit_all(path: Path) -> None:
    """The job over everything."""
    credit(path, force=True)


def credit_on_ray(path: Path) -> float:
    """The same on two Ray workers; when they were there, for their start is not in the figure."""
    from pipelines.executor import executor_named

    executor = executor_named("ray", 2)
    began = time.perf_counter()
    credit(path, force=True, executor=executor)
    return began


def credit_texts(path: Path) -> None:
    """The job under an anchor that normalises the texts."""
    import lake
    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    run_credit(lake.open(path), GiGPO.model_validate({"anchors": NORMALISED}), force=True)


def change_a_group(path: Path) -> None:
    """An episode is taken back; not measured."""
    import lake

    lk = lake.open(path)
    lk.retract([lk.scan("episodes").select("episode_id").head(1).collect().item()])


TASKS: dict[str, Callable[[Path], float | None]] = {
    "scan_and_sort": scan_and_sort,
    "credit": credit,
    "credit_all": credit_all,
    "credit_on_ray": credit_on_ray,
    "credit_texts": credit_texts,
    "change_a_group": change_a_group,
}


def run_task(task: str, path: Path) -> None:
    """One measured run, in this process: seconds (imports left out), peak GB, bytes read and written."""
    import duckdb  # noqa: F401 - imported before the clock starts, like the rest
    import polars  # noqa: F401

    import pipelines.credit.job  # noqa: F401

    moved = _moved()
    called = time.perf_counter()
    began = TASKS[task](path) or called
    seconds = time.perf_counter() - began
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"seconds": seconds, "peak_gb": peak_gb, "bytes": _moved() - moved}))


def _moved() -> int:
    """Bytes this process has read and written by system calls, and mapped files apart."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"]) + int(counters["wchar"])


def measure(task: str, path: Path) -> dict[str, float]:
    """One run of a task in a fresh process."""
    command = [sys.executable, __file__, "--task", task, "--lake", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


# ---------------------------------------------------------------- tables


def sizes(steps: list[int], repeat: int, *, text: bool = True) -> list[tuple[int, float]]:
    """The table of sizes; steps and median seconds of each."""
    from synthetic import steps_lake

    print("| steps | scan + sort, s | credit to commit, s | ratio | peak of scan + sort, GB | peak of credit, GB |")
    print("| --- | --- | --- | --- | --- | --- |")
    found = []
    for number in steps:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "lake")
            steps_lake(path, number, text=text and number < LARGEST)
            compared = ("scan_and_sort", "credit_all") if number < LARGEST else ("credit_all",)
            runs = [[measure(task, path) for task in compared] for _ in range(repeat if number < LARGEST else 1)]
        jobs = [run[-1] for run in runs]
        seconds = statistics.median(job["seconds"] for job in jobs)
        base = ["-"] * 3
        if len(compared) == 2:
            ratio = statistics.median(run[1]["seconds"] / run[0]["seconds"] for run in runs)
            base = [
                f"{statistics.median(run[0]['seconds'] for run in runs):.2f}",
                f"{ratio:.2f}",
                f"{max(run[0]['peak_gb'] for run in runs):.2f}",
            ]
        peak = max(job["peak_gb"] for job in jobs)
        print(f"| {number:,} | {base[0]} | {seconds:.2f} | {base[1]} | {base[2]} | {peak:.2f} |", flush=True)
        found.append((number, seconds))
    if len(found) > 1:
        print(f"\nExponent of growth: {_exponent(found):.2f}")
    return found


def _exponent(points: list[tuple[int, float]]) -> float:
    """Slope of log seconds over log steps, by least squares."""
    logs = [(math.log(steps), math.log(seconds)) for steps, seconds in points]
    mean_x, mean_y = (statistics.mean(axis) for axis in zip(*logs, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return slope


def text(repeat: int) -> None:
    """5M steps of 600 characters under a regular expression."""
    from synthetic import steps_lake

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lake")
        steps_lake(path, 5_000_000, state_bytes=600, distinct=DISTINCT_TEXTS)
        runs = [measure("credit_texts", path) for _ in range(repeat)]
    print("| steps | characters | distinct texts | credit to commit, s | peak, GB |")
    print("| --- | --- | --- | --- | --- |")
    seconds, peak = statistics.median(run["seconds"] for run in runs), max(run["peak_gb"] for run in runs)
    print(f"| 5,000,000 | 600 | {DISTINCT_TEXTS:,} | {seconds:.2f} | {peak:.2f} |")


def update(steps: int, repeat: int) -> None:
    """One changed group among many."""
    from synthetic import steps_lake

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lake")
        steps_lake(path, steps)
        full = measure("credit_all", path)
        parts = []
        for _ in range(repeat):
            measure("change_a_group", path)
            parts.append(measure("credit", path))
    print("| steps | what | s | MB moved | of the full job's time | of its bytes |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(f"| {steps:,} | everything | {full['seconds']:.2f} | {full['bytes'] / 1e6:,.0f} | 1 | 1 |")
    seconds = statistics.median(part["seconds"] for part in parts)
    moved = statistics.median(part["bytes"] for part in parts)
    fractions = f"{seconds / full['seconds']:.3f} | {moved / full['bytes']:.4f}"
    print(f"| {steps:,} | one group changed | {seconds:.2f} | {moved / 1e6:,.1f} | {fractions} |")


def ray(steps: int, repeat: int) -> None:
    """Two Ray workers against threads."""
    from synthetic import steps_lake

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lake")
        steps_lake(path, steps)
        runs = [[measure(task, path) for task in ("credit_all", "credit_on_ray")] for _ in range(repeat)]
    local, far = (statistics.median(run[i]["seconds"] for run in runs) for i in (0, 1))
    ratio = statistics.median(run[1]["seconds"] / run[0]["seconds"] for run in runs)
    print("| steps | local, s | Ray, 2 workers, s | ratio |")
    print("| --- | --- | --- | --- |")
    print(f"| {steps:,} | {local:.2f} | {far:.2f} | {ratio:.2f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", choices=["sizes", "text", "update", "ray", "everything"], default="everything"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="100M steps too")
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--lake", type=Path)
    options = parser.parse_args()
    if options.task:
        run_task(options.task, options.lake)
        return
    if options.what in ("sizes", "everything"):
        sizes(options.steps + [LARGEST] * options.all, options.repeat)
    if options.what in ("text", "everything"):
        text(options.repeat)
    if options.what in ("update", "everything"):
        update(options.steps[-1], options.repeat)
    if options.what in ("ray", "everything"):
        ray(options.steps[-1], options.repeat)


if __name__ == "__main__":
    main()
