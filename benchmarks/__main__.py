"""Run the benchmarks of docs/benchmarks.md one after another, and store a row of figures for each.

    python benchmarks [NAME ...] [--again] [--trial FOLDER]

A row that exists for this commit and machine is not measured again, so an interrupted run continues where it stopped.
Rows around which other work kept more than a fifth of a core busy are an exception. A row that fails, or exceeds its
limit of time, is removed and reported; the others still run, and the exit status is 1. `make bench` then writes the
page.
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from measurement import FOLDER, QUIET_CORES, ROWS, Benchmark, Machine, Measurement, Row, read_row  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
REPORT_SECONDS = 15
"""Interval of progress lines."""
LIMIT_SECONDS = 360
"""Of one row."""
SAMPLE_SECONDS = 1.0
"""For which the load of other processes is watched, before and after a row."""


def describe_machine() -> Machine:
    """Return the processor, cores, memory and Python of this machine."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = models[0] if models else platform.processor()
    return Machine(cpu, os.cpu_count() or 1, round(memory / 1e9), platform.python_version())


def busy_seconds() -> float:
    """Return the CPU seconds of all processes since the machine started; 0 where the system does not count them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def count_busy_cores() -> float:
    """Return how many cores are busy while this process waits."""
    began, busy = time.monotonic(), busy_seconds()
    time.sleep(SAMPLE_SECONDS)
    return (busy_seconds() - busy) / (time.monotonic() - began)


def run_script(name: str, command: Sequence[str]) -> None:
    """Run a benchmark, with a line of progress now and then.

    Raises:
        RuntimeError: it failed, or exceeded the limit of time.
    """
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        while True:
            try:
                status = process.wait(REPORT_SECONDS)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - began
                print(f"   {name}: {seconds:.0f} s", flush=True)
                if seconds < LIMIT_SECONDS:
                    continue
                os.killpg(process.pid, signal.SIGKILL)
                msg = f"stopped after {LIMIT_SECONDS} s"
                raise RuntimeError(msg) from None
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            break
    if status:
        msg = f"exit status {status}"
        raise RuntimeError(msg)


def measure_row(name: str, arguments: str, machine: Machine, commit: str) -> Row:
    """Run the benchmark of a row.

    Raises:
        RuntimeError: it failed, or wrote no measurement.
    """
    script = f"benchmarks/{ROWS[name].script}.py"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measurement.json")
        command = [sys.executable, script, *arguments.split(), "--measurement", str(path)]
        cores_before = count_busy_cores()
        run_script(name, command)
        cores_after = count_busy_cores()
        if not path.exists():
            msg = "it wrote no measurement"
            raise RuntimeError(msg)
        measurement = msgspec.json.decode(path.read_bytes(), type=Measurement)
    return Row(
        **_round_figures(msgspec.structs.asdict(measurement)),
        command=f"python {script} {arguments}",
        machine=machine,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        commit=commit,
        other_cores=round(max(cores_before, cores_after), 2),
    )


def _round_figures(fields: dict[str, Any]) -> dict[str, Any]:
    """Round measured figures to four digits, so that the stored files are readable."""
    return {
        name: float(f"{field:.4g}")
        if isinstance(field, float)
        else _round_figures(field)
        if isinstance(field, dict)
        else field
        for name, field in fields.items()
    }


def is_current(row: Row | None, benchmark: Benchmark, machine: Machine, commit: str) -> bool:
    """Return whether a stored row need not be measured again."""
    if row is None or row.other_cores > QUIET_CORES:
        return False
    command = f"python benchmarks/{benchmark.script}.py {benchmark.arguments}"
    return (row.command, row.machine, row.commit) == (command, machine, commit)


def main(arguments: Sequence[str]) -> int:
    """Measure rows; the exit status."""
    parser = argparse.ArgumentParser(prog="python benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows, by default all: {', '.join(ROWS)}")
    parser.add_argument("--again", action="store_true", help="also measure rows that this commit has already")
    parser.add_argument("--trial", type=Path, metavar="FOLDER", help="tiny sizes, for rows in another folder")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - ROWS.keys()):
        parser.error(f"no row is called {', '.join(unknown)}; the rows are {', '.join(ROWS)}")
    folder = options.trial or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    names, failures = options.names or list(ROWS), {}
    for number, name in enumerate(names, 1):
        benchmark, path = ROWS[name], folder / f"{name}.json"
        if not (options.again or options.trial) and is_current(read_row(path), benchmark, machine, commit):
            print(f"== {name} ({number} of {len(names)}): measured at this commit; --again measures it again")
            continue
        print(f"== {name} ({number} of {len(names)})", flush=True)
        path.unlink(missing_ok=True)
        try:
            row = measure_row(name, benchmark.trial if options.trial else benchmark.arguments, machine, commit)
        except RuntimeError as error:
            failures[name] = str(error)
            print(f"   {name} FAILED: {error}; the next row follows", flush=True)
            continue
        path.write_bytes(msgspec.json.format(msgspec.json.encode(row), indent=2) + b"\n")
        print(f"   {name}: ratio {row.ratio:.2f}; others kept {row.other_cores:.1f} cores busy", flush=True)
    for name, reason in failures.items():
        print(f"FAILED: {name}: {reason}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
