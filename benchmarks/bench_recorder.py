"""What recording costs an agent: the time of one step (its context, an action and a reward), in the agent's own thread.

    python benchmarks/bench_recorder.py [--seconds 10] [--only-unpaused]

Percentiles over all steps, in microseconds, while what is finished is delivered to a lake in the background. Between
two steps an agent sleeps, as if it waited for a model: after a pause a processor is slow for a while, whatever it runs.
How slow, `control` shows: about the same work without a pause, done by the standard library. `bare` is the same loop
with the recorder switched off, `history` one whose steps are given the whole conversation of 20 messages. `end` is
leaving an episode, which waits until it is on the disk. Prints a Markdown table; the measurement is that of one agent
without pauses.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402

import lake  # noqa: E402

STEPS = 10
"""Of an episode."""
MESSAGE = [{"role": "tool", "content": "seat 12A is free; " * 30, "tool_call_id": "call"}]
HISTORY = [{"role": "user", "content": MESSAGE[0]["content"]}] * 20
ACTION = "I book the seat that is free. " * 10


def control(count: int, pause: float) -> list[float]:
    """Seconds of some work that has nothing to do with us."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        for _ in range(2):
            json.loads(json.dumps(MESSAGE))
            str(MESSAGE)
            repr(time.localtime())
        found.append(time.perf_counter() - began)
        time.sleep(pause)
    return sorted(found)


def agent(
    recorder: "lake.live.recorder.Recorder", episodes: int, steps: int, pause: float, seen: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of the end of each episode."""
    of_steps, of_ends = [], []
    for _ in range(episodes):
        episode = recorder.episode("task")
        for _ in range(steps):
            began = time.perf_counter()
            with episode.step(**seen) as step:
                step.action(ACTION)
                step.reward(1.0)
            of_steps.append(time.perf_counter() - began)
            time.sleep(pause)
        began = time.perf_counter()
        episode.end()
        of_ends.append(time.perf_counter() - began)
    return of_steps, of_ends


def measured(
    threads: int, episodes: int, steps: int, pause: float, seen: dict[str, Any], *, enabled: bool
) -> tuple[list[float], list[float]]:
    """The same of several agents at once."""
    of_steps: list[float] = []
    of_ends: list[float] = []

    def work() -> None:
        own_steps, own_ends = agent(recorder, episodes // threads, steps, pause, seen)
        of_steps.extend(own_steps)
        of_ends.extend(own_ends)

    with tempfile.TemporaryDirectory() as folder:
        with lake.recorder(Path(folder, "lake"), run="bench", spool=Path(folder, "spool"), enabled=enabled) as recorder:
            workers = [threading.Thread(target=work) for _ in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        if enabled:
            found = lake.open(Path(folder, "lake")).sql("SELECT count(*) FROM steps").item()
            assert found == episodes // threads * threads * steps, found
    return sorted(of_steps), sorted(of_ends)


def row(name: str, seconds: list[float]) -> str:
    """A line of the table."""
    cells = [f"{seconds[int(len(seconds) * share)] * 1e6:,.0f}" for share in (0.5, 0.99, 0.999)]
    return f"| {name} | {' | '.join(cells)} | {seconds[-1] * 1e6:,.0f} |"


def summarise(steps: list[float], ends: list[float], standard: list[float]) -> Measurement:
    """Return the figures of an agent without pauses; all three arguments are sorted seconds."""
    median, standard_median = statistics.median(steps), statistics.median(standard)
    waits = {"recorded step, median": median, "recorded step, p99": steps[int(len(steps) * 0.99)]}
    return Measurement(
        job="recording a step",
        size=f"{len(steps):,} steps of 840 characters",
        seconds=median,
        clock="wall",
        throughput=len(steps) / sum(steps),
        unit="steps/s",
        peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        baseline="two JSON round trips of the context",
        baseline_seconds=standard_median,
        ratio=median / standard_median,
        waits_ms={name: 1e3 * wait for name, wait in (waits | {"end of an episode": statistics.median(ends)}).items()},
        aims={"recorded step, median": 0.03, "recorded step, p99": 0.15},
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="about how long each loop is to sleep")
    parser.add_argument("--only-unpaused", action="store_true", help="one agent without pauses")
    add_measurement_option(parser)
    arguments = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| microseconds | p50 | p99 | p99.9 | most |\n| --- | --- | --- | --- | --- |")
    for threads, pause in ((1, 0.0), (1, 0.001), (1, 0.01), (8, 0.001))[: 1 if arguments.only_unpaused else None]:
        episodes = threads * int(arguments.seconds / STEPS / max(pause, 0.001))
        about = f"{threads} at once, {1000 * pause:g} ms between steps"
        if threads == 1:
            standard = control(episodes * STEPS, pause)
            print(row(f"{about}, control", standard), flush=True)
        for kind, seen in (("bare", MESSAGE), ("recorded", MESSAGE), ("history", HISTORY)):
            said = {"messages" if kind == "history" else "context": seen}
            steps, ends = measured(threads, episodes, STEPS, pause, said, enabled=kind != "bare")
            print(row(f"{about}, {kind}: step", steps), flush=True)
            if kind == "recorded":
                print(row(f"{about}, {kind}: end", ends), flush=True)
                if pause == 0.0:
                    write_measurement(arguments.measurement, summarise(steps, ends, standard))


if __name__ == "__main__":
    main()
