"""The training stream over 300k token rows, as a ratio to raw Parquet decode of the same columns, and beside its peers.

    python benchmarks/bench_stream.py [--rows 300000] [--repeat 3] [--peers all] [--exits 50]

Raw decode reads every row group with two threads into Arrow and drops it. The stream does what training does: decode,
gather in the order of the hashes, join advantages and behaviour log-probabilities, pack to the token budget, weigh; one
epoch, so that every row is decoded once and used once. Selecting and planning come before it, once per run, and are
timed apart. Each measurement is a process of its own; the kinds alternate.

With --peers, other packages stream the same rows out of their own formats, padded instead of packed, without
advantages, in batches of as many tokens, in their own environments (`peers.py`, `peer_stream.py`): each with its loader
in process and with two worker processes, of which the better counts.

With --exits, so many processes end in the middle of a stream, one half of them by an error; how many were aborted is
printed. Prints Markdown.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402

COLUMNS = ["context_ids", "action_ids", "action_mask", "action_logprobs"]
TOKEN_BUDGET = 16_384
PEERS = ("datasets", "litdata", "mosaicml-streaming")
WORKERS = (0, 2)

Figures = dict[str, float]


@contextmanager
def clock(figures: Figures) -> Iterator[None]:
    """Wall and processor seconds of what is done inside, with memory that was touched before.

    A virtual machine's host gives memory at its first touch, which takes longer than decoding into it.
    """
    import numpy as np

    np.ones(100_000_000, np.float64)
    began, used = time.perf_counter(), time.process_time()
    yield
    figures |= {"seconds": time.perf_counter() - began, "cpu": time.process_time() - used}


def raw_decode(path: Path) -> Figures:
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
    figures: Figures = {}
    with clock(figures), ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(read, files)) > 0
    return figures


def stream(path: Path) -> Figures:
    """One epoch of PPO batches (behaviour log-probabilities come along), consumed and dropped."""
    import lake
    from lake.judgements.credit import find_credit
    from trainer.config import TrainConfig
    from trainer.data.plan import Plan
    from trainer.data.selection import select
    from trainer.data.stream import Stream

    snapshot = lake.open(path).snapshot()
    began = time.perf_counter()
    config = TrainConfig(model="none", loss="ppo", episodes_per_step=64, token_budget=TOKEN_BUDGET, live_only=False)
    needs = config.loss.needs
    plan = Plan(select(snapshot, config, needs, source=find_credit(snapshot, None)), config)
    figures: Figures = {"plan_seconds": time.perf_counter() - began, "tokens": plan.tokens}
    with clock(figures), Stream(snapshot, plan, needs, config) as batches:
        for _, micro_batches in batches.steps():
            assert micro_batches
    return figures


TASKS: dict[str, Callable[[Path], Figures]] = {"raw_decode": raw_decode, "stream": stream}


def measure(task: str, path: Path) -> Figures:
    """Wall and processor seconds (imports left out) and peak memory in GB of one run in a fresh process."""
    command = [sys.executable, __file__, "--task", task, "--lake", str(path)]
    found: Figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def run_task(task: str, path: Path) -> None:
    """One measured run, in this process."""
    import trainer.data.stream  # noqa: F401 - imported before the clock starts

    found = TASKS[task](path)
    print(json.dumps(found | {"peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}))


def write_rows(path: Path, to: Path) -> float:
    """All token rows as flat arrays for `peer_stream.py`.

    Returns:
        Mean number of tokens of a row.
    """
    import numpy as np
    import polars as pl

    import lake

    columns = ("context_ids", "action_ids", "action_logprobs")
    frame = lake.open(path).snapshot().scan("tokens").select(columns).collect()
    ids = frame.select(pl.concat_list("context_ids", "action_ids").alias("ids"))["ids"]
    context, action = (frame[name].list.len().to_numpy().astype(np.int64) for name in columns[:2])
    np.savez(
        to,
        ids_T=ids.explode().to_numpy(),
        starts_R=np.append(0, np.cumsum(context + action)),
        n_context_R=context,
        logprobs_A=frame["action_logprobs"].explode().to_numpy(),
        action_starts_R=np.append(0, np.cumsum(action)),
    )
    return float((context + action).mean())


def measure_peer(name: str, rows: Path, batch: int, repeat: int, seconds: float) -> tuple[str, Figures]:
    """A peer's better setting by median rows a second, with its figures; conversion comes before the clock.

    Raises:
        PeerError: it could not be installed, or failed.
    """
    from peers import PeerError, environment, python_of

    script = Path(__file__).with_name("peer_stream.py")
    python = python_of(name)

    def call(what: str, *arguments: object) -> str:
        command = [python, script, what, name, *arguments]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=environment())
        if done.returncode:
            msg = f"{name} failed: {done.stderr.strip().splitlines()[-1]}"
            raise PeerError(msg)
        return done.stdout

    found = {}
    with tempfile.TemporaryDirectory(dir=rows.parent) as folder:
        call("convert", "--rows", rows, "--folder", folder)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        for workers in WORKERS:
            arguments = ("--folder", folder, "--batch", batch, "--workers", workers, "--seconds", seconds)
            runs = [json.loads(call("read", *arguments).splitlines()[-1]) for _ in range(repeat)]
            rates = {key: statistics.median(run[key] / run["seconds"] for run in runs) for key in ("rows", "tokens")}
            found["in process" if workers == 0 else f"{workers} workers"] = rates | {"mb": size / 1e6}
            print(f"{name}, {workers} workers: {runs}", file=sys.stderr)
    return max(found.items(), key=lambda item: item[1]["rows"])


def print_peers(options: argparse.Namespace, path: Path, measurement: Measurement) -> None:
    """One line for each peer, and ours."""
    from peers import PeerError

    rows_per_second = options.rows / measurement.seconds
    rows = path.parent / "rows.npz"
    batch = round(TOKEN_BUDGET / write_rows(path, rows))
    lines = [f"| trajlake | packed, 2 threads | {rows_per_second:,.0f} | {measurement.throughput:.2f} | 1 |"]
    for name in PEERS if options.peers == ["all"] else options.peers:
        try:
            setting, rates = measure_peer(name, rows, batch, options.repeat, options.peer_seconds)
        except PeerError as error:
            lines.append(f"| {name} | {error} | | | |")
            continue
        figures = f"{rates['rows']:,.0f} | {rates['tokens'] / 1e6:.2f} | {rows_per_second / rates['rows']:.1f}"
        lines.append(f"| {name} | padded, {setting} | {figures} |")
    print(f"\nBatches of {batch} rows:\n")
    print("| package | batches | rows/s | million tokens/s | ours is so many times as fast |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(lines))


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


def print_table(rows: int, pairs: list[list[Figures]]) -> Measurement:
    """Print medians over the repetitions, and return them."""

    def median(number: int, name: str) -> float:
        return statistics.median(pair[number][name] for pair in pairs)

    def speed(name: str) -> float:
        return statistics.median(pair[0][name] / pair[1][name] for pair in pairs)

    ours = median(1, "seconds")
    print("| rows | | raw decode | stream | speed of stream / raw decode |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| {rows:,} | wall, s | {median(0, 'seconds'):.2f} | {ours:.2f} | {speed('seconds'):.2f} |")
    print(f"| | processor, s | {median(0, 'cpu'):.2f} | {median(1, 'cpu'):.2f} | {speed('cpu'):.2f} |")
    peak = max(pair[1]["peak_gb"] for pair in pairs)
    print(f"\nPlan: {median(1, 'plan_seconds'):.2f} s. Peak of the stream: {peak:.2f} GB.")
    return Measurement(
        job="training stream, PPO batches",
        size=f"{rows:,} token rows",
        seconds=ours,
        clock="wall",
        throughput=median(1, "tokens") / ours / 1e6,
        unit="million tokens/s",
        peak_gb=peak,
        baseline="two threads decode the columns",
        baseline_seconds=median(0, "seconds"),
        ratio=statistics.median(pair[1]["seconds"] / pair[0]["seconds"] for pair in pairs),
        aims={"ratio": 1.67},
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--exits", type=int, default=0)
    parser.add_argument("--peers", nargs="+", choices=(*PEERS, "all"), default=())
    parser.add_argument("--peer-seconds", type=float, default=20.0, help="of a peer's epoch, at most")
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--leave", choices=("end", "error"))
    parser.add_argument("--lake", type=Path)
    add_measurement_option(parser)
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
        pairs = [[measure(task, path) for task in TASKS] for _ in range(options.repeat)]
        measurement = print_table(options.rows, pairs)
        write_measurement(options.measurement, measurement)
        if options.peers:
            print_peers(options, path, measurement)
        if options.exits:
            print(f"\n{aborted(path, options.exits)} of {options.exits} process exits aborted")


if __name__ == "__main__":
    main()
