"""The lake's own costs: commits by eight writers, opening a lake of many commits, bytes on disk.

    python benchmarks/bench_lake.py [--commits 10000] [--writers 8] [--each 50] [--rows 20000]

Baselines of the same run: delta-rs' own writer with its defaults. Prints Markdown tables; the measurement is
that of the writers. `--commits 0` leaves the opening out.
"""

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402
import polars as pl  # noqa: E402
from deltalake import CommitProperties, DeltaTable, Schema, write_deltalake  # noqa: E402
from deltalake.exceptions import CommitFailedError  # noqa: E402
from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402

import lake  # noqa: E402
from lake import ids  # noqa: E402
from lake.records import EpisodeRecord, StepRecord  # noqa: E402
from lake.storage import encoding  # noqa: E402
from lake.storage.objects import Objects  # noqa: E402
from lake.storage.store import Store  # noqa: E402
from lake.tables import TABLES  # noqa: E402
from lake.tables.contracts import conform  # noqa: E402

BATCH = 8
STEPS = 10


def batch(writer: int, number: int) -> list[EpisodeRecord]:
    """A group of siblings, as a collector records it."""
    return [
        EpisodeRecord(
            task_id=f"{writer}.{number}",
            rollout_index=index,
            steps=[StepRecord(state=f"state {index} {n} " * 20, action="go north", reward=0.0) for n in range(STEPS)],
        )
        for index in range(BATCH)
    ]


def record(path: Path, writer: int, each: int, gate: object, out: object) -> None:
    """A writer of ours: each batch is two children's commits and one of `episodes`, exactly once."""
    lk = lake.open(path)
    gate.wait()  # type: ignore[attr-defined]
    took = []
    with lk.job(kind="collect", run_id=f"run {writer}") as job:
        for number in range(each):
            began = time.perf_counter()
            assert job.record(batch(writer, number)).new == BATCH
            took.append(time.perf_counter() - began)
    out.put(took)  # type: ignore[attr-defined]


def plain(path: Path, writer: int, each: int, gate: object, out: object) -> None:
    """The baseline: the same rows of `steps` alone, appended by delta-rs with its defaults, again when it gives up."""
    rows = pl.DataFrame(
        {"run": [f"run {writer}"] * BATCH * STEPS, "state": ["state 0 0 " * 20] * BATCH * STEPS, "reward": 0.0}
    )
    gate.wait()  # type: ignore[attr-defined]
    took = []
    for _ in range(each):
        began = time.perf_counter()
        while True:
            try:
                write_deltalake(
                    str(path), rows.to_arrow(), mode="append", commit_properties=CommitProperties(max_commit_retries=15)
                )
            except CommitFailedError:
                continue
            break
        took.append(time.perf_counter() - began)
    out.put(took)  # type: ignore[attr-defined]


def race(task: Callable[..., None], path: Path, writers: int, each: int) -> tuple[float, list[float]]:
    """Seconds from the gate to the last commit, and the seconds of every batch."""
    context = multiprocessing.get_context("spawn")
    gate, out = context.Barrier(writers + 1), context.Queue()
    processes = [context.Process(target=task, args=(path, n, each, gate, out)) for n in range(writers)]
    for process in processes:
        process.start()
    gate.wait()
    began = time.perf_counter()
    took = [seconds for _ in processes for seconds in out.get()]
    seconds = time.perf_counter() - began
    for process in processes:
        process.join()
    return seconds, took


def commits(folder: Path, writers: int, each: int) -> Measurement:
    """Print rate and latency of concurrent writers, and return them."""
    lake.open(folder / "lake", create=True)
    rows = pl.DataFrame({"run": ["r"], "state": ["s"], "reward": [0.0]}).head(0).to_arrow()
    DeltaTable.create(str(folder / "plain"), schema=Schema.from_arrow(rows.schema))
    print("| writer | batches/s | commits/s | median, ms | 99th percentile, ms |\n| --- | --- | --- | --- | --- |")
    batch_seconds, waits_ms = [], {}
    for name, task, path, per_batch in (
        ("delta-rs defaults, one table, duplicates possible", plain, folder / "plain", 1),
        ("lake: steps, then episodes, exactly once", record, folder / "lake", 2),
    ):
        seconds, took = race(task, path, writers, each)
        rate = len(took) / seconds
        median, tail = statistics.median(took) * 1e3, statistics.quantiles(took, n=100)[98] * 1e3
        print(f"| {name} | {rate:.0f} | {rate * per_batch:.0f} | {median:.0f} | {tail:.0f} |")
        batch_seconds.append(1 / rate)
        waits_ms = {"commit of a batch, median": median, "commit of a batch, p99": tail}
    return Measurement(
        job="commits, exactly once",
        size=f"{writers} writers, {each} batches of {BATCH} episodes each",
        seconds=batch_seconds[1],
        clock="wall",
        throughput=BATCH / batch_seconds[1],
        unit="episodes/s",
        peak_gb=None,
        baseline="delta-rs appends steps, with duplicates",
        baseline_seconds=batch_seconds[0],
        ratio=batch_seconds[1] / batch_seconds[0],
        waits_ms=waits_ms,
    )


_OPEN = """
import sys, time
import duckdb, polars, deltalake, lake
from lake.tables import TABLES
import lake.opening, lake.read.query
began = time.perf_counter()
snapshot = lake.open(sys.argv[1]).snapshot()
opened = time.perf_counter() - began
with snapshot.session() as session:
    for name in TABLES:
        session.query(f"SELECT count(*) FROM {name}")
print(opened, time.perf_counter() - began)
"""


def opening(folder: Path, count: int) -> None:
    """Opening a lake after many commits and compaction, and the first query on every table."""
    path = folder / "long"
    lk = lake.open(path, create=True)
    writer = lk._writer
    began = time.perf_counter()
    for number in range(count // 2):
        writer.write(_tiny(number))
        if number % 1000 == 999:
            for name in ("steps", "episodes"):
                lk.compact(name)
    wrote = time.perf_counter() - began
    for name in TABLES:
        lk.compact(name)
    runs = [
        subprocess.run([sys.executable, "-c", _OPEN, str(path)], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    opened, queried = (statistics.median(float(run.stdout.split()[i]) for run in runs) for i in range(2))
    print("| commits | written in, s | opened, s | opened and every table queried, s |\n| --- | --- | --- | --- |")
    print(f"| {count} | {wrote:.0f} | {opened:.2f} | {queried:.2f} |")


def _tiny(number: int) -> list[EpisodeRecord]:
    record = EpisodeRecord(task_id=str(number), steps=[StepRecord(state="s", action="a")])
    record.run_id = "run"
    return [record]


def size(folder: Path, rows: int) -> None:
    """Bytes of tokens and log-probabilities as the lake stores them, against delta-rs' defaults.

    Token ids follow a Zipf law over 32,000 words with repeated phrases, as text does; log-probabilities are those of
    continuous draws.
    """
    rng = np.random.default_rng(0)
    phrases = [(rng.zipf(1.2, 12) % 32_000).astype("int32") for _ in range(4000)]
    lists = [np.concatenate([phrases[i] for i in rng.integers(0, 4000, 17)])[:200].tolist() for _ in range(rows)]
    logprobs = [(-rng.exponential(0.7, 200)).tolist() for _ in range(rows)]
    number = np.arange(rows)
    frame = pl.DataFrame(
        {
            "episode_id": number // 20,
            "step_index": number % 20,
            "encoding_id": 1,
            "group_id": number // 160,
            "run_id": "run",
            "write_id": ids.fresh_id(),
            "provenance": "engine",
            "n_context": 200,
            "n_action": 200,
            "n_trained": 200,
            "has_logprobs": True,
            "prefix_length": 0,
            "context_ids": pl.Series(lists, dtype=pl.List(pl.Int32)),
            "action_ids": pl.Series(lists[::-1], dtype=pl.List(pl.Int32)),
            "action_logprobs": pl.Series(logprobs, dtype=pl.List(pl.Float32)),
            "action_mask": pl.Series([[True] * 200] * rows, dtype=pl.List(pl.Boolean)),
        }
    )
    table = TABLES["tokens"]
    data = encoding.to_arrow(conform(frame, table), table)
    write_deltalake(str(folder / "default"), data)
    store = Store(Objects(folder / "sized"))
    store.create()
    store.append("tokens", conform(frame, table))
    ours = sum(entry.bytes for entry in store.files("tokens")[1])
    theirs = sum(path.stat().st_size for path in (folder / "default").glob("*.parquet"))
    print("| rows | raw, MB | delta-rs defaults, MB | lake, MB | ratio |\n| --- | --- | --- | --- | --- |")
    print(f"| {rows} | {data.nbytes / 1e6:.1f} | {theirs / 1e6:.1f} | {ours / 1e6:.1f} | {ours / theirs:.2f} |")


def main() -> None:
    """Run all three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--each", type=int, default=50)
    parser.add_argument("--rows", type=int, default=20_000)
    add_measurement_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size(folder, args.rows)
        print()
        write_measurement(args.measurement, commits(folder, args.writers, args.each))
        if args.commits:
            print()
            opening(folder, args.commits)


if __name__ == "__main__":
    main()
