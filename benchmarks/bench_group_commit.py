"""Fleets: many processes of one machine that record into one lake, through a committer and without.

    python benchmarks/bench_group_commit.py [--writers 1,8,64] [--batches 640] [--where local,s3] [--repeat 3]
        [--threads 1]
                                     [--commit direct,group,committer]

Each writer is a process, or a thread of one, with a lake and a job of its own; it records groups of eight episodes of
ten steps until its share of the batches is done. Before the clock starts every writer has opened the lake. Commits are
`direct`, by each writer; by `group`, once writers are in each other's way; or by a `committer` that is there from the
start, also for a writer that is alone. Runs of these alternate. The bucket is in an S3 server (moto) on loopback, which
works on the same cores as the writers. Fairness is the rate of the slowest writer over that of the fastest. Prints a
Markdown table for docs/lab-log.md.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / part) for part in ("", "tests"))]

from bench_lake import BATCH, STEPS, batch  # noqa: E402

import lake  # noqa: E402
from lake.storage.objects import Objects  # noqa: E402
from lake.write.group_commit.protocol import MeetingPoint  # noqa: E402
from lake.write.jobs import Job  # noqa: E402
from testkit import object_store  # noqa: E402
from testkit.committers import start_committer  # noqa: E402

COMMIT = {"direct": False, "group": True, "committer": True}
"""How to commit -> whether in groups."""
_PRELOADED = ["lake.write.writer", "lake.write.jobs", "lake.storage.encoding", "polars", "bench_lake"]


@contextmanager
def root(where: str) -> Iterator[tuple[str, dict[str, str] | None]]:
    """A new lake's address, and the options that reach it."""
    with tempfile.TemporaryDirectory() as folder:
        if where == "local":
            yield f"{folder}/lake", None
            return
        command = [sys.executable, "-W", "ignore", "-c", object_store._SERVER]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/fleet", method="PUT")).close()
            yield "s3://fleet/lake", object_store.options(endpoint)
            server.stdin.close()


@contextmanager
def committer(uri: str, options: Mapping[str, str] | None) -> Iterator[None]:
    """A committer that stays, because this process is there as a writer."""
    objects = Objects(uri, options)
    present = MeetingPoint(objects).register_writer()
    start_committer(objects)
    try:
        yield
    finally:
        os.close(present)


def work(
    uri: str,
    options: dict[str, str] | None,
    writers: range,
    each: int,
    group_commit: bool,
    gate: object,
    out: object,
    turn: object,
) -> None:
    """Writers of a process, one a thread: the seconds of each batch, and those from the start to its last."""
    # The ends of jobs race for `jobs`, which is not what is measured: they come one after another, and compact nothing.
    with ExitStack() as ended, ExitStack() as stack:
        # A lake each: none of them knows of the others.
        how = {"storage_options": options, "compact_above": 0, "group_commit": group_commit}
        lakes = [lake.open(uri, **how) for _ in writers]
        numbered = zip(lakes, writers, strict=True)
        jobs = [stack.enter_context(lk.job(kind="collect", run_id=f"run {n}")) for lk, n in numbered]

        def record(number: int, job: Job) -> tuple[list[float], float]:
            took = []
            for n in range(each):
                began = time.perf_counter()
                assert job.record(batch(number, n)).new == BATCH
                took.append(time.perf_counter() - began)
            return took, time.perf_counter() - start

        with ThreadPoolExecutor(len(writers)) as pool:
            gate.wait()  # type: ignore[attr-defined]
            start = time.perf_counter()
            found = list(pool.map(record, writers, jobs))
        out.put(found)  # type: ignore[attr-defined]
        gate.wait()  # type: ignore[attr-defined]
        ended.enter_context(turn)  # type: ignore[arg-type]


def race(where: str, commit: str, writers: int, batches: int, size: int) -> list[float]:
    """Commits of `episodes` a second, episodes a second, median and 99th percentile in ms, fairness."""
    each, in_groups = batches // writers, COMMIT[commit]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with root(where) as (uri, options), ExitStack() as stack:
        lk = lake.open(uri, create=True, storage_options=options)
        if commit == "committer":
            stack.enter_context(committer(uri, options))
        before = lk.snapshot().versions["episodes"]
        parts = [range(first, min(first + size, writers)) for first in range(0, writers, size)]
        gate, out, turn = context.Barrier(len(parts) + 1), context.Queue(), context.Lock()
        processes = [
            context.Process(target=work, args=(uri, options, part, each, in_groups, gate, out, turn)) for part in parts
        ]
        for process in processes:
            process.start()
        gate.wait()
        found = [one for _ in parts for one in out.get()]
        commits = lk.snapshot().versions["episodes"] - before
        gate.wait()
        for process in processes:
            process.join()
        assert lk.scan("episodes").collect()["episode_id"].n_unique() == writers * each * BATCH
        assert lk.scan("steps").collect().height == writers * each * BATCH * STEPS
    took = sorted(seconds for one, _ in found for seconds in one)
    lasts = [last for _, last in found]
    return [
        commits / max(lasts),
        len(took) * BATCH / max(lasts),
        statistics.median(took) * 1e3,
        statistics.quantiles(took, n=100)[98] * 1e3,
        min(lasts) / max(lasts),
    ]


def main() -> None:
    """Print the table; where runs are repeated, the medians of each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writers", default="1,8,64")
    parser.add_argument("--batches", type=int, default=640)
    parser.add_argument("--where", default="local,s3")
    parser.add_argument("--commit", default="direct,group")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="writers a process: for machines with few cores")
    args = parser.parse_args()
    print("| lake | writers | commits by | commits/s | episodes/s | median, ms | 99th percentile, ms | fairness |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for where in args.where.split(","):
        for writers in map(int, args.writers.split(",")):
            runs = {commit: [] for commit in args.commit.split(",")}
            for _ in range(args.repeat):
                for commit, figures in runs.items():
                    figures.append(race(where, commit, writers, args.batches, args.threads))
                    print(where, writers, commit, *(f"{figure:.2f}" for figure in figures[-1]), file=sys.stderr)
            for commit, figures in runs.items():
                rate, episodes, middle, tail, fairness = map(statistics.median, zip(*figures, strict=True))
                print(
                    f"| {where} | {writers} | {commit} | {rate:.1f} | {episodes:,.0f} | {middle:,.0f} | {tail:,.0f} | "
                    f"{fairness:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
