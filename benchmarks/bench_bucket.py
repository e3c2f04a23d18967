"""What the ranks of one machine fetch of a lake in a bucket in one epoch, and when their first batch comes.

    python benchmarks/bench_bucket.py [--rows 40000] [--ranks 4] [--latency-ms 0]

The bucket is moto on loopback, in a process of its own: it says how many requests and bytes, not how fast; a latency is
slept before each answer. Tokens take several times the memory that they may have (`cache_bytes`), so they are read in
windows. Each rank is a process; all of them run at once: without a disk cache, with an empty one, and with the one that
this left behind. Seconds count from the opening of the lake, imports left out. Prints Markdown for docs/lab-log.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "tests")]

CACHE_BYTES = 16 << 20
EPISODES_PER_STEP = 16
_LATE = """
import sys, time
from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Application
at_once = Application.__call__
def late(self, *request):
    time.sleep(float(sys.argv[1]) / 1000)
    return at_once(self, *request)
Application.__call__ = late
"""


def one_rank(uri: str, rank: int, ranks: int, disk_bytes: int) -> dict[str, Any]:
    """An epoch of a rank: requests and bytes of token files, seconds to plan, first batch and end, and the batches."""
    import hashlib

    import lake
    from lake.storage.buckets import Bucket
    from trainer.config import TrainConfig
    from trainer.data.plan import Plan
    from trainer.data.selection import select
    from trainer.data.stream import Stream

    counts = {"requests": 0, "bytes": 0}
    read = Bucket.read

    def counted(self: Bucket, path: str, start: int, end: int) -> bytes:
        counts["requests"] += 1
        counts["bytes"] += end - start
        return read(self, path, start, end)

    settings = {"cache_bytes": CACHE_BYTES, "disk_cache_bytes": disk_bytes, "episodes_per_step": EPISODES_PER_STEP}
    known = {name: value for name, value in settings.items() if name in TrainConfig.model_fields}
    config = TrainConfig(model="none", loss="sft", token_budget=16_384, **known)
    began = time.perf_counter()
    snapshot = lake.open(uri).snapshot()
    plan = Plan(select(snapshot, config, config.loss.needs), config)
    Bucket.read = counted  # type: ignore[method-assign]
    digest, planned, first = hashlib.blake2b(digest_size=8), time.perf_counter() - began, 0.0
    with Stream(snapshot, plan, config.loss.needs, config, rank=rank, world_size=ranks) as stream:
        for _, batches in stream.steps():
            first = first or time.perf_counter() - began
            for batch in batches:
                digest.update(batch.input_ids_T.numpy().tobytes())
    seconds = time.perf_counter() - began
    times = {"planned": planned, "first": first, "seconds": seconds}
    return counts | times | {"batches": digest.hexdigest(), "plan": plan.plan_hash}


def all_ranks(uri: str, ranks: int, disk_bytes: int) -> list[dict[str, Any]]:
    """The figures of ranks that run at once."""
    command = [sys.executable, __file__, "--lake", uri, "--ranks", str(ranks), "--disk-bytes", str(disk_bytes)]
    started = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(ranks)
    ]
    return [dict(json.loads(process.communicate()[0])) for process in started]


def copied(path: Path, uri: str) -> int:
    """Copy a lake into a bucket; bytes of its token files."""
    from lake.storage.objects import Objects

    target = Objects(uri)
    for file in path.rglob("*"):
        if file.is_file():
            target.put(str(file.relative_to(path)), file.read_bytes())
    return sum(file.stat().st_size for file in (path / "tokens").rglob("*.parquet"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--lake", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--disk-bytes", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lake is not None:
        print(json.dumps(one_rank(arguments.lake, arguments.rank, arguments.ranks, arguments.disk_bytes)))
        return
    from synthetic import tokens_lake

    from testkit.object_store import _SERVER, new_bucket

    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _LATE + _SERVER, str(arguments.latency_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    store = new_bucket(server.stdout.readline().strip())
    os.environ |= store.environment
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRAJLAKE_CACHE"] = folder
            tokens_lake(Path(folder, "lake"), arguments.rows)
            table = copied(Path(folder, "lake"), store.root)
            print(f"Token files: {table / 1e6:.1f} MB; {arguments.ranks} ranks.\n")
            print("| | requests of a rank | MB of a rank | MB of all | plan, s | first batch, s | epoch, s |")
            print("| --- | --- | --- | --- | --- | --- | --- |")
            runs = {"no disk cache": 0, "an empty disk cache": 8 << 30, "the same again": 8 << 30}
            batches = set()
            for name, disk_bytes in runs.items():
                rank_counts = all_ranks(store.root, arguments.ranks, disk_bytes)
                batches.add(tuple((one["batches"], one["plan"]) for one in rank_counts))
                sums = {key: sum(one[key] for one in rank_counts) for key in ("requests", "bytes")}
                most = [max(one[key] for one in rank_counts) for key in ("planned", "first", "seconds")]
                print(
                    f"| {name} | {sums['requests'] / arguments.ranks:,.0f} "
                    f"| {sums['bytes'] / arguments.ranks / 1e6:,.1f} "
                    f"| {sums['bytes'] / 1e6:,.1f} | {' | '.join(f'{one:.2f}' for one in most)} |",
                    flush=True,
                )
            assert len(batches) == 1, "batches differ"
            print(f"\nBatches of rank 0: {batches.pop()[0][0]}.")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
