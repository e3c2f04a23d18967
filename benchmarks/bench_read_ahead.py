"""How often a model waits for a slow store, and how long: a stream that reads ahead of it.

    python benchmarks/bench_read_ahead.py [--read-ms 50] [--model-ms 40] [--threads 1 4]

A lake of 40 tasks in 16 writes; reading a row group takes so much longer than from the disk, and the model so long for
a step. Baseline: reading alone, which a stream that reads when it is asked would wait for. Prints a Markdown table.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from testkit.training import config, token_episodes, token_lake  # noqa: E402
from trainer.data.plan import Plan  # noqa: E402
from trainer.data.row_groups import RowGroupReader  # noqa: E402
from trainer.data.selection import select  # noqa: E402
from trainer.data.stream import Stream  # noqa: E402
from trainer.losses import LOSSES  # noqa: E402

LONG_S = 0.025
"""A wait that counts."""


def waits(lk: Any, threads: int, model_s: float) -> list[float]:
    """Seconds for which each optimizer step but the first was waited for."""
    needs = LOSSES["sft"]().needs
    chosen = config(episodes_per_step=1, epochs=4, cache_bytes=5000, prefetch=2, read_threads=threads)
    snapshot = lk.snapshot()
    plan = Plan(select(snapshot, chosen, needs), chosen)
    waits_s = []
    with Stream(snapshot, plan, needs, chosen) as stream:
        steps = iter(stream.steps())
        asked = time.perf_counter()
        for _ in steps:
            waits_s.append(time.perf_counter() - asked)
            time.sleep(model_s)
            asked = time.perf_counter()
    return waits_s[1:]


def main() -> None:
    """Make the lake, slow its reading down, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--read-ms", type=float, default=50.0)
    parser.add_argument("--model-ms", type=float, default=40.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    read, reads = RowGroupReader.read, [0]

    def slow(self: RowGroupReader, *args: Any) -> Any:
        reads[0] += 1
        time.sleep(arguments.read_ms / 1000)
        return read(self, *args)

    RowGroupReader.read = slow  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        lk = token_lake(Path(folder), token_episodes(tasks=40), writes=16)
        print("| threads that read | steps | row groups read | waits over 25 ms | their sum, s | reading alone, s |")
        print("| --- | --- | --- | --- | --- | --- |")
        for threads in arguments.threads:
            reads[0] = 0
            waits_s = waits(lk, threads, arguments.model_ms / 1000)
            long = [one for one in waits_s if one > LONG_S]
            alone = reads[0] * arguments.read_ms / 1000 / threads
            print(f"| {threads} | {len(waits_s) + 1} | {reads[0]} | {len(long)} | {sum(long):.2f} | {alone:.2f} |")


if __name__ == "__main__":
    main()
