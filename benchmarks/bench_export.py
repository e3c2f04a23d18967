"""Export as a ratio to reading the rows that it is made of.

    python benchmarks/bench_export.py [--megabytes 360] [--repeat 3] [--formats jsonl messages ...]

A lake of chats with tool calls (those of bench_formats.py, groups of four, each episode with an outcome), exported once
in each format. Baseline: Polars reads the tables `episodes` and `steps` of the same lake whole. Each measurement is a
process of its own, pinned to one core. Prints a Markdown table; the measurement is that of the last format.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402

FORMATS = ("jsonl", "messages", "messages-parquet", "unpaired", "trl-completions", "atif", "eval-protocol", "massgen")
BASELINE = "read"


def make(folder: Path, megabytes: int) -> Path:
    """A lake of chats, half of each group a success."""
    import polars as pl
    from bench_formats import make_messages

    import lake

    rows = make_messages(folder, megabytes)
    chats = lake.open(folder / "lake", create=True)
    chats.ingest(rows, run_id="chats")
    rows.unlink()
    episodes = chats.scan("episodes").select("episode_id", "rollout_index").collect()
    chats.add_scores(episodes.select("episode_id", value=(pl.col("rollout_index") % 2).cast(pl.Float64)), name="judge")
    return folder / "lake"


def run_task(task: str, path: Path) -> None:
    """One measured run, in this process."""
    import lake
    from lake.export import find_target
    from lake.export.job import ExportRequest, export
    from lake.export.target import Choices

    chats = lake.open(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        began, cpu_began = time.perf_counter(), time.process_time()
        if task == BASELINE:
            rows = sum(chats.scan(table).collect().height for table in ("episodes", "steps"))
        else:
            asked = ExportRequest(find_target(task), Path(folder, "out"), choices=Choices(score="judge"))
            rows = export(chats, asked).rows
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"rows": rows, "seconds": seconds, "cpu": cpu, "peak_gb": peak, "mb": size / 1e6}))


def measure(task: str, path: Path) -> dict[str, Any]:
    """Figures of one run in a fresh process on one core."""
    command = [sys.executable, __file__, "--task", task, "--lake", str(path)]
    environment = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    pin = {"preexec_fn": lambda: os.sched_setaffinity(0, {0})} if hasattr(os, "sched_setaffinity") else {}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, **pin)  # type: ignore[call-overload]
    return dict(json.loads(done.stdout))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=360)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--task")
    add_measurement_option(parser)
    parser.add_argument("--lake", type=Path)
    arguments = parser.parse_args()
    if arguments.task:
        run_task(arguments.task, arguments.lake)
        return
    print("| format | rows | MB | export, CPU s | ratio (CPU) | ratio (wall) | peak, GB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder), arguments.megabytes)
        for name in arguments.formats:
            runs = [(measure(BASELINE, path), measure(name, path)) for _ in range(arguments.repeat)]
            ratios = [statistics.median(run[cost] / base[cost] for base, run in runs) for cost in ("cpu", "seconds")]
            rows, megabytes = runs[0][1]["rows"], runs[0][1]["mb"]
            baseline_seconds, seconds = (statistics.median(pair[side]["cpu"] for pair in runs) for side in (0, 1))
            peak_gb = max(run["peak_gb"] for _, run in runs)
            cells = [f"{rows:,}", f"{megabytes:,.0f}", f"{seconds:.1f}", *(f"{ratio:.1f}" for ratio in ratios)]
            print(f"| {name} | {' | '.join(cells)} | {peak_gb:.2f} |", flush=True)
        measurement = Measurement(
            job=f"export, {name}",
            size=f"{megabytes:,.0f} MB, {rows:,} episodes",
            seconds=seconds,
            clock="CPU",
            throughput=megabytes / seconds,
            unit="MB/s",
            peak_gb=peak_gb,
            baseline="Polars reads the rows",
            baseline_seconds=baseline_seconds,
            ratio=ratios[0],
        )
        write_measurement(arguments.measurement, measurement)


if __name__ == "__main__":
    main()
