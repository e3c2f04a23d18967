"""Ingest of synthetic tau-bench files as a ratio to `orjson.loads` of the same file, and its peak memory.

    python benchmarks/bench_ingest.py [--megabytes 1000] [--repeat 3] [--files json jsonl] [--keep FOLDER]

Both work on one core: each measurement is a process of its own, pinned to one (where the system can), and the two
alternate, so that a drifting machine hits both. The ratio is of CPU seconds; on a machine that does nothing else they
are wall seconds. The baseline is what a user would write: read the file, `orjson.loads` it (every line of it for
JSONL), with Python's defaults. Prints a Markdown table; the measurement is that of the last file.
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


def orjson_loads(path: Path) -> int:
    """The baseline: the whole file as Python objects."""
    import orjson

    if path.suffix == ".json":
        return len(orjson.loads(path.read_bytes()))
    with path.open("rb") as file:
        return len([orjson.loads(line) for line in file])


def ingest(path: Path) -> int:
    """The job: episodes and steps in a new lake, committed."""
    import lake
    from lake.write.ingest import ingest as ingest_file

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        report = ingest_file(lake.open(Path(folder, "lake"), create=True), path)
    assert report.new == report.records
    return report.new


TASKS = {"orjson": orjson_loads, "ingest": ingest}


def run_task(task: str, path: Path) -> None:
    """One measured run, in this process."""
    import orjson  # noqa: F401 - imported before the clock starts, like the rest

    import lake
    import lake.write.ingest
    from lake.formats.registry import FORMATS
    from lake.records import EpisodeRecord, StepRecord

    # Commands import what they need when they need it: all of that before the clock starts.
    with tempfile.TemporaryDirectory() as folder:
        small = lake.open(Path(folder, "small"), create=True)
        small.append([EpisodeRecord(task_id="t", steps=[StepRecord(state="s", action="a")])], run_id="r")
        assert FORMATS

    began, cpu_began = time.perf_counter(), time.process_time()
    records = TASKS[task](path)
    figures = {
        "records": records,
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - cpu_began,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    print(json.dumps(figures))


def measure(task: str, path: Path, core: int | None) -> dict[str, Any]:
    """Figures of one run in a fresh process on one core."""

    def pin() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})

    command = [sys.executable, __file__, "--task", task, "--file", str(path)]
    one_thread = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread, preexec_fn=pin)
    return dict(json.loads(done.stdout))


def as_jsonl(path: Path) -> Path:
    """The same episodes as our own JSONL."""
    import msgspec

    from lake.formats.registry import FORMATS

    target = path.with_suffix(".jsonl")
    with target.open("wb") as file:
        for item in FORMATS["tau_bench"].read(path):
            assert isinstance(item, tuple)
            file.write(msgspec.json.encode(item[1]) + b"\n")
    return target


def compare(name: str, baseline: str, path: Path, repeat: int, core: int | None) -> Measurement:
    """Print a row of the table, and return its figures."""
    runs = [{task: measure(task, path, core) for task in TASKS} for _ in range(repeat)]

    def median(task: str, figure: str) -> float:
        return float(statistics.median(run[task][figure] for run in runs))

    def ratio(clock: str) -> float:
        return float(statistics.median(run["ingest"][clock] / run["orjson"][clock] for run in runs))

    megabytes, episodes = path.stat().st_size / 1e6, runs[0]["ingest"]["records"]
    cells = [
        f"{megabytes:,.0f}",
        f"{episodes:,}",
        *(f"{median(task, 'cpu'):.2f}" for task in TASKS),
        f"{ratio('cpu'):.2f}",
        f"{ratio('seconds'):.2f}",
        *(f"{max(run[task]['peak_gb'] for run in runs):.2f}" for task in TASKS),
    ]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return Measurement(
        job=f"ingest, {name}",
        size=f"{megabytes:,.0f} MB, {episodes:,} episodes",
        seconds=median("ingest", "cpu"),
        clock="CPU",
        throughput=megabytes / median("ingest", "cpu"),
        unit="MB/s",
        peak_gb=max(run["ingest"]["peak_gb"] for run in runs),
        baseline=baseline,
        baseline_seconds=median("orjson", "cpu"),
        ratio=ratio("cpu"),
        aims={"ratio": 3.0, "peak_gb": 1.0},
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--files", nargs="+", choices=("json", "jsonl"), default=("json", "jsonl"))
    parser.add_argument("--keep", type=Path, help="folder for the files, which are made if they are not there")
    add_measurement_option(parser)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    if options.task:
        run_task(options.task, options.file)
        return
    from tau_like import write

    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    print(
        "| file | MB | episodes | orjson, CPU s | ingest, CPU s | ratio | ratio of wall s | peak of orjson, GB | "
        "peak of ingest, GB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        path = folder / f"tau-{options.megabytes}.json"
        if not path.exists():
            write(path, options.megabytes * 1_000_000)
        if "json" in options.files:
            measurement = compare("a JSON array", "orjson.loads of the file", path, options.repeat, core)
        if "jsonl" in options.files:
            lines = path.with_suffix(".jsonl")
            lines = lines if lines.exists() else as_jsonl(path)
            measurement = compare("JSONL", "orjson.loads of each line", lines, options.repeat, core)
        write_measurement(options.measurement, measurement)


if __name__ == "__main__":
    main()
