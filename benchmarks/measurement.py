"""The rows of docs/benchmarks.md: which benchmark measures each, and the JSON format that all of them share.

`python benchmarks` runs `ROWS` one after another. Each script writes a `Measurement` to the file named by
`--measurement`; the runner adds command, machine, date and commit, and stores the `Row` in benchmarks/results. The page
and its pictures are made from these files alone (docs/generate/benchmarks_page.py).
"""

import argparse
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = Path(__file__).resolve().parent / "results"
QUIET_CORES = 0.2
"""Most cores that other processes may keep busy around a row whose times are to be trusted."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job, and a baseline that does the least that the job must do."""

    job: str
    size: str
    seconds: float
    """Of the job, by `clock`; the median where a script repeats it."""
    clock: Literal["wall", "CPU"]
    throughput: float
    unit: str
    """Of the throughput."""
    peak_gb: float | None
    """Peak memory of the job's process; None where several processes share the work."""
    baseline: str
    baseline_seconds: float
    ratio: float
    """Seconds of the job over those of its baseline for the same work, median of the repetitions."""
    waits_ms: dict[str, float] = {}
    """Times that a user waits for, by what they wait for."""
    aims: dict[str, float] = {}
    """Upper limits: of `ratio`, of `peak_gb`, or of a wait by its name."""

    def figure(self, name: str) -> float:
        """Return the figure that an aim limits."""
        measured = {"ratio": self.ratio, "peak_gb": self.peak_gb, **self.waits_ms}[name]
        assert measured is not None
        return measured

    @property
    def missed(self) -> list[str]:
        """Names of the aims that the figures exceed."""
        return [name for name, limit in self.aims.items() if self.figure(name) > limit]


class Machine(msgspec.Struct, frozen=True):
    """What a row was measured on."""

    cpu: str
    cores: int
    memory_gb: int
    python: str


class Row(Measurement, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A file of benchmarks/results."""

    command: str
    machine: Machine
    date: str
    commit: str
    other_cores: float
    """Cores that other processes kept busy just before or after the run."""


class Benchmark(msgspec.Struct, frozen=True):
    """The script of a row, with arguments for `make bench`, and for a trial that takes seconds."""

    script: str
    arguments: str
    trial: str


ROWS = {
    "ingest": Benchmark(
        "bench_ingest", "--megabytes 400 --repeat 2 --files jsonl", "--megabytes 2 --repeat 1 --files jsonl"
    ),
    "formats": Benchmark(
        "bench_formats",
        "--megabytes 150 --repeat 1 --formats claude_code",
        "--megabytes 1 --repeat 1 --formats claude_code",
    ),
    "credit": Benchmark("bench_credit", "sizes --steps 5000000 --repeat 2", "sizes --steps 20000 --repeat 1"),
    "credit_loop": Benchmark("bench_credit", "loop --steps 1000000 --repeat 2", "loop --steps 20000 --repeat 1"),
    "anchors": Benchmark("bench_anchors", "--steps 0", "--rows 64 --steps 0"),
    "sql": Benchmark("bench_sql", "--steps 5000000 --files 500 --repeat 3", "--steps 20000 --files 10 --repeat 1"),
    "stream": Benchmark("bench_stream", "--rows 150000 --repeat 3", "--rows 400 --repeat 1"),
    "train": Benchmark(
        "bench_train", "--workload rows --fastest --repeat 1", "--workload rows --fastest --repeat 1 --steps 3"
    ),
    "proxy": Benchmark("bench_proxy", "--at-once 1 --runs 3 --calls 600", "--at-once 1 --runs 1 --calls 20"),
    "recorder": Benchmark("bench_recorder", "--seconds 5 --only-unpaused", "--seconds 0.1 --only-unpaused"),
    "export": Benchmark(
        "bench_export",
        "--megabytes 100 --repeat 1 --formats messages",
        "--megabytes 1 --repeat 1 --formats messages",
    ),
    "commits": Benchmark("bench_lake", "--commits 0 --each 20", "--commits 0 --each 2 --writers 2 --rows 200"),
    "viewer": Benchmark("bench_viewer", "--episodes 1000000 --few", "--episodes 10000 --few"),
    "startup": Benchmark("bench_startup", "--rounds 5", "--rounds 1"),
}
"""By the name of the row's file, in the order of the page."""


def add_measurement_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the file of the row."""
    parser.add_argument("--measurement", type=Path, help="JSON file for the row of docs/benchmarks.md")


def write_measurement(path: Path | None, measurement: Measurement) -> None:
    """Write a measurement where the option asks for it."""
    if path is not None:
        path.write_bytes(msgspec.json.encode(measurement))


def read_row(path: Path) -> Row | None:
    """Read a stored row; None if there is no such file."""
    return msgspec.json.decode(path.read_bytes(), type=Row) if path.exists() else None


def read_rows() -> dict[str, Row]:
    """Read the stored rows by name, in the order of the page."""
    rows = {name: read_row(FOLDER / f"{name}.json") for name in ROWS}
    return {name: row for name, row in rows.items() if row is not None}
