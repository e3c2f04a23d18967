"""How long small commands take, as ratios to a bare interpreter and to importing the engines they cannot do without.

    python benchmarks/bench_startup.py [trajectories.json] [--rounds 7]

Every line is the least of several runs, taken in turns so that a busy minute falls on all of them alike: wall-clock and
CPU seconds of a process of its own. `over pass` is the ratio to `python -c pass`, `over engines` that to
`python -c "import polars, duckdb"`. Without a file, 4 MB of tau-bench's shape are made up.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tau_like
from measurement import Measurement, add_measurement_option, write_measurement

TRAJLAKE = [sys.executable, "-c", "from lake.cli import main; main()"]


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a command."""
    began, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, cpu


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="trajectories in tau-bench's shape")
    parser.add_argument("--rounds", type=int, default=7)
    add_measurement_option(parser)
    options = parser.parse_args()
    source_file = options.file
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = source_file or folder / "made-up.json"
        if source_file is None:
            tau_like.write(source, 4 << 20)
        lake = ["--lake", str(folder / "lake")]
        subprocess.run([*TRAJLAKE, "ingest", str(source), *lake], check=True, stdout=subprocess.DEVNULL)
        best: dict[str, tuple[float, float]] = {}
        for number in range(options.rounds):
            fresh = ["--lake", str(folder / f"lake-{number}")]
            commands = {
                "python -c pass": [sys.executable, "-c", "pass"],
                "import polars, duckdb": [sys.executable, "-c", "import polars, duckdb"],
                "trajlake -h": [*TRAJLAKE, "-h"],
                "trajlake tables": [*TRAJLAKE, "tables", *lake],
                "trajlake sql": [*TRAJLAKE, "sql", "SELECT task_id, avg(env_return) FROM episodes GROUP BY 1", *lake],
                "trajlake show": [*TRAJLAKE, "show", "--task", "0", "--rollout", "0", *lake],
                "trajlake ingest": [*TRAJLAKE, "ingest", str(source), *fresh],
                "trajlake credit gigpo": [*TRAJLAKE, "credit", "gigpo", *fresh],
            }
            for name, command in commands.items():
                wall, cpu = seconds(command)
                known = best.get(name, (wall, cpu))
                best[name] = (min(wall, known[0]), min(cpu, known[1]))
        bare, engines = best["python -c pass"], best["import polars, duckdb"]
        print("| command | wall s | CPU s | over pass | over engines |\n| --- | --- | --- | --- | --- |")
        for name, (wall, cpu) in best.items():
            print(f"| {name} | {wall:.2f} | {cpu:.2f} | {wall / bare[0]:.1f} | {wall / engines[0]:.2f} |")
    sql_seconds = best["trajlake sql"][0]
    measurement = Measurement(
        job="start-up of `trajlake sql`",
        size="4 MB of trajectories",
        seconds=sql_seconds,
        clock="wall",
        throughput=1 / sql_seconds,
        unit="commands/s",
        peak_gb=None,
        baseline="`import polars, duckdb`",
        baseline_seconds=engines[0],
        ratio=sql_seconds / engines[0],
        waits_ms={f"`{name}`": wall * 1e3 for name, (wall, _) in best.items() if name.startswith("trajlake")},
        aims={
            "`trajlake tables`": 500,
            "`trajlake sql`": 500,
            "`trajlake ingest`": 800,
            "`trajlake credit gigpo`": 1500,
        },
    )
    write_measurement(options.measurement, measurement)


if __name__ == "__main__":
    main()
