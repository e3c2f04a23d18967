"""Reward functions in the sandbox as a ratio to the same function called in this process.

    python benchmarks/bench_sandbox.py [--rows 20000] [--repeat 5]

One worker at the strongest level this machine has, a trajectory of 12 KB (20 steps), a reward that looks for the answer
with a regular expression. "JSON text" hands the messages over as they lie in a lake, "objects" as Python lists and
dicts. The two sides alternate, so that a drifting machine hits both; medians. A worker and its caller work at the same
time, so wall time needs two idle cores; processor time (of both together) does not. Prints Markdown tables for
docs/lab-log.md.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]

FUNCTION = '''
import re

ANSWER = re.compile(r"answer\\s*[:=]\\s*(\\d+)")


def reward(messages, ground_truth=None, **kwargs):
    """1.0 if the last answer that any message names is the right one."""
    found = None
    for message in messages:
        if match := ANSWER.search(message["content"]):
            found = match.group(1)
    return 1.0 if found == ground_truth else 0.0
'''
STEPS = 20
SIZES = (1, 16, 64, 128)


class Cost(NamedTuple):
    """Seconds of one run: on the wall, and of all processors."""

    wall: float
    cpu: float


def trajectory() -> list[dict[str, str]]:
    """Twenty observations and actions, 12 KB as JSON."""
    messages = []
    for step in range(STEPS):
        seen = (
            f"Observation {step}: you are in the kitchen. " + "There is a table, a chair and a locked door here. " * 5
        )
        said = f"Thought {step}: the key must be in another room, so I look for it. " * 4 + "go east"
        messages += [{"role": "user", "content": seen}, {"role": "assistant", "content": said}]
    messages[-1]["content"] += " answer: 42"
    return messages


def processor_seconds() -> float:
    """Of this process and of all its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def in_process(messages: list[dict[str, str]], rows: int) -> Cost:
    """The function alone, on messages that are objects already."""
    space: dict[str, Any] = {}
    exec(FUNCTION, space)
    reward = space["reward"]
    began, cpu_began = time.perf_counter(), processor_seconds()
    total = sum(reward(messages, ground_truth="42") for _ in range(rows))
    cost = Cost(time.perf_counter() - began, processor_seconds() - cpu_began)
    assert total == rows
    return cost


def sandboxed(path: Path, messages: Any, rows: int, size: int) -> Cost:
    """The same in a worker that has started; its end is in the processor time, its start too."""
    from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
    from pipelines.score.sandbox.pool import Sandbox

    limits = SandboxLimits(min_level="none", rows_per_batch=size)

    def batches() -> Iterator[list[dict[str, Any]]]:
        for _ in range(rows // size):
            yield [{"messages": messages, "ground_truth": "42"} for _ in range(size)]

    cpu_began = processor_seconds()
    with Sandbox(FunctionSource(str(path), "reward"), limits) as sandbox:
        sandbox.call([{"messages": messages}])
        began = time.perf_counter()
        total = sum(outcome.value for outcomes in sandbox.map(batches()) for outcome in outcomes)
        wall = time.perf_counter() - began
    assert total == rows // size * size
    return Cost(wall, processor_seconds() - cpu_began)


def compare(path: Path, rows: int, repeat: int) -> None:
    """Print the table of throughput."""
    import msgspec

    messages = trajectory()
    text = json.dumps(messages).encode()
    print(f"{len(text):,} bytes, {STEPS} steps, {rows:,} rows a run, {repeat} runs\n")
    print("| messages as | calls a batch | in process, rows/s | sandbox, rows/s | best | ratio | ratio of CPU |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, content in (("JSON text", msgspec.Raw(text)), ("objects", messages)):
        for size in SIZES:
            count = rows if size > 1 else rows // 10
            pairs = [(in_process(messages, count), sandboxed(path, content, count, size)) for _ in range(repeat)]
            alone = count / statistics.median(base.wall for base, _ in pairs)
            rates = [count / held.wall for _, held in pairs]
            wall = statistics.median(held.wall / base.wall for base, held in pairs)
            cpu = statistics.median(held.cpu / base.cpu for base, held in pairs)
            cells = f"{alone:,.0f} | {statistics.median(rates):,.0f} | {max(rates):,.0f} | {wall:.1f} | {cpu:.1f}"
            print(f"| {name} | {size} | {cells} |", flush=True)


def starts(path: Path, repeat: int) -> None:
    """Print how long the first answer of a new worker takes."""
    from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
    from pipelines.score.sandbox.pool import Sandbox

    seconds = []
    for _ in range(repeat * 4):
        with Sandbox(FunctionSource(str(path), "reward"), SandboxLimits(min_level="none")) as sandbox:
            began = time.perf_counter()
            sandbox.call([{"messages": []}])
            seconds.append(time.perf_counter() - began)
    print(f"\nA new worker's first answer: median {statistics.median(seconds) * 1e3:.0f} ms, ", end="")
    print(f"least {min(seconds) * 1e3:.0f} ms.")


def level() -> str:
    """The strongest isolation of this machine."""
    from pipelines.score.sandbox.contract import SandboxLimits
    from pipelines.score.sandbox.launch import choose_level

    return choose_level(SandboxLimits(min_level="none"))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reward.py")
        path.write_text(FUNCTION)
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
        print(f"level {level()}, load before the start {os.getloadavg()[0]:.1f}; ", end="")
        compare(path, arguments.rows, arguments.repeat)
        starts(path, arguments.repeat)


if __name__ == "__main__":
    main()
